// cuda/attention_forward.cuh: attention of one token slice over its prefix.                                              (kernels)
// q [B,T,Hq,D], k, v [B,S,Hkv,D] -> out [B,T,Hq,D], lse fp32 [B,Hq,T]. A block owns 128 packed query rows of one KV head and walks its
// key tiles in ascending order; full tiles skip the mask. With splits it takes a share of the key tiles and writes fp32 parts, which
// attention_combine merges. P goes from the accumulators of q k^T to the operand of p v without leaving the registers.
// Who runs it: attention_forward.cu on a GPU, csrc/emulator on the host. Trap: key tiles start at multiples of `keys` from key 0 whatever
// the slice, and full and masked tiles do the same arithmetic; that makes results bitwise independent of the slicing.
#pragma once

#include "cuda/attention_forward_task.h"
#include "cuda/attention_tiles.h"
#include "cuda/query_rows.cuh"
#include "cuda/softmax.cuh"

namespace tpk {

template <class Tile> struct ForwardBlock {
  using Element = typename Tile::Element;
  using Shape = SwizzledTile<Tile::row_bytes>;
  static constexpr int head_dim = Tile::head_dim, m_tiles = Tile::warp_rows / 16, key_columns = Tile::keys / 8, columns = head_dim / 8;

  const ForwardTask& task;
  const uint32_t shared = ptx::shared_address(shared_memory());
  RowInterval* const intervals = reinterpret_cast<RowInterval*>(shared_memory() + Tile::intervals_at);
  const int lane = threadIdx.x % warp_threads, warp_row = threadIdx.x / warp_threads * Tile::warp_rows;

  TPK_DEVICE explicit ForwardBlock(const ForwardTask& t) : task(t) {}

  template <bool values> TPK_DEVICE void load(uint32_t slot, int head, int tile) const {
    const int kv_heads = int(task.call.shape.kv_heads), batch = uint32_t(head) / uint32_t(kv_heads);
    const TensorView& view = values ? task.call.v : task.call.k;
    load_keys<Element, head_dim, Tile::keys, Tile::threads>(slot, address_of<const Element>(view, batch, 0, head - batch * kv_heads),
                                                            view.token_stride, tile * Tile::keys, int(task.call.shape.keys));
  }

  // s = q k^T.
  TPK_DEVICE void scores(float (&s)[m_tiles][key_columns][4], uint32_t slot) const {
    const auto q = Shape::rows_first(shared + Tile::q_at, lane), k = Shape::chunks_first(slot, lane);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int j = 0; j < key_columns; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][j][e] = 0;
#pragma unroll
    for (int depth = 0; depth < head_dim / 16; ++depth) {
      uint32_t a[m_tiles][4];
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) ptx::ldmatrix_x4(a[m], q.at(warp_row + m * 16, depth * 2));
#pragma unroll
      for (int j = 0; j < key_columns; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, k.at(j * 8, depth * 2));
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
          ptx::mma_m16n8k16<Element>(s[m][j], a[m], b[0], b[1]);
          ptx::mma_m16n8k16<Element>(s[m][j + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // out += p v.
  TPK_DEVICE void add_values(float (&out)[m_tiles][columns][4], const uint32_t (&p)[m_tiles][Tile::keys / 16][4], uint32_t slot) const {
    const auto v = Shape::rows_first(slot, lane);
#pragma unroll
    for (int depth = 0; depth < Tile::keys / 16; ++depth) {
#pragma unroll
      for (int j = 0; j < columns; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, v.at(depth * 16, j));
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
          ptx::mma_m16n8k16<Element>(out[m][j], p[m][depth], b[0], b[1]);
          ptx::mma_m16n8k16<Element>(out[m][j + 1], p[m][depth], b[2], b[3]);
        }
      }
    }
  }

  TPK_DEVICE void hide(float (&s)[m_tiles][key_columns][4], int first_key) const {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const RowInterval row = intervals[warp_row + m * 16 + half * 8 + lane / 4];
#pragma unroll
        for (int j = 0; j < key_columns; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!row.sees(first_key + j * 8 + lane % 4 * 2 + e)) s[m][j][half * 2 + e] = -infinity;
      }
  }

  TPK_DEVICE void run(int index) const {
    const AttentionShape& shape = task.call.shape;
    const TilePlace place = task.order.of(index);
    const int group = int(shape.query_heads / shape.kv_heads), rows_end = int(shape.tokens) * group;
    const int first_row = place.row_tile * Tile::rows;
    __syncthreads(); // the tile before may still read what is written now
    if (const int pair = ptx::afresh(threadIdx.x) * 2; pair < Tile::rows) {
      const RowInterval even = interval_of(task.call.mask, place.batch, first_row + pair, rows_end, group);
      const RowInterval odd = interval_of(task.call.mask, place.batch, first_row + pair + 1, rows_end, group);
      ptx::store_shared_16(shared + Tile::intervals_at + pair * 8,
                           make_uint4(uint32_t(even.lo), uint32_t(even.hi), uint32_t(odd.lo), uint32_t(odd.hi)));
    }
    __syncthreads();
    const int last_row = (rows_end - first_row < Tile::rows ? rows_end - first_row : Tile::rows) - 1;
    KeyTiles tiles = KeyTiles::of(intervals[0], intervals[last_row], Tile::keys);
    if (task.order.splits > 1) tiles.take_share(place.split, task.order.splits);

    float out[m_tiles][columns][4] = {};
    RunningRow running[m_tiles][2];
    if (tiles.begin < tiles.end) walk(out, running, place, tiles, first_row, rows_end, group);
    // Located again: held in registers through the walk, the place would spill.
    finish(out, running, task.order.of(ptx::afresh(index)));
  }

  TPK_DEVICE void walk(float (&out)[m_tiles][columns][4], RunningRow (&running)[m_tiles][2], TilePlace place, const KeyTiles& tiles,
                       int first_row, int rows_end, int group) const {
    const int head = place.batch * int(task.call.shape.kv_heads) + place.kv_head; // one register; divided again for each load
    const uint32_t ring = shared + Tile::ring_at, ring_end = ring + Tile::slots * Tile::slot_bytes;
    load_packed_rows<Element, head_dim, Tile::rows, Tile::threads>(shared + Tile::q_at, task.call.q, place.batch, place.kv_head, group,
                                                                   first_row, 0, rows_end);
#pragma unroll
    for (int i = 0; i < Tile::slots - 1; ++i) {
      const int tile = tiles.begin + i / 2;
      if (tile < tiles.end) {
        if (i % 2 == 0) load<false>(ring + i * Tile::slot_bytes, head, tile);
        if (i % 2 == 1) load<true>(ring + i * Tile::slot_bytes, head, tile);
      }
      ptx::cp_async_commit();
    }
    uint32_t reading = ring, free = ring_end - Tile::slot_bytes;
    // The next slot to read has arrived, and nobody reads the one before any more: fill that.
    const auto turn = [&]<bool values>(std::integral_constant<bool, values>, int ahead) {
      ptx::cp_async_wait<Tile::slots - 2>();
      __syncthreads();
      if (ahead < tiles.end) load<values>(free, head, ahead);
      ptx::cp_async_commit();
    };
    const auto pass = [&] {
      free = reading;
      reading = reading + Tile::slot_bytes == ring_end ? ring : reading + Tile::slot_bytes;
    };
    constexpr bool odd = Tile::slots % 2 == 1; // the load that is slots - 1 ahead is of the same kind
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      float s[m_tiles][key_columns][4];
      turn(std::integral_constant<bool, !odd>(), tile + (Tile::slots - 1) / 2);
      scores(s, reading);
      pass();
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) to_scores(s[m], task.scoring);
      if (!tiles.full(tile)) hide(s, tile * Tile::keys);
      uint32_t p[m_tiles][Tile::keys / 16][4];
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float fade = running[m][half].take(s[m], half * 2, task.scoring.multiplier);
#pragma unroll
          for (int j = 0; j < columns; ++j) out[m][j][half * 2] *= fade, out[m][j][half * 2 + 1] *= fade;
        }
#pragma unroll
        for (int i = 0; i < Tile::keys / 16; ++i) accumulators_to_a<Element>(p[m][i], s[m][i * 2], s[m][i * 2 + 1]);
      }
      turn(std::integral_constant<bool, odd>(), tile + Tile::slots / 2);
      add_values(out, p, reading);
      pass();
    }
  }

  TPK_DEVICE void finish(float (&out)[m_tiles][columns][4], const RunningRow (&running)[m_tiles][2], const TilePlace place) const {
    const AttentionShape& shape = task.call.shape;
    const int group = int(shape.query_heads / shape.kv_heads), rows_end = int(shape.tokens) * group;
    const int first_row = place.row_tile * Tile::rows;
    const bool split = task.order.splits > 1;
    const uint32_t staged = shared + Tile::q_at;
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int within = warp_row + m * 16 + half * 8 + lane / 4, row = first_row + within;
        const bool valid = row < rows_end;
        const RowPlace at = RowPlace::of(valid ? row : 0, group, place.kv_head);
        const float largest = running[m][half].largest, total = quad_sum(running[m][half].total);
        const RowInterval interval = intervals[within];
        const bool sinks = task.call.sinks != nullptr && !split;
        const RowResult result =
            RowResult::of(largest == -infinity ? largest : largest * task.scoring.natural, total,
                          split ? total == 0 : interval.hi <= interval.lo, sinks, sinks ? task.call.sinks[at.head] : 0.0f);
#pragma unroll
        for (int j = 0; j < columns; ++j)
#pragma unroll
          for (int e = half * 2; e < half * 2 + 2; ++e) out[m][j][e] = result.empty ? 0.0f : out[m][j][e] * result.factor;
        const int64_t lse_at = (int64_t(place.batch) * shape.query_heads + at.head) * shape.tokens + at.token;
        if (split) {
          const int64_t rows = shape.batch * shape.tokens * shape.query_heads;
          if (valid && lane % 4 == 0) task.part_lse[place.split * rows + lse_at] = result.lse;
          float* part = task.part_out +
                        (place.split * rows + (int64_t(place.batch) * shape.tokens + at.token) * shape.query_heads + at.head) * head_dim;
#pragma unroll
          for (int j = 0; j < columns; j += 2) {
            const float4 four = four_columns(out[m][j], out[m][j + 1], half == 1, lane);
            if (valid) ptx::store_global_16(part + j * 8 + four_columns_begin(lane), bits_of(four));
          }
        } else {
          if (valid && lane % 4 == 0) task.call.lse[lse_at] = result.lse;
#pragma unroll
          for (int j = 0; j < columns; ++j)
            ptx::store_shared_4(staged + Shape::at(within, j) + lane % 4 * 4,
                                ptx::pack2<Element>(out[m][j][half * 2], out[m][j][half * 2 + 1]));
        }
      }
    if (split) return;
    __syncwarp(); // a warp stages its own rows where only it has read q
    store_staged_rows<Element, head_dim, Tile::warp_rows>(staged, task.call.out, place.batch, place.kv_head, group, first_row, warp_row,
                                                          rows_end, lane);
  }
};

// Persistent: block i takes tiles i, i + gridDim, ... of the order.
template <class Tile>
__global__ void __launch_bounds__(Tile::threads, Tile::blocks) attention_forward(const __grid_constant__ ForwardTask task) {
  const ForwardBlock<Tile> block(task);
  const int tiles = int(task.order.tiles());
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) block.run(index);
}

// out = sum over splits of exp(lse_s) part_s, divided by the sum of exp(lse_s) and exp(sink). head_dim / 4 threads a row, splits ascending.
template <class Element, int head_dim>
__global__ void __launch_bounds__(combine_threads) attention_combine(const __grid_constant__ ForwardTask task) {
  const AttentionShape& shape = task.call.shape;
  constexpr int row_threads = head_dim / 4;
  const int64_t rows = shape.batch * shape.tokens * shape.query_heads;
  const int64_t row = int64_t(blockIdx.x) * (combine_threads / row_threads) + threadIdx.x / row_threads;
  if (row >= rows) return;
  const int column = threadIdx.x % row_threads * 4;
  const int head = int(row % shape.query_heads), token = int(row / shape.query_heads % shape.tokens);
  const int batch = int(row / shape.query_heads / shape.tokens);
  const int64_t lse_at = (int64_t(batch) * shape.query_heads + head) * shape.tokens + token;
  float top = -infinity;
  for (int split = 0; split < task.order.splits; ++split) top = fmaxf(top, task.part_lse[split * rows + lse_at]);
  const float base = top == -infinity ? 0.0f : top;
  float sum[4] = {}, total = 0;
  for (int split = 0; split < task.order.splits; ++split) {
    const float weight = ptx::exp2_approx((task.part_lse[split * rows + lse_at] - base) * float(log2_e));
    const float4 part = floats_of(ptx::load_global_16(task.part_out + (split * rows + row) * head_dim + column));
    total += weight;
    sum[0] = fmaf(part.x, weight, sum[0]), sum[1] = fmaf(part.y, weight, sum[1]);
    sum[2] = fmaf(part.z, weight, sum[2]), sum[3] = fmaf(part.w, weight, sum[3]);
  }
  const KeyInterval interval = task.call.mask.of(batch, token);
  const bool sinks = task.call.sinks != nullptr;
  const RowResult result = RowResult::of(top, total, interval.hi <= interval.lo, sinks, sinks ? task.call.sinks[head] : 0.0f);
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = result.empty ? 0.0f : sum[i] * result.factor;
  if (column == 0) task.call.lse[lse_at] = result.lse;
  ptx::store_global_8(address_of<Element>(task.call.out, batch, token, head) + column,
                      make_uint2(ptx::pack2<Element>(sum[0], sum[1]), ptx::pack2<Element>(sum[2], sum[3])));
}

} // namespace tpk
