// cuda/attention_backward_queries.cuh: the deterministic dq.                                                              (kernel)
// A block owns 64 packed query rows of one KV head and walks their key tiles in ascending order, as the forward does: S and dP again,
// then dq += dS k with dS taken from the accumulators. One owner a row and absolute key tiles make dq bitwise the same for every slicing,
// at the cost of computing S and dP a second time.
#pragma once

#include "cuda/attention_backward_rows.cuh"

namespace tpk {

template <class Tile> struct QueryBlock {
  using Element = typename Tile::Element;
  using Shape = SwizzledTile<Tile::row_bytes>;
  static constexpr int head_dim = Tile::head_dim, key_columns = Tile::keys / 8, columns = head_dim / 8;
  static_assert(Tile::rows == Tile::warps * 16);

  const BackwardTask& task;
  const uint32_t shared = ptx::shared_address(shared_memory());
  const PackedRow* const rows = reinterpret_cast<const PackedRow*>(shared_memory() + Tile::rows_at);
  const int lane = threadIdx.x % warp_threads, warp_row = threadIdx.x / warp_threads * 16;

  TPK_DEVICE explicit QueryBlock(const BackwardTask& t) : task(t) {}

  template <bool values> TPK_DEVICE void load(uint32_t slot, TilePlace place, int tile) const {
    const TensorView& view = values ? task.call.v : task.call.k;
    load_keys<Element, head_dim, Tile::keys, Tile::threads>(slot, address_of<const Element>(view, place.batch, 0, place.kv_head),
                                                            view.token_stride, tile * Tile::keys, int(task.call.shape.keys));
  }
  TPK_DEVICE uint32_t k_slot(int tile) const { return shared + Tile::k_at + tile % 2 * Tile::slot_bytes; }

  // d += rows x keys^T.
  TPK_DEVICE void rows_by_keys(float (&d)[key_columns][4], uint32_t rows_tile, uint32_t keys_tile) const {
    const auto a_at = Shape::rows_first(rows_tile, lane), b_at = Shape::chunks_first(keys_tile, lane);
#pragma unroll
    for (int depth = 0; depth < head_dim / 16; ++depth) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, a_at.at(warp_row, depth * 2));
#pragma unroll
      for (int j = 0; j < key_columns; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, b_at.at(j * 8, depth * 2));
        ptx::mma_m16n8k16<Element>(d[j], a, b[0], b[1]);
        ptx::mma_m16n8k16<Element>(d[j + 1], a, b[2], b[3]);
      }
    }
  }

  TPK_DEVICE void add_tile(float (&dq)[columns][4], int tile, bool full, TilePlace place, int end) const {
    const Scoring& scoring = task.scoring;
    float s[key_columns][4] = {}, ds[key_columns][4];
    rows_by_keys(s, shared + Tile::q_at, k_slot(tile));
    to_scores(s, scoring);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PackedRow& row = rows[warp_row + half * 8 + lane / 4];
      const float lse = row.lse, delta = row.delta;
      const RowInterval interval{row.lo, row.hi};
#pragma unroll
      for (int j = 0; j < key_columns; ++j)
#pragma unroll
        for (int e = half * 2; e < half * 2 + 2; ++e) {
          const float tangent = s[j][e] * task.inverse_cap; // 0 without a softcap
          s[j][e] = ptx::exp2_approx(fmaf(s[j][e], scoring.multiplier, -lse)) * fmaf(-tangent, tangent, 1.0f) * scoring.scale;
          ds[j][e] = -delta;
          if (!full && !interval.sees(tile * Tile::keys + j * 8 + lane % 4 * 2 + e % 2)) s[j][e] = 0;
        }
    }
    rows_by_keys(ds, shared + Tile::dout_at, shared + Tile::v_at);
    __syncthreads(); // nobody reads v any more
    if (tile + 1 < end) load<true>(shared + Tile::v_at, place, tile + 1);
    ptx::cp_async_commit();
    const auto b_at = Shape::rows_first(k_slot(tile), lane);
#pragma unroll
    for (int depth = 0; depth < Tile::keys / 16; ++depth) {
#pragma unroll
      for (int j = depth * 2; j < depth * 2 + 2; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) ds[j][e] *= s[j][e];
      uint32_t a[4];
      accumulators_to_a<Element>(a, ds[depth * 2], ds[depth * 2 + 1]);
#pragma unroll
      for (int j = 0; j < columns; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, b_at.at(depth * 16, j));
        ptx::mma_m16n8k16<Element>(dq[j], a, b[0], b[1]);
        ptx::mma_m16n8k16<Element>(dq[j + 1], a, b[2], b[3]);
      }
    }
  }

  TPK_DEVICE void run() const {
    const AttentionShape& shape = task.call.shape;
    const TilePlace place = task.row_order.of(blockIdx.x);
    const int group = int(shape.query_heads / shape.kv_heads), rows_end = int(shape.tokens) * group;
    const int first_row = place.row_tile * Tile::rows;
    const int count = rows_end - first_row < Tile::rows ? rows_end - first_row : Tile::rows;
    const int thread = threadIdx.x;
    if (thread < Tile::rows) {
      const int64_t head = int64_t(place.batch) * shape.kv_heads + place.kv_head;
      // Rows past the last: zeros, whose key interval is empty.
      ptx::cp_async_16(shared + Tile::rows_at + thread * 16,
                       task.packed_rows + head * task.head_places() + task.shift + first_row + (thread < count ? thread : 0),
                       thread < count);
    }
    load_packed_rows<Element, head_dim, Tile::rows, Tile::threads>(shared + Tile::q_at, task.call.q, place.batch, place.kv_head, group,
                                                                   first_row, 0, rows_end);
    load_packed_rows<Element, head_dim, Tile::rows, Tile::threads>(shared + Tile::dout_at, task.call.dout, place.batch, place.kv_head,
                                                                   group, first_row, 0, rows_end);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    const KeyTiles tiles = KeyTiles::of({rows[0].lo, rows[0].hi}, {rows[count - 1].lo, rows[count - 1].hi}, Tile::keys);
    if (tiles.begin < tiles.end) {
      load<false>(k_slot(tiles.begin), place, tiles.begin);
      load<true>(shared + Tile::v_at, place, tiles.begin);
      ptx::cp_async_commit();
    }
    float dq[columns][4] = {};
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      ptx::cp_async_wait<0>();
      __syncthreads(); // k and v of the tile have arrived; nobody reads the other k any more
      if (tile + 1 < tiles.end) load<false>(k_slot(tile + 1), place, tile + 1);
      ptx::cp_async_commit();
      add_tile(dq, tile, tiles.full(tile), place, tiles.end);
    }
    store(dq, place, first_row, rows_end, group);
  }

  // Through the warp's own rows of q in shared memory, which nobody else reads.
  TPK_DEVICE void store(const float (&dq)[columns][4], TilePlace place, int first_row, int rows_end, int group) const {
    const uint32_t staged = shared + Tile::q_at;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < columns; ++j)
        ptx::store_shared_4(staged + Shape::at(warp_row + half * 8 + lane / 4, j) + lane % 4 * 4,
                            ptx::pack2<Element>(dq[j][half * 2], dq[j][half * 2 + 1]));
    __syncwarp();
    store_staged_rows<Element, head_dim, 16>(staged, task.call.dq, place.batch, place.kv_head, group, first_row, warp_row, rows_end, lane);
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::threads, Tile::blocks) attention_backward_queries(const __grid_constant__ BackwardTask task) {
  QueryBlock<Tile>(task).run();
}

} // namespace tpk
