// cpu/backward.h: prefix attention backward for one (batch, KV head): dq written, dk and dv added to the fp32 accumulators in place.
// prepare packs each query tile once (q and dout as lanes and as depth, lse, delta). keys owns dk and dv of one key tile: it starts them
// from the accumulators and walks the query tiles from the last to the first; S^T and dP^T of 32 keys x one panel become P and dS at once
// (lse is known), then dV += P^T dO, dK += dS^T Q and dQ^T += K^T dS^T. finish writes dq.
// Order makes results bitwise independent of slicing and thread count: dk, dv see query tiles descending; dq sees key tiles ascending, by
// a ticket per query tile (`next_key_tile`). Trap: a thread may wait for a ticket only of key tiles claimed before its own, which the
// ascending claim order guarantees.
#pragma once

#include <cmath>
#include <new>

#include "kernels.h"
#include "lanes.h"
#include "score_gradients.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

template <class Core> struct Backward {
  using Element = typename Core::Element;
  static constexpr int L = Core::lanes;

  // One query tile of the head: packed operands and row statistics.
  struct QueryTile {
    Element *q_lanes, *dout_lanes, *q_depth, *dout_depth;
    float *lse_log2, *delta, *dq;
    double* dsinks;
    int32_t *lo, *hi;
    PanelIntervals* intervals;
    int64_t first_token, tokens, panels;
    IntervalCorners corners;
    bool empty, bad_dout, checked; // checked: see fixed_exponential.h
    std::atomic<int64_t> next_key_tile;

    int64_t first_key_tile() const { return corners.first.lo / backward_key_tile; }
    bool skipped(int64_t begin, int64_t end) const { return empty || corners.skipped(begin, end); }
  };

  struct Sizes {
    int64_t group, tile_tokens, tile_lanes, first_tile, tiles, depth, value_depth, dim_rows, dim_panels, value_panels;

    explicit Sizes(const BackwardParams& params) {
      const AttentionShape& s = params.shape;
      group = s.group();
      tile_tokens = backward_query_tokens(group);
      tile_lanes = round_up(tile_tokens * group, L);
      first_tile = floor_div(params.mask.start, tile_tokens);
      tiles = floor_div(params.mask.start + s.tokens - 1, tile_tokens) - first_tile + 1;
      depth = round_up(s.head_dim, Core::depth_unit);
      value_depth = round_up(s.value_head_dim, Core::depth_unit);
      dim_rows = round_up(s.head_dim, Core::row_unit);
      dim_panels = round_up(s.head_dim, L) / L;
      value_panels = round_up(s.value_head_dim, L) / L;
    }
  };

  struct HeadMemory {
    QueryTile* tiles;
    int64_t bytes;

    // Lays the head out; with `tile` >= 0 also fills the pointers of that query tile.
    HeadMemory(const Sizes& n, std::byte* block, int64_t tile = -1) {
      Arena arena{block};
      tiles = arena.take<QueryTile>(n.tiles);
      const int64_t panels = n.tile_lanes / L, header = arena.bytes;
      Arena one{nullptr};
      lay_out(n, panels, one, nullptr);
      bytes = header + n.tiles * one.bytes;
      if (tile >= 0) {
        arena.bytes += tile * one.bytes;
        lay_out(n, panels, arena, &tiles[tile]);
      }
    }
    static void lay_out(const Sizes& n, int64_t panels, Arena& arena, QueryTile* tile) {
      QueryTile scratch;
      QueryTile& t = tile == nullptr ? scratch : *new (tile) QueryTile;
      t.q_lanes = arena.take<Element>(panels * n.depth * L);
      t.dout_lanes = arena.take<Element>(panels * n.value_depth * L);
      t.q_depth = arena.take<Element>(n.dim_panels * n.tile_lanes * L);
      t.dout_depth = arena.take<Element>(n.value_panels * n.tile_lanes * L);
      t.dq = arena.take<float>(panels * n.dim_rows * L);
      t.lse_log2 = arena.take<float>(n.tile_lanes);
      t.delta = arena.take<float>(n.tile_lanes);
      t.dsinks = arena.take<double>(n.group);
      t.lo = arena.take<int32_t>(n.tile_lanes);
      t.hi = arena.take<int32_t>(n.tile_lanes);
      t.intervals = arena.take<PanelIntervals>(panels);
    }
  };

  struct ThreadMemory {
    Element *k, *v, *k_columns, *p_rows, *ds_rows, *ds_depth;
    float *dk, *dv, *scores, *dp, *slope;
    int64_t bytes;

    ThreadMemory(const Sizes& n, std::byte* block) {
      constexpr int64_t keys = backward_key_tile;
      Arena arena{block};
      k = arena.take<Element>(keys * n.depth);
      v = arena.take<Element>(keys * n.value_depth);
      k_columns = arena.take<Element>(keys * n.dim_rows);
      p_rows = arena.take<Element>(keys * n.tile_lanes);
      ds_rows = arena.take<Element>(keys * n.tile_lanes);
      ds_depth = Core::in_place ? ds_rows : arena.take<Element>(keys * n.tile_lanes);
      dk = arena.take<float>(n.dim_panels * keys * L);
      dv = arena.take<float>(n.value_panels * keys * L);
      scores = arena.take<float>(Core::gradient_keys * L);
      dp = arena.take<float>(Core::gradient_keys * L);
      slope = arena.take<float>(key_chunk * L);
      bytes = arena.bytes;
    }
  };

  // The accumulators of one key tile. Few query tiles add to whole panels where they lie (the copies took 30 % of a short slice's time);
  // many, or panels with padding, work on a copy [dim / lanes][keys][lanes]. Bits are the same. Padding starts as 0 and is not stored.
  struct AccumulatorTile {
    Rows rows;
    int64_t first_key, count, dim;
    float* data;
    int64_t row_stride, panel_stride; // elements
    bool copied;
    static constexpr int64_t most_direct_tiles = 4;

    AccumulatorTile(float* copy, const TensorView& view, HeadIndex head, int64_t first_key, int64_t count, int64_t dim, int64_t query_tiles)
        : rows(Rows::of(view, DType::float32, head.batch, head.kv_head, 1)), first_key(first_key), count(count), dim(dim), data(row(0)),
          row_stride(view.token_stride), panel_stride(L),
          copied(count < backward_key_tile || dim % L != 0 || query_tiles > most_direct_tiles) {
      if (!copied) return;
      data = copy;
      row_stride = L;
      panel_stride = backward_key_tile * L;
      for (int64_t panel = 0; panel < round_up(dim, L) / L; ++panel)
        for (int64_t r = 0; r < backward_key_tile; ++r) {
          const int64_t used = r < count ? used_lanes(panel) : 0;
          if (used == L) {
            for (int64_t l = 0; l < L; l += vec_lanes) store(at(panel, r) + l, load(row(r) + panel * L + l));
          } else {
            for (int64_t l = 0; l < L; ++l) at(panel, r)[l] = l < used ? row(r)[panel * L + l] : 0.0f;
          }
        }
    }
    float* row(int64_t r) const { return reinterpret_cast<float*>(const_cast<char*>(rows.row(first_key + r))); }
    float* at(int64_t panel, int64_t key) const { return data + panel * panel_stride + key * row_stride; }
    // Rows of this tile that are added to where they lie, or of the next one to be copied, into L2.
    TPK_INLINE void prefetch(int64_t begin, int64_t end, bool next) const {
      if (copied != next) return;
      const int64_t first = first_key + (next ? backward_key_tile : 0);
      for (int64_t r = begin; r < end; ++r) prefetch_row(rows, first + r, dim);
    }
    void finish() const {
      if (!copied) return;
      for (int64_t panel = 0; panel < round_up(dim, L) / L; ++panel)
        for (int64_t r = 0; r < count; ++r) {
          if (used_lanes(panel) == L) {
            for (int64_t l = 0; l < L; l += vec_lanes) store(row(r) + panel * L + l, load(at(panel, r) + l));
          } else {
            for (int64_t l = 0; l < used_lanes(panel); ++l) row(r)[panel * L + l] = at(panel, r)[l];
          }
        }
    }
    int64_t used_lanes(int64_t panel) const { return dim - panel * L < L ? dim - panel * L : L; }
  };

  // What comes next, brought into L2 between products, few lines at a time: only 16 can wait at once, and whole chunks at once stood still
  // for them (loads of K and V and such prefetches were a quarter of the samples of 256 tokens behind 7936).
  struct Upcoming {
    const AccumulatorTile &dk, &dv;
    const Rows &k, &v;
    bool sums;         // this query tile is the first to add to dk and dv
    int64_t next_tile; // first key of the tile after this one while the last query tile is at work, else -1
    int64_t key, keys, panel, panels;

    // Part 0 to 3 of the panel's share of `keys` rows.
    TPK_INLINE void fetch(int64_t part) const {
      const AccumulatorTile& of = part < 2 ? dk : dv;
      const int64_t share = panel * 2 + part % 2, begin = key + keys * share / (panels * 2), end = key + keys * (share + 1) / (panels * 2);
      if (sums) of.prefetch(begin, end, false);
      if (next_tile < 0) return;
      of.prefetch(begin, end, true);
      for (int64_t r = begin; r < end; ++r) prefetch_row(part < 2 ? k : v, next_tile + r, of.dim);
    }
  };

  static int64_t head_bytes(const BackwardParams& params) { return HeadMemory(Sizes(params), nullptr).bytes; }
  static int64_t thread_bytes(const BackwardParams& params) { return ThreadMemory(Sizes(params), nullptr).bytes; }

  static void prepare(const BackwardParams& params, HeadIndex head, int64_t index, std::byte* block) {
    const AttentionShape& shape = params.shape;
    const Sizes n(params);
    QueryTile& tile = HeadMemory(n, block, index).tiles[index];
    const int64_t absolute = (n.first_tile + index) * n.tile_tokens - params.mask.start;
    tile.first_token = absolute > 0 ? absolute : 0;
    const int64_t end = absolute + n.tile_tokens < shape.tokens ? absolute + n.tile_tokens : shape.tokens;
    tile.tokens = end - tile.first_token;
    const int64_t rows = tile.tokens * n.group, first_row = tile.first_token * n.group;
    tile.panels = round_up(rows, L) / L;
    const Rows q = Rows::of(params.q, shape.dtype, head.batch, head.kv_head, n.group);
    const Rows dout = Rows::of(params.dout, shape.dtype, head.batch, head.kv_head, n.group);
    const Rows out = Rows::of(params.out, shape.dtype, head.batch, head.kv_head, n.group);
    const float sign = params.scale > 0 ? 1.0f : params.scale < 0 ? -1.0f : 0.0f;

    uint16_t largest = 0;
    tile.empty = true;
    for (int64_t panel = 0; panel < tile.panels; ++panel) {
      const int64_t row = panel * L, count = rows - row < L ? rows - row : L;
      for (int64_t r = row; r < row + count; ++r) prefetch_row(out, first_row + r, shape.value_head_dim);
      for (int64_t r = row + L; r < row + 2 * L && r < rows; ++r) {
        prefetch_row(q, first_row + r, shape.head_dim);
        prefetch_row(dout, first_row + r, shape.value_head_dim);
      }
      const uint16_t of_panel = Core::pack_lanes(tile.q_lanes + panel * n.depth * L, q, first_row + row, count, shape.head_dim, sign);
      if (of_panel > largest) largest = of_panel;
      Core::pack_lanes(tile.dout_lanes + panel * n.value_depth * L, dout, first_row + row, count, shape.value_head_dim, 1.0f);
      const PanelIntervals& interval = tile.intervals[panel] =
          panel_intervals(params.mask, head.batch, n.group, tile.first_token, row, count, L, tile.lo + row, tile.hi + row);
      if (panel == 0) tile.corners = interval.corners;
      IntervalCorners& all = tile.corners;
      if (interval.corners.first.lo < all.first.lo) all.first.lo = interval.corners.first.lo;
      if (interval.corners.last.hi > all.last.hi) all.last.hi = interval.corners.last.hi;
      tile.empty &= interval.empty;
    }
    Core::pack_depth(tile.q_depth, q, first_row, rows, tile.panels * L, shape.head_dim);
    tile.bad_dout =
        Core::template pack_depth<Core::probability_order>(tile.dout_depth, dout, first_row, rows, tile.panels * L, shape.value_head_dim);
    tile.checked = largest >= element_limit(params);
    if (tile.empty) // no key tile will come to it; the first one stores
      std::memset(tile.dq, 0, tile.panels * n.dim_rows * L * sizeof(float));
    for (int64_t g = 0; g < n.group; ++g) tile.dsinks[g] = 0.0;

    for (int64_t r = rows; r < tile.panels * L; ++r) {
      tile.lse_log2[r] = __builtin_inff(); // exp2(s - inf) = 0: padding and rows that see nothing
      tile.delta[r] = 0.0f;
    }
    for (int64_t g = 0; g < n.group; ++g) {
      const int64_t query_head = head.kv_head * n.group + g;
      const float* lse = params.lse + (head.batch * shape.query_heads + query_head) * shape.tokens + tile.first_token;
      for (int64_t token = 0; token < tile.tokens; ++token) {
        const int64_t r = token * n.group + g;
        tile.delta[r] = dot_of_rows(dout.row(first_row + r), out.row(first_row + r), shape.value_head_dim, shape.dtype);
        const bool sees = tile.hi[r] > tile.lo[r];
        tile.lse_log2[r] = sees ? lse[token] * log2_of_e : __builtin_inff();
        tile.checked |= sees && !(std::fabs(tile.lse_log2[r]) < 0x1p22f);
      }
      if (params.dsinks == nullptr || params.sinks[query_head] == minus_infinity) continue; // lse may be -inf too: -inf - -inf is NaN
      for (int64_t token = 0; token < tile.tokens; ++token)
        tile.dsinks[g] -= std::exp(double(params.sinks[query_head]) - double(lse[token])) * double(tile.delta[token * n.group + g]);
    }
    tile.next_key_tile.store(tile.first_key_tile(), std::memory_order_relaxed);
  }

  // Elements of q and k from here on ask for checked exponentials.
  static uint16_t element_limit(const BackwardParams& params) {
    return Core::element_limit(params.scale == 0 ? 1.0 : std::fabs(params.scale), params.softcap, params.shape.head_dim);
  }

  static void keys(const BackwardParams& params, HeadIndex head, int64_t key_tile, std::byte* head_block, std::byte* thread_block) {
    const AttentionShape& shape = params.shape;
    const Sizes n(params);
    const HeadMemory queries(n, head_block);
    const ThreadMemory memory(n, thread_block);
    const int64_t first_key = key_tile * backward_key_tile, end_key = first_key + backward_key_tile;
    const int64_t count = shape.keys < end_key ? shape.keys - first_key : backward_key_tile;
    int64_t last_tile = 0; // to add to this key tile: the walk goes down
    while (last_tile < n.tiles && queries.tiles[last_tile].skipped(first_key, end_key)) ++last_tile;
    if (last_tile == n.tiles) return; // its dk and dv stay as they are
    [[maybe_unused]] typename Core::Session session;

    const Rows k = Rows::of(params.k, shape.dtype, head.batch, head.kv_head, 1);
    const Rows v = Rows::of(params.v, shape.dtype, head.batch, head.kv_head, 1);
    const bool checked = Core::pack_rows(memory.k, k, first_key, count, backward_key_tile, shape.head_dim) >= element_limit(params);
    Core::pack_rows(memory.v, v, first_key, count, backward_key_tile, shape.value_head_dim);
    Core::pack_columns(memory.k_columns, k, first_key, count, backward_key_tile, shape.head_dim);
    const AccumulatorTile dk(memory.dk, params.dk, head, first_key, count, shape.head_dim, n.tiles);
    const AccumulatorTile dv(memory.dv, params.dv, head, first_key, count, shape.value_head_dim, n.tiles);

    const int64_t next_tile = end_key + backward_key_tile <= shape.keys ? end_key : -1;
    bool first = true; // nothing was added to dk and dv yet
    for (int64_t i = n.tiles - 1; i >= last_tile; --i) {
      QueryTile& tile = queries.tiles[i];
      if (tile.skipped(first_key, end_key)) continue;
      const int64_t lowest = tile.corners.first.lo - first_key, highest = tile.corners.last.hi - first_key;
      const int64_t begin = lowest > 0 ? lowest / key_chunk * key_chunk : 0;
      const int64_t end = highest < backward_key_tile ? round_up(highest, key_chunk) : backward_key_tile;
      const int64_t stride = tile.panels * L;
      for (int64_t panel = 0; panel < tile.panels; ++panel)
        for (int64_t key = begin, next; key < end; key = next) {
          next = key + Core::gradient_keys < end ? key + Core::gradient_keys : end;
          const Upcoming upcoming{dk, dv, k, v, first, i == last_tile ? next_tile : -1, key, next - key, panel, tile.panels};
          gradients(params, n, tile, panel, first_key, key, next, stride, checked || tile.checked, memory, upcoming);
        }
      first = false;
      // Rows outside: both panels of a block read the same rows of P or dS, the second time from L1.
      const auto add_rows = [&](const AccumulatorTile& to, const auto& view, const Element* depth, int64_t panels) {
        for (int64_t key = begin; key < end; key += key_chunk)
          for (int64_t panel = 0; panel < panels; ++panel)
            Core::template multiply<Update::add>(to.at(panel, key), to.row_stride, view.rows_from(key), depth + panel * stride * L, L,
                                                 key_chunk, stride, to.dim - panel * L);
      };
      add_rows(dv, Core::rows_view(memory.p_rows, stride), tile.dout_depth, n.value_panels);
      add_rows(dk, Core::rows_view(memory.ds_rows, stride), tile.q_depth, n.dim_panels);
      if (tile.bad_dout) add_bad_dout(params, head, tile, first_key, begin, end, n.group, dv);

      const auto k_columns = Core::columns_view(memory.k_columns, backward_key_tile).depth_from(begin);
      for (int64_t spins = 0; tile.next_key_tile.load(std::memory_order_acquire) != key_tile; ++spins) relax_or_yield(spins);
      for (int64_t panel = 0; panel < tile.panels; ++panel) {
        const Element* ds =
            Core::in_place ? memory.ds_rows + begin * stride + panel * L : memory.ds_depth + (panel * backward_key_tile + begin) * L;
        float* dq = tile.dq + panel * n.dim_rows * L;
        if (key_tile == tile.first_key_tile())
          Core::template multiply<Update::store>(dq, L, k_columns, ds, Core::in_place ? stride : L, n.dim_rows, end - begin);
        else
          Core::template multiply<Update::add>(dq, L, k_columns, ds, Core::in_place ? stride : L, n.dim_rows, end - begin);
      }
      tile.next_key_tile.store(key_tile + 1, std::memory_order_release);
    }
    dk.finish();
    dv.finish();
  }

  // P and dS of keys [begin, end) of the tile (at most Core::gradient_keys) for one panel: scores first, all at once, then elementwise.
  static void gradients(const BackwardParams& params, const Sizes& n, const QueryTile& tile, int64_t panel, int64_t first_key,
                        int64_t begin, int64_t end, int64_t width, bool checked, const ThreadMemory& memory, const Upcoming& upcoming) {
    const PanelIntervals& interval = tile.intervals[panel];
    const float scale = params.scale == 0 ? 1.0f : std::fabs(params.scale);
    const bool capped = params.softcap > 0;
    const float scale_log2 = capped ? 1.0f : scale * log2_of_e;
    const auto hidden = [&](int64_t chunk) { return interval.skipped(first_key + chunk, first_key + chunk + key_chunk); };
    while (begin < end && hidden(begin)) clear(memory, panel, begin, width), begin += key_chunk;
    while (begin < end && hidden(end - key_chunk)) end -= key_chunk, clear(memory, panel, end, width);
    if (begin == end) return;
    upcoming.fetch(0);
    Core::template multiply<Update::store>(memory.scores, L, Core::rows_view(memory.k, n.depth).rows_from(begin),
                                           tile.q_lanes + panel * n.depth * L, L, end - begin, n.depth);
    upcoming.fetch(1);
    Core::template multiply<Update::store>(memory.dp, L, Core::rows_view(memory.v, n.value_depth).rows_from(begin),
                                           tile.dout_lanes + panel * n.value_depth * L, L, end - begin, n.value_depth);
    upcoming.fetch(2);
    for (int64_t chunk = begin; chunk < end; chunk += key_chunk) {
      const bool masked = !interval.full(first_key + chunk, first_key + chunk + key_chunk);
      float *scores = memory.scores + (chunk - begin) * L, *dp = memory.dp + (chunk - begin) * L;
      if (capped) cap_scores(scores, memory.slope, key_chunk * L, scale, params.softcap);
      if (masked) mask_scores<L>(scores, key_chunk, int32_t(first_key + chunk), interval.lo, interval.hi);
      const ScoreGradients<Element> chunk_of{scores,
                                             dp,
                                             memory.slope,
                                             tile.lse_log2 + panel * L,
                                             tile.delta + panel * L,
                                             scale_log2,
                                             params.scale,
                                             Core::rows_block(memory.p_rows, width, chunk, panel * L),
                                             Core::rows_block(memory.ds_rows, width, chunk, panel * L),
                                             Core::rows_block_stride(width),
                                             memory.ds_depth + (panel * backward_key_tile + chunk) * L};
      score_gradients<Core>(chunk_of, {capped, masked, checked});
    }
    upcoming.fetch(3);
  }

  // P and dS of a chunk that no row of the panel sees.
  static void clear(const ThreadMemory& memory, int64_t panel, int64_t chunk, int64_t width) {
    Element* p_rows = Core::rows_block(memory.p_rows, width, chunk, panel * L);
    Element* ds_rows = Core::rows_block(memory.ds_rows, width, chunk, panel * L);
    const int64_t stride = Core::rows_block_stride(width);
    for (int64_t r = 0; r < key_chunk; ++r) {
      std::memset(p_rows + r * stride, 0, L * sizeof(Element));
      std::memset(ds_rows + r * stride, 0, L * sizeof(Element));
    }
    if (!Core::in_place) std::memset(memory.ds_depth + (panel * backward_key_tile + chunk) * L, 0, key_chunk * L * sizeof(Element));
  }

  // Keys seen by a row with non-finite dout get those elements in dv, whatever the probability.
  static __attribute__((noinline)) void add_bad_dout(const BackwardParams& params, HeadIndex head, const QueryTile& tile, int64_t first_key,
                                                     int64_t begin, int64_t end, int64_t group, const AccumulatorTile& dv) {
    const int64_t dim = params.shape.value_head_dim;
    const Rows dout = Rows::of(params.dout, params.shape.dtype, head.batch, head.kv_head, group);
    float row[256];
    for (int64_t r = 0; r < tile.tokens * group; ++r) {
      load_row(row, dout.row(tile.first_token * group + r), dim, dout.dtype);
      for (int64_t d = 0; d < dim; ++d) {
        if (finite_bits(row[d])) continue;
        for (int64_t key = begin; key < end; ++key)
          if (first_key + key >= tile.lo[r] && first_key + key < tile.hi[r]) dv.at(d / L, key)[d % L] += row[d];
      }
    }
  }

  static void finish(const BackwardParams& params, HeadIndex head, int64_t index, std::byte* block) {
    const AttentionShape& shape = params.shape;
    const Sizes n(params);
    const QueryTile& tile = HeadMemory(n, block).tiles[index];
    const Rows dq = Rows::of(params.dq, shape.dtype, head.batch, head.kv_head, n.group);
    float one[L];
    for (int l = 0; l < L; ++l) one[l] = 1.0f;
    const int64_t rows = tile.tokens * n.group;
    for (int64_t panel = 0; panel < tile.panels; ++panel)
      unpack_lanes<L, Core::gradient_order>(dq, tile.first_token * n.group + panel * L, rows - panel * L < L ? rows - panel * L : L,
                                            tile.dq + panel * n.dim_rows * L, shape.head_dim, one);
  }

  static void sinks(const BackwardParams& params, HeadIndex head, std::byte* block, double* sums) {
    const Sizes n(params);
    const HeadMemory memory(n, block);
    for (int64_t i = 0; i < n.tiles; ++i)
      for (int64_t g = 0; g < n.group; ++g) sums[head.kv_head * n.group + g] += memory.tiles[i].dsinks[g];
  }
};

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
