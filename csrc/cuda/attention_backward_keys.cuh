// cuda/attention_backward_keys.cuh: dk, dv of a key tile, and what it adds to dq.                                         (kernel)
// A block owns the keys of one tile of one KV head. It starts from the fp32 accumulators, walks the query tiles that see the tile from
// the last to the first (the heads of the group are packed in the rows) and stores once: no atomics, no copy per head. S^T = k q^T and
// dP^T = v dout^T, so that P^T and dS^T are operands of dv += P^T dout and dk += dS^T q where they arise; only dS goes through shared
// memory, for dq = dS k, which is reduced into packed fp32 sums unless the call is deterministic.
// Trap: `scale` goes into dS in fp32, before it is rounded: scaled at the end, the accumulator could not be the starting value.
#pragma once

#include "cuda/attention_backward_rows.cuh"

namespace tpk {

// The first place in [0, count) whose row passes, where rows that do follow those that do not; count if there is none. A warp together.
template <class Passes> TPK_DEVICE int first_place(const PackedRow* rows, int count, int lane, const Passes& passes) {
  int begin = 0, end = count;
  while (begin < end) {
    const int step = (end - begin + warp_threads - 1) / warp_threads, at = begin + (lane + 1) * step - 1;
    const uint32_t passed = __ballot_sync(all_lanes, at >= end || passes(rows[at]));
    if (passed == 0) return end;
    const int before = warp_threads - __popc(passed); // probes that do not pass; the next one does
    const int at_most = begin + (before + 1) * step - 1;
    begin += before * step;
    end = at_most < end ? at_most : end;
  }
  return end;
}

// Which places of packed rows see a key tile. Kept in shared memory: in registers, through the walk, it would spill.
struct SeenRows {
  int begin, end;           // see some key
  int full_begin, full_end; // see all keys
};

template <class Tile> struct KeyBlock {
  using Element = typename Tile::Element;
  using Shape = SwizzledTile<Tile::row_bytes>;
  using Transposed = SwizzledTile<Tile::ds_row_bytes>; // dS^T, keys x rows
  static constexpr int head_dim = Tile::head_dim, m_tiles = Tile::warp_keys / 16, columns = head_dim / 8;
  static constexpr int chunk_columns = Tile::chunk / 8;

  const BackwardTask& task;
  const uint32_t shared = ptx::shared_address(shared_memory());
  TilePlace* const kept = reinterpret_cast<TilePlace*>(shared_memory() + Tile::place_at);
  SeenRows* const seen = reinterpret_cast<SeenRows*>(shared_memory() + Tile::place_at + 16);
  const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads;

  TPK_DEVICE explicit KeyBlock(const BackwardTask& t) : task(t) {}

  TPK_DEVICE int group() const { return int(task.call.shape.query_heads / task.call.shape.kv_heads); }
  TPK_DEVICE int64_t head_index() const { return int64_t(kept->batch) * task.call.shape.kv_heads + kept->kv_head; }
  TPK_DEVICE const PackedRow* packed_rows() const { return task.packed_rows + head_index() * task.head_places(); }
  TPK_DEVICE uint32_t stage_of(int tile) const { return shared + Tile::stages_at + tile % 2 * Tile::stage_bytes; }
  TPK_DEVICE int first_key() const { return kept->row_tile * Tile::keys; }

  // One warp, one end.
  TPK_DEVICE void search() const {
    const int begin = first_key(), count = int(task.head_places()), keys = int(task.call.shape.keys);
    const int last = begin + Tile::keys < keys ? begin + Tile::keys : keys;
    const PackedRow* rows = packed_rows();
    static_assert(Tile::warps >= 4);
    const auto find = [&](int& place, const auto& passes) {
      const int first = first_place(rows, count, lane, passes);
      if (lane == 0) place = first;
    };
    if (warp == 0) find(seen->begin, [&](const PackedRow& row) { return row.hi > begin; });
    if (warp == 1) find(seen->end, [&](const PackedRow& row) { return row.lo >= last; });
    if (warp == 2) find(seen->full_begin, [&](const PackedRow& row) { return row.hi >= begin + Tile::keys; });
    if (warp == 3) find(seen->full_end, [&](const PackedRow& row) { return row.lo > begin; });
  }

  TPK_DEVICE void load_rows(int tile) const {
    const TilePlace place = *kept;
    const int first = tile * Tile::rows - task.shift, begin = seen->begin - task.shift, end = seen->end - task.shift;
    const uint32_t stage = stage_of(tile);
    load_packed_rows<Element, head_dim, Tile::rows, Tile::threads>(stage + Tile::q_at, task.call.q, place.batch, place.kv_head, group(),
                                                                   first, begin, end);
    load_packed_rows<Element, head_dim, Tile::rows, Tile::threads>(stage + Tile::dout_at, task.call.dout, place.batch, place.kv_head,
                                                                   group(), first, begin, end);
    if (threadIdx.x < Tile::rows)
      ptx::cp_async_16(stage + Tile::rows_at + threadIdx.x * 16, packed_rows() + int64_t(tile) * Tile::rows + threadIdx.x, true);
  }

  // Sums between registers and the fp32 accumulators, four columns a lane at a time.
  template <bool store> TPK_DEVICE void move_sums(float (&sums)[m_tiles][columns][4], const TensorView& view) const {
    const int keys = int(task.call.shape.keys);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = first_key() + warp * Tile::warp_keys + m * 16 + half * 8 + lane / 4;
        const bool exists = key < keys;
        float* row = address_of<float>(view, kept->batch, exists ? key : 0, kept->kv_head) + four_columns_begin(lane);
#pragma unroll
        for (int j = 0; j < columns; j += 2) {
          if constexpr (store) {
            const float4 four = four_columns(sums[m][j], sums[m][j + 1], half == 1, lane);
            if (exists) ptx::store_global_16(row + j * 8, bits_of(four));
          } else {
            const float4 four = exists ? floats_of(ptx::load_global_16(row + j * 8)) : make_float4(0, 0, 0, 0);
            from_four_columns(sums[m][j], sums[m][j + 1], half == 1, lane, four);
          }
        }
      }
  }

  // d = keys x rows^T for this warp's keys and one chunk of rows. d holds what it starts from.
  TPK_DEVICE void keys_by_rows(float (&d)[m_tiles][chunk_columns][4], uint32_t keys_tile, uint32_t rows_tile, int chunk) const {
    const auto a_at = Shape::rows_first(keys_tile, lane), b_at = Shape::chunks_first(rows_tile, lane);
#pragma unroll
    for (int depth = 0; depth < head_dim / 16; ++depth) {
      uint32_t a[m_tiles][4];
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) ptx::ldmatrix_x4(a[m], a_at.at(warp * Tile::warp_keys + m * 16, depth * 2));
#pragma unroll
      for (int j = 0; j < chunk_columns; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, b_at.at(chunk * Tile::chunk + j * 8, depth * 2));
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
          ptx::mma_m16n8k16<Element>(d[m][j], a[m], b[0], b[1]);
          ptx::mma_m16n8k16<Element>(d[m][j + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // sums += operand (keys x chunk rows) x rows.
  TPK_DEVICE void add_rows(float (&sums)[m_tiles][columns][4], const uint32_t (&operand)[m_tiles][Tile::chunk / 16][4], uint32_t rows_tile,
                           int chunk) const {
    const auto b_at = Shape::rows_first(rows_tile, lane);
#pragma unroll
    for (int depth = 0; depth < Tile::chunk / 16; ++depth) {
#pragma unroll
      for (int j = 0; j < columns; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, b_at.at(chunk * Tile::chunk + depth * 16, j));
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
          ptx::mma_m16n8k16<Element>(sums[m][j], operand[m][depth], b[0], b[1]);
          ptx::mma_m16n8k16<Element>(sums[m][j + 1], operand[m][depth], b[2], b[3]);
        }
      }
    }
  }

  // One chunk of a query tile: dv, dk, and dS^T into shared memory.
  TPK_DEVICE void add_chunk(float (&dk)[m_tiles][columns][4], float (&dv)[m_tiles][columns][4], uint32_t stage, int chunk,
                            bool full) const {
    // The lane's rows of the chunk: 2t and 2t + 1 of each eight.
    const uint32_t rows_at = stage + Tile::rows_at + (chunk * Tile::chunk + lane % 4 * 2) * 16;
    const Scoring& scoring = task.scoring;
    float s[m_tiles][chunk_columns][4] = {}, ds[m_tiles][chunk_columns][4];
    keys_by_rows(s, shared + Tile::k_at, stage + Tile::q_at, chunk);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) to_scores(s[m], scoring);
    // p goes to its operand at once; s becomes p * scale * (d score / d (scale * product)), which dP is to be multiplied by.
    uint32_t operand[m_tiles][Tile::chunk / 16][4];
#pragma unroll
    for (int i = 0; i < Tile::chunk / 16; ++i) {
      float p[m_tiles][2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint4 row = ptx::load_shared_16(rows_at + (i * 16 + j * 8 + e) * 16);
          const float lse = __uint_as_float(row.x), delta = __uint_as_float(row.y);
#pragma unroll
          for (int m = 0; m < m_tiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float& score = s[m][i * 2 + j][half * 2 + e];
              float& weight = p[m][j][half * 2 + e];
              weight = ptx::exp2_approx(fmaf(score, scoring.multiplier, -lse));
              const float tangent = score * task.inverse_cap; // 0 without a softcap
              score = weight * fmaf(-tangent, tangent, 1.0f) * scoring.scale;
              ds[m][i * 2 + j][half * 2 + e] = -delta;
            }
        }
      if (!full) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const uint4 row = ptx::load_shared_16(rows_at + (i * 16 + j * 8 + e) * 16);
            const RowInterval interval{int32_t(row.z), int32_t(row.w)};
#pragma unroll
            for (int m = 0; m < m_tiles; ++m)
#pragma unroll
              for (int half = 0; half < 2; ++half)
                if (!interval.sees(first_key() + warp * Tile::warp_keys + lane / 4 + m * 16 + half * 8))
                  p[m][j][half * 2 + e] = 0, s[m][i * 2 + j][half * 2 + e] = 0;
          }
      }
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) accumulators_to_a<Element>(operand[m][i], p[m][0], p[m][1]);
    }
    keys_by_rows(ds, shared + Tile::v_at, stage + Tile::dout_at, chunk);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int j = 0; j < chunk_columns; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) ds[m][j][e] *= s[m][j][e];
    add_rows(dv, operand, stage + Tile::dout_at, chunk);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int i = 0; i < Tile::chunk / 16; ++i) {
        accumulators_to_a<Element>(operand[m][i], ds[m][i * 2], ds[m][i * 2 + 1]);
        if (task.packed_dq == nullptr) continue;
        const int key = warp * Tile::warp_keys + m * 16 + lane / 4, place = chunk * (Tile::chunk / 8) + i * 2;
#pragma unroll
        for (int r = 0; r < 4; ++r)
          ptx::store_shared_4(shared + Tile::ds_at + Transposed::at(key + r % 2 * 8, place + r / 2) + lane % 4 * 4, operand[m][i][r]);
      }
    add_rows(dk, operand, stage + Tile::q_at, chunk);
  }

  // dq of the tile's rows, 32 x 32 a warp, reduced into the packed sums.
  TPK_DEVICE void reduce_dq(int tile) const {
    const int first_row = warp % Tile::dq_row_warps * 32, first_column = warp / Tile::dq_row_warps * 32;
    const auto a_at = Transposed::chunks_first(shared + Tile::ds_at, lane);
    const auto b_at = Shape::rows_first(shared + Tile::k_at, lane);
    float dq[2][4][4] = {};
#pragma unroll
    for (int depth = 0; depth < Tile::keys / 16; ++depth) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) ptx::ldmatrix_x4_trans(a[m], a_at.at(depth * 16, first_row / 8 + m * 2));
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, b_at.at(depth * 16, first_column / 8 + j));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          ptx::mma_m16n8k16<Element>(dq[m][j], a[m], b[0], b[1]);
          ptx::mma_m16n8k16<Element>(dq[m][j + 1], a[m], b[2], b[3]);
        }
      }
    }
    const int64_t place = head_index() * task.head_places() + int64_t(tile) * Tile::rows + first_row;
    float* sums = task.packed_dq + place * head_dim + first_column / 8 * 128;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float* sixteen = sums + (m * columns + j) * 128;
        if constexpr (ptx::reduction_width == 4) {
          ptx::red_add_4(sixteen + packed_dq_place(lane, 0), dq[m][j][0], dq[m][j][1], dq[m][j][2], dq[m][j][3]);
        } else {
#pragma unroll
          for (int c = 0; c < 4; ++c) ptx::red_add(sixteen + packed_dq_place(lane, c), dq[m][j][c]);
        }
      }
  }

  TPK_DEVICE void run() const {
    if (threadIdx.x == 0) {
      *kept = task.key_order.of(blockIdx.x);
      kept->row_tile = task.key_order.row_tiles - 1 - kept->row_tile; // the first keys are seen by most rows
    }
    __syncthreads();
    {
      const TilePlace place = *kept;
      const int keys = int(task.call.shape.keys);
      load_keys<Element, head_dim, Tile::keys, Tile::threads>(shared + Tile::k_at,
                                                              address_of<const Element>(task.call.k, place.batch, 0, place.kv_head),
                                                              task.call.k.token_stride, first_key(), keys);
      load_keys<Element, head_dim, Tile::keys, Tile::threads>(shared + Tile::v_at,
                                                              address_of<const Element>(task.call.v, place.batch, 0, place.kv_head),
                                                              task.call.v.token_stride, first_key(), keys);
    }
    ptx::cp_async_commit();
    search();
    __syncthreads();
    if (seen->begin >= seen->end) return ptx::cp_async_wait<0>();
    int tile = (seen->end - 1) / Tile::rows;
    load_rows(tile);
    ptx::cp_async_commit();
    float dk[m_tiles][columns][4], dv[m_tiles][columns][4];
    move_sums<false>(dk, task.call.dk);
    move_sums<false>(dv, task.call.dv);
    for (; tile >= seen->begin / Tile::rows; --tile) {
      ptx::cp_async_wait<0>();
      __syncthreads(); // this tile has arrived; nobody reads the other stage or dS^T any more
      if (tile > seen->begin / Tile::rows) load_rows(tile - 1);
      ptx::cp_async_commit();
      const bool full = tile * Tile::rows >= seen->full_begin && (tile + 1) * Tile::rows <= seen->full_end;
#pragma unroll 1
      for (int chunk = 0; chunk < Tile::rows / Tile::chunk; ++chunk) add_chunk(dk, dv, stage_of(tile), chunk, full);
      if (task.packed_dq != nullptr) {
        __syncthreads(); // all of dS^T is there
        reduce_dq(tile);
      }
    }
    move_sums<true>(dk, task.call.dk);
    move_sums<true>(dv, task.call.dv);
  }
};

template <class Tile> __global__ void __launch_bounds__(Tile::threads) attention_backward_keys(const __grid_constant__ BackwardTask task) {
  KeyBlock<Tile>(task).run();
}

} // namespace tpk
