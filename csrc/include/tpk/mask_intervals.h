// include/tpk/mask_intervals.h: the one mask of the project: every query row sees one interval of keys.
// Row at absolute position p sees keys [lo(p), hi(p)). Both ends never decrease with p, so a tile of the score matrix is skipped, full
// or partial by a look at its first and last row. Pure functions, shared by host, device and bindings. Trap: p may be negative (more
// queries than keys, no cache); such rows see nothing and hi is 0.
#pragma once

#include <cstdint>

namespace tpk {

struct KeyInterval {
  int64_t lo = 0, hi = 0; // empty when hi <= lo
};

struct MaskIntervals {
  bool causal = true;
  int64_t window_left = -1, window_right = -1; // -1: no limit
  const int32_t* document_starts = nullptr;    // [batch, tokens] of the query rows, or null
  int64_t document_batch_stride = 0;
  int64_t start = 0; // absolute position of query token 0
  int64_t keys = 0;  // keys [0, keys) exist

  constexpr KeyInterval of(int64_t batch, int64_t token) const {
    const int64_t position = start + token;
    int64_t lo = 0, hi = keys;
    if (causal && hi > position + 1) hi = position + 1;
    if (window_right >= 0 && hi > position + window_right + 1) hi = position + window_right + 1;
    if (window_left >= 0 && lo < position - window_left) lo = position - window_left;
    if (document_starts != nullptr) {
      const int64_t document = document_starts[batch * document_batch_stride + token];
      if (lo < document) lo = document;
    }
    if (hi < 0) hi = 0;
    return {lo, hi};
  }
};

// Corners of a run of query rows: the first row has the smallest ends, the last row the largest.
struct IntervalCorners {
  KeyInterval first, last;

  static constexpr IntervalCorners of(const MaskIntervals& mask, int64_t batch, int64_t first_token, int64_t end_token) {
    return {mask.of(batch, first_token), mask.of(batch, end_token - 1)};
  }
  // No row of the run sees a key of [begin, end).
  constexpr bool skipped(int64_t begin, int64_t end) const { return end <= first.lo || begin >= last.hi || last.hi <= first.lo; }
  // Every row of the run sees every key of [begin, end).
  constexpr bool full(int64_t begin, int64_t end) const { return begin >= last.lo && end <= first.hi; }
};

} // namespace tpk
