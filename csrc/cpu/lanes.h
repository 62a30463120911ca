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
  PanelIntervals panel{lo, hi, {}, true};
  for (int64_t r = 0; r < lanes; ++r) {
    KeyInterval interval{0, 0};
    if (r < rows) {
      interval = mask.of(batch, first_token + (first_row + r) / group);
      if (interval.hi <= interval.lo) interval = {interval.lo, interval.lo};
      if (r == 0) panel.corners.first = interval;
      if (interval.lo < panel.corners.first.lo) panel.corners.first.lo = interval.lo;
      if (interval.hi < panel.corners.first.hi) panel.corners.first.hi = interval.hi;
      if (r == 0 || interval.lo > panel.corners.last.lo) panel.corners.last.lo = interval.lo;
      if (r == 0 || interval.hi > panel.corners.last.hi) panel.corners.last.hi = interval.hi;
      if (interval.hi > interval.lo) panel.empty = false;
    }
    lo[r] = int32_t(interval.lo);
    hi[r] = int32_t(interval.hi);
  }
  return panel;
}

// Rows of `to` from a panel [dim][lanes], each lane times its row's factor.
template <int Lanes, Order order = in_order>
void unpack_lanes(const Rows& to, int64_t first, int64_t count, const float* panel, int64_t dim, const float* factor) {
#if TPK_LEVEL >= TPK_LEVEL_AVX512
  alignas(64) float rows[16][256];
  for (int64_t lane = 0; lane < Lanes; lane += 16) {
    if (order == in_order && lane >= count) break;
    for (int64_t d = 0; d < dim; d += 16) {
      __m512i block[16];
      for (int i = 0; i < 16; ++i)
        block[i] = d + i < dim ? _mm512_castps_si512(load(panel + (d + i) * Lanes + lane)) : _mm512_setzero_si512();
      transpose_16x16(block);
      for (int i = 0; i < 16; ++i) store(rows[i] + d, _mm512_castsi512_ps(block[i]) * splat(factor[order(lane + i)]));
    }
    for (int64_t i = 0; i < 16; ++i)
      if (const int64_t row = order(lane + i); row < count) store_row(const_cast<char*>(to.row(first + row)), rows[i], dim, to.dtype);
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
