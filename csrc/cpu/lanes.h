// cpu/lanes.h: the query rows of one task as panels of lanes: their key intervals, per lane and per panel.
// Trap: padding lanes see nothing, but they must not make a tile partial, so they stay out of the panel's corners.
#pragma once

#include "arena.h"
#include "rows.h"
#include "tpk/tiling.h"
#include "transpose.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

struct PanelIntervals {
  const int32_t *lo = nullptr, *hi = nullptr; // per lane
  IntervalCorners corners;
  bool empty = true; // no row sees any key

  bool skipped(int64_t begin, int64_t end) const { return empty || corners.skipped(begin, end); }
  bool full(int64_t begin, int64_t end) const { return corners.full(begin, end); }
};

// Row r of the task is token first_token + r / group.
inline PanelIntervals panel_intervals(const MaskIntervals& mask, int64_t batch, int64_t group, int64_t first_token, int64_t first_row,
                                      int64_t rows, int lanes, int32_t* lo, int32_t* hi) {
  IntervalCorners corners;
  bool empty = true;
  int64_t r = 0, token = first_token + first_row / group, end = group - first_row % group; // first row of the next token
  for (; r < rows; ++token, end += group) {
    KeyInterval interval = mask.of(batch, token);
    if (interval.hi <= interval.lo) interval.hi = interval.lo;
    if (r == 0) corners.first = interval;
    corners.last = interval; // the ends never decrease
    empty &= interval.hi == interval.lo;
    for (; r < end && r < rows; ++r) {
      lo[r] = int32_t(interval.lo);
      hi[r] = int32_t(interval.hi);
    }
  }
  for (; r < lanes; ++r) lo[r] = hi[r] = 0;
  return {lo, hi, corners, empty};
}

#if TPK_LEVEL >= TPK_LEVEL_AVX512
// The first `left` of 16 elements, or all.
TPK_INLINE void store_elements(char* to, Vec x, int64_t left, DType dtype) {
  const __mmask16 mask = left >= 16 ? 0xffff : __mmask16((1u << left) - 1u);
  if (dtype == DType::float32) return _mm512_mask_storeu_ps(to, mask, x);
  if (dtype == DType::float16) return _mm256_mask_storeu_epi16(to, mask, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#if TPK_LEVEL >= TPK_LEVEL_AVX512_BF16
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(x));
#else
  float each[16];
  store(each, x);
  store_row(to, each, left < 16 ? left : 16, dtype);
#endif
}
#endif

// Rows of `to` from a panel [dim][lanes], each lane times its row's factor.
template <int Lanes, Order order = in_order>
void unpack_lanes(const Rows& to, int64_t first, int64_t count, const float* panel, int64_t dim, const float* factor) {
#if TPK_LEVEL >= TPK_LEVEL_AVX512
  for (int64_t lane = 0; lane < Lanes; lane += 16) {
    if (order == in_order && lane >= count) break;
    for (int64_t d = 0; d < dim; d += 16) {
      __m512i block[16];
      for (int i = 0; i < 16; ++i)
        block[i] = d + i < dim ? _mm512_castps_si512(load(panel + (d + i) * Lanes + lane)) : _mm512_setzero_si512();
      transpose_16x16(block);
      for (int i = 0; i < 16; ++i) {
        const int64_t row = order(lane + i);
        if (row >= count) continue;
        store_elements(const_cast<char*>(to.row(first + row)) + d * dtype_bytes(to.dtype),
                       _mm512_castsi512_ps(block[i]) * splat(factor[row]), dim - d, to.dtype);
      }
    }
  }
#else
  float row[256];
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t d = 0; d < dim; ++d) row[d] = panel[d * Lanes + r] * factor[r];
    store_row(const_cast<char*>(to.row(first + r)), row, dim, to.dtype);
  }
#endif
}

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
