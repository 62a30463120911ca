// cpu/forward.h: prefix attention forward for a run of query tokens of one (batch, KV head).
// Per key tile (absolute, ascending): pack K and V once, then for each panel of query rows S^T = K Q^T, online softmax over the lanes,
// O^T = alpha O^T + V^T P^T. All panels of the task see a packed tile, so packing is paid once per task; O^T of all panels lives in L2.
// Trap: a key whose V is not finite is packed as 0 and given back, after the product, only to the rows that see it (0 * NaN is NaN).
#pragma once

#include <cmath>

#include "lanes.h"
#include "softmax.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

template <class Core> struct Forward {
  using Element = typename Core::Element;
  static constexpr int L = Core::lanes;

  struct Memory {
    int64_t rows, panels, depth, value_rows;
    Element *q, *k, *v, *p;
    float *o, *reference, *sum, *scores, *alpha;
    int32_t *lo, *hi;
    PanelIntervals* intervals;
    int64_t bytes;

    Memory(const ForwardParams& params, int64_t tokens, std::byte* block) {
      const AttentionShape& s = params.shape;
      rows = tokens * s.group();
      panels = round_up(rows, L) / L;
      depth = round_up(s.head_dim, Core::depth_unit);
      value_rows = round_up(s.value_head_dim, Core::row_unit);
      Arena arena{block};
      q = arena.take<Element>(panels * depth * L);
      k = arena.take<Element>(forward_key_tile * depth);
      v = arena.take<Element>(forward_key_tile * value_rows);
      scores = arena.take<float>(forward_key_tile * L);
      p = Core::in_place ? reinterpret_cast<Element*>(scores) : arena.take<Element>(forward_key_tile * L);
      o = arena.take<float>(panels * value_rows * L);
      reference = arena.take<float>(panels * L);
      sum = arena.take<float>(panels * L);
      alpha = arena.take<float>(L);
      lo = arena.take<int32_t>(panels * L);
      hi = arena.take<int32_t>(panels * L);
      intervals = arena.take<PanelIntervals>(panels);
      bytes = arena.bytes;
    }
  };

  static int64_t bytes(const ForwardParams& params, int64_t tokens) { return Memory(params, tokens, nullptr).bytes; }

  static void run(const ForwardParams& params, HeadIndex head, int64_t first_token, int64_t end_token, std::byte* block) {
    const AttentionShape& shape = params.shape;
    Memory memory(params, end_token - first_token, block);
    const int64_t group = shape.group();
    const Rows q = Rows::of(params.q, shape.dtype, head.batch, head.kv_head, group);
    const Rows k = Rows::of(params.k, shape.dtype, head.batch, head.kv_head, 1);
    const Rows v = Rows::of(params.v, shape.dtype, head.batch, head.kv_head, 1);
    // The sign of the scale goes into q (exactly), so that a maximum of scores stays a maximum; scale 0 makes q 0.
    const float sign = params.scale > 0 ? 1.0f : params.scale < 0 ? -1.0f : 0.0f;
    const float scale = params.scale == 0 ? 1.0f : std::fabs(params.scale);
    const float scale_log2 = params.softcap > 0 ? 1.0f : scale * log2_of_e;
    [[maybe_unused]] typename Core::Session session;

    int64_t first_key = shape.keys, end_key = 0;
    for (int64_t panel = 0; panel < memory.panels; ++panel) {
      const int64_t row = panel * L, count = memory.rows - row < L ? memory.rows - row : L;
      Core::pack_lanes(memory.q + panel * memory.depth * L, q, first_token * group + row, count, shape.head_dim, sign);
      const PanelIntervals& interval = memory.intervals[panel] =
          panel_intervals(params.mask, head.batch, group, first_token, row, count, L, memory.lo + row, memory.hi + row);
      if (interval.empty) {
        std::memset(memory.o + panel * memory.value_rows * L, 0, memory.value_rows * L * sizeof(float));
        continue;
      }
      if (interval.corners.first.lo < first_key) first_key = interval.corners.first.lo;
      if (interval.corners.last.hi > end_key) end_key = interval.corners.last.hi;
    }
    std::memset(memory.sum, 0, memory.panels * L * sizeof(float));
    for (int64_t i = 0; i < memory.panels * L; ++i) memory.reference[i] = minus_infinity;

    walk({params, head, k, v, scale, scale_log2, first_key, end_key}, memory);
    for (int64_t panel = 0; panel < memory.panels; ++panel) finish(params, head, first_token, panel, memory);
  }

  struct Walk {
    const ForwardParams& params;
    HeadIndex head;
    Rows k, v;
    float scale, scale_log2;
    int64_t first_key, end_key;
  };

  // Chunks of a key tile that some row of a panel sees, counted from the tile.
  struct KeyRange {
    int64_t begin = 0, end = 0;

    static KeyRange of(const PanelIntervals& interval, int64_t tile) {
      if (interval.skipped(tile, tile + forward_key_tile)) return {};
      const int64_t lowest = interval.corners.first.lo - tile, highest = interval.corners.last.hi - tile;
      return {lowest > 0 ? lowest / key_chunk * key_chunk : 0,
              highest < forward_key_tile ? round_up(highest, key_chunk) : forward_key_tile};
    }
  };

  // Softcap and mask of the scores [begin, end) of a panel; scores points at the tile's first key.
  static void prepare_scores(const Walk& w, const PanelIntervals& interval, int64_t tile, KeyRange range, float* scores) {
    if (w.params.softcap > 0) cap_scores(scores + range.begin * L, nullptr, (range.end - range.begin) * L, w.scale, w.params.softcap);
    for (int64_t chunk = range.begin; chunk < range.end; chunk += key_chunk)
      if (!interval.full(tile + chunk, tile + chunk + key_chunk))
        mask_scores<L>(scores + chunk * L, key_chunk, int32_t(tile + chunk), interval.lo, interval.hi);
  }

  static int64_t keys_in_tile(const Walk& w, int64_t tile) {
    const int64_t left = w.params.shape.keys - tile;
    return left < forward_key_tile ? left : forward_key_tile;
  }

  static void walk(const Walk& w, const Memory& memory) {
    const AttentionShape& shape = w.params.shape;
    const auto k_view = Core::rows_view(memory.k, memory.depth);
    const auto v_view = Core::columns_view(memory.v, forward_key_tile);
    for (int64_t tile = w.first_key / forward_key_tile * forward_key_tile; tile < w.end_key; tile += forward_key_tile) {
      const int64_t count = keys_in_tile(w, tile);
      Core::pack_rows(memory.k, w.k, tile, count, forward_key_tile, shape.head_dim);
      const bool bad = Core::pack_columns(memory.v, w.v, tile, count, forward_key_tile, shape.value_head_dim);
      for (int64_t panel = 0; panel < memory.panels; ++panel) {
        const PanelIntervals& interval = memory.intervals[panel];
        const KeyRange range = KeyRange::of(interval, tile);
        const int64_t keys = range.end - range.begin;
        if (keys == 0) continue;
        float* scores = memory.scores + range.begin * L;
        Core::template multiply<Update::store>(scores, L, k_view.rows_from(range.begin), memory.q + panel * memory.depth * L, L, keys,
                                               memory.depth);
        prepare_scores(w, interval, tile, range, memory.scores);
        Element* p = memory.p + range.begin * L;
        const bool rescale =
            online_softmax<Core>(scores, p, keys, w.scale_log2, {memory.reference + panel * L, memory.sum + panel * L, memory.alpha});
        float* o = memory.o + panel * memory.value_rows * L;
        const auto columns = v_view.depth_from(range.begin);
        if (tile <= interval.corners.first.lo) // the panel's first tile: nothing was accumulated before
          Core::template multiply<Update::store>(o, L, columns, p, L, memory.value_rows, keys);
        else if (rescale)
          Core::template multiply<Update::scale_add>(o, L, columns, p, L, memory.value_rows, keys, L, memory.alpha);
        else
          Core::template multiply<Update::add>(o, L, columns, p, L, memory.value_rows, keys);
        if (bad) add_bad_values(o, w.v, interval, tile, count, shape.value_head_dim);
      }
    }
  }

  // Rows that see a key with a non-finite value get that value, whatever its probability.
  static __attribute__((noinline)) void add_bad_values(float* o, const Rows& v, const PanelIntervals& interval, int64_t tile, int64_t count,
                                                       int64_t dim) {
    float row[256];
    for (int64_t key = tile; key < tile + count; ++key) {
      load_row(row, v.row(key), dim, v.dtype);
      for (int64_t d = 0; d < dim; ++d) {
        if (finite_bits(row[d])) continue;
        for (int l = 0; l < L; ++l)
          if (key >= interval.lo[l] && key < interval.hi[l]) o[d * L + l] += row[d];
      }
    }
  }

  static void finish(const ForwardParams& params, HeadIndex head, int64_t first_token, int64_t panel, const Memory& memory) {
    const AttentionShape& shape = params.shape;
    const int64_t group = shape.group();
    const Rows out = Rows::of(params.out, shape.dtype, head.batch, head.kv_head, group);
    const float* o = memory.o + panel * memory.value_rows * L;
    float inverse[L];
    const int64_t rows = memory.rows - panel * L < L ? memory.rows - panel * L : L;
    for (int64_t r = 0; r < L; ++r) {
      inverse[r] = 0.0f;
      if (r >= rows) continue;
      const int64_t row = panel * L + r, token = first_token + row / group, query_head = head.kv_head * group + row % group;
      float* lse = params.lse + (head.batch * shape.query_heads + query_head) * shape.tokens + token;
      const bool sees = memory.hi[row] > memory.lo[row];
      const float top = memory.reference[row], sum = memory.sum[row];
      if (params.sinks != nullptr) {
        const double sink = params.sinks[query_head];
        if (!sees) {
          *lse = float(sink);
          continue;
        }
        const double own = double(top) * 0.69314718055994530942, reference = own > sink ? own : sink;
        const double weight = std::exp(own - reference), total = sum * weight + std::exp(sink - reference);
        *lse = float(reference + std::log(total));
        inverse[r] = float(weight / total);
      } else if (!sees) {
        *lse = minus_infinity;
      } else {
        *lse = float(double(top) * 0.69314718055994530942 + double(std::log(sum)));
        inverse[r] = 1.0f / sum;
      }
    }
    unpack_lanes<L>(out, first_token * group + panel * L, rows, o, shape.value_head_dim, inverse);
  }
};

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
