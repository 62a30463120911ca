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
    uint16_t* largest_q; // per panel
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
      scores = arena.take<float>(Core::softmax_keys * L); // in place: of the whole tile
      p = Core::in_place ? reinterpret_cast<Element*>(scores) : arena.take<Element>(forward_key_tile * L);
      o = arena.take<float>(panels * value_rows * L);
      reference = arena.take<float>(panels * L);
      sum = arena.take<float>(panels * L);
      alpha = arena.take<float>(L);
      lo = arena.take<int32_t>(panels * L);
      hi = arena.take<int32_t>(panels * L);
      intervals = arena.take<PanelIntervals>(panels);
      largest_q = arena.take<uint16_t>(panels);
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
      memory.largest_q[panel] =
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

    const uint16_t limit = Core::element_limit(scale, params.softcap, shape.head_dim);
    walk({params, head, k, v, scale, scale_log2, first_key, end_key, limit}, memory);
    for (int64_t panel = 0; panel < memory.panels; ++panel) finish(params, head, first_token, panel, memory);
  }

  struct Walk {
    const ForwardParams& params;
    HeadIndex head;
    Rows k, v;
    float scale, scale_log2;
    int64_t first_key, end_key;
    uint16_t limit; // elements of q and k from here on ask for checked exponentials (fixed_exponential.h)
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

  // Softcap and mask of a panel's scores of a range of keys.
  static void prepare_scores(const Walk& w, const PanelIntervals& interval, int64_t tile, KeyRange range, float* scores) {
    if (w.params.softcap > 0) cap_scores(scores, nullptr, (range.end - range.begin) * L, w.scale, w.params.softcap);
    for (int64_t chunk = range.begin; chunk < range.end; chunk += key_chunk)
      if (!interval.full(tile + chunk, tile + chunk + key_chunk))
        mask_scores<L>(scores + (chunk - range.begin) * L, key_chunk, int32_t(tile + chunk), interval.lo, interval.hi);
  }

  static int64_t keys_in_tile(const Walk& w, int64_t tile) {
    const int64_t left = w.params.shape.keys - tile;
    return left < forward_key_tile ? left : forward_key_tile;
  }

  // A key tile as it is packed for all panels of the task.
  struct KeyTile {
    int64_t first_key, count;
    typename Core::View k, v;
    uint16_t largest_k;
    bool bad_v;
  };

  static void walk(const Walk& w, const Memory& memory) {
    const AttentionShape& shape = w.params.shape;
    for (int64_t first = w.first_key / forward_key_tile * forward_key_tile; first < w.end_key; first += forward_key_tile) {
      KeyTile tile{
          first, keys_in_tile(w, first), Core::rows_view(memory.k, memory.depth), Core::columns_view(memory.v, forward_key_tile), 0, false};
      tile.largest_k = Core::pack_rows(memory.k, w.k, first, tile.count, forward_key_tile, shape.head_dim);
      tile.bad_v = Core::pack_columns(memory.v, w.v, first, tile.count, forward_key_tile, shape.value_head_dim);
      for (int64_t panel = 0; panel < memory.panels; ++panel) attend(w, memory, tile, panel);
    }
  }

  // This turn's share of the next key tile's rows, into L2: few lines at a time, as only 16 can wait at once.
  static TPK_INLINE void fetch_next(const Walk& w, const Rows& of, const KeyTile& tile, int64_t panel, int64_t panels, int64_t key,
                                    int64_t dim) {
    const int64_t next = tile.first_key + forward_key_tile;
    if (next + forward_key_tile > w.end_key) return;
    constexpr int64_t turns = forward_key_tile / Core::softmax_keys;
    const int64_t share = panel * turns + key / Core::softmax_keys, parts = panels * turns;
    for (int64_t r = forward_key_tile * share / parts; r < forward_key_tile * (share + 1) / parts; ++r) prefetch_row(of, next + r, dim);
  }

  // One panel over one key tile: scores and softmax in turns of Core::softmax_keys, which stay in L1, then the product with V at once.
  static void attend(const Walk& w, const Memory& memory, const KeyTile& tile, int64_t panel) {
    static_assert(!Core::in_place || Core::softmax_keys == forward_key_tile);
    const PanelIntervals& interval = memory.intervals[panel];
    const KeyRange range = KeyRange::of(interval, tile.first_key);
    if (range.end == range.begin) return;
    const RowStatistics state{memory.reference + panel * L, memory.sum + panel * L, memory.alpha};
    const bool checked = tile.largest_k >= w.limit || memory.largest_q[panel] >= w.limit;
    float* o = memory.o + panel * memory.value_rows * L;
    // The panel's first tile: nothing was accumulated before.
    Update update = tile.first_key <= interval.corners.first.lo ? Update::store : Update::add;
    int64_t added = range.begin; // keys before it are in o
    const auto add = [&](int64_t end) {
      add_values(update, o, tile.v.depth_from(added), memory.p + added * L, memory.value_rows, end - added, memory.alpha);
      update = Update::add;
      added = end;
    };
    // Turns end at absolute keys: where the reference moves must not depend on the rows beside.
    for (int64_t key = range.begin, end; key < range.end; key = end) {
      end = key / Core::softmax_keys * Core::softmax_keys + Core::softmax_keys;
      if (end > range.end) end = range.end;
      float* scores = memory.scores + (Core::in_place ? key * L : 0);
      fetch_next(w, w.k, tile, panel, memory.panels, key, w.params.shape.head_dim);
      Core::template multiply<Update::store>(scores, L, tile.k.rows_from(key), memory.q + panel * memory.depth * L, L, end - key,
                                             memory.depth);
      fetch_next(w, w.v, tile, panel, memory.panels, key, w.params.shape.value_head_dim);
      prepare_scores(w, interval, tile.first_key, {key, end}, scores);
      if (!softmax(checked, scores, memory.p + key * L, end - key, w.scale_log2, state)) continue;
      // The reference moved: what was added before it must be, and then fades.
      if (key > added) add(key);
      if (update == Update::store) continue;
      update = Update::scale_add;
      if constexpr (Core::softmax_keys < forward_key_tile)
        if (end < range.end) Core::rescale(o, memory.value_rows, memory.alpha), update = Update::add; // the next turn has its own alpha
    }
    add(range.end);
    if (tile.bad_v) add_bad_values(o, w.v, interval, tile.first_key, tile.count, w.params.shape.value_head_dim);
  }

  static bool softmax(bool checked, const float* scores, Element* p, int64_t keys, float scale_log2, const RowStatistics& state) {
    if constexpr (Core::fixed_exponential)
      if (checked) return online_softmax<Core, true>(scores, p, keys, scale_log2, state);
    return online_softmax<Core, false>(scores, p, keys, scale_log2, state);
  }

  static void add_values(Update update, float* o, const typename Core::View& columns, const Element* p, int64_t rows, int64_t keys,
                         const float* alpha) {
    if (update == Update::store)
      Core::template multiply<Update::store>(o, L, columns, p, L, rows, keys);
    else if (update == Update::scale_add)
      Core::template multiply<Update::scale_add>(o, L, columns, p, L, rows, keys, L, alpha);
    else
      Core::template multiply<Update::add>(o, L, columns, p, L, rows, keys);
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
      const float top = memory.reference[row];
      // Beside scores beyond 1e9 the rounding of the reference alone is worth hundreds of octaves.
      const bool lost = finite_bits(top) && !(memory.sum[row] > 0x1p-100f && memory.sum[row] < 0x1p100f);
      const float sum = lost ? __builtin_nanf("") : memory.sum[row];
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
