// cuda/attention_backward_rows.cuh: what the backward does row by row, before and after the products.                       (kernels)
#pragma once

#include "cuda/attention_backward_task.h"
#include "cuda/query_rows.cuh"
#include "cuda/softmax.cuh"

namespace tpk {

inline constexpr int32_t beyond_all_keys = 0x7fffffff;

// Packed rows, and zeros for the sums of dq. head_dim / 8 threads a place.
template <class Element, int head_dim>
__global__ void __launch_bounds__(prepare_threads) attention_backward_prepare(const __grid_constant__ BackwardTask task) {
  constexpr int row_threads = head_dim / 8;
  const AttentionShape& shape = task.call.shape;
  const int64_t index = int64_t(blockIdx.x) * (prepare_threads / row_threads) + threadIdx.x / row_threads;
  const int column = threadIdx.x % row_threads * 8;
  const int64_t places = task.head_places(), head = index / places; // of all (batch, KV head)
  const int batch = int(head / shape.kv_heads), kv_head = int(head % shape.kv_heads), group = int(shape.query_heads / shape.kv_heads);
  const int row = int(index % places) - task.shift, rows = int(shape.tokens) * group;
  const bool inside = index < task.places(), valid = inside && row >= 0 && row < rows;
  const RowPlace at = RowPlace::of(valid ? row : 0, group, kv_head);
  float sum = 0;
  if (valid) {
    const uint4 out = ptx::load_global_16(address_of<const Element>(task.call.out, batch, at.token, at.head) + column);
    const uint4 dout = ptx::load_global_16(address_of<const Element>(task.call.dout, batch, at.token, at.head) + column);
    const uint32_t left[4] = {out.x, out.y, out.z, out.w}, right[4] = {dout.x, dout.y, dout.z, dout.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = ptx::unpack2<Element>(left[i]), b = ptx::unpack2<Element>(right[i]);
      sum = fmaf(a.y, b.y, fmaf(a.x, b.x, sum));
    }
  }
#pragma unroll
  for (int distance = row_threads / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(all_lanes, sum, distance);
  if (!inside) return;
  if (threadIdx.x % row_threads == 0) {
    PackedRow packed{infinity, 0.0f, row < 0 ? 0 : beyond_all_keys, row < 0 ? 0 : beyond_all_keys};
    if (valid) {
      const float lse = task.call.lse[(int64_t(batch) * shape.query_heads + at.head) * shape.tokens + at.token];
      const RowInterval interval = interval_of(task.call.mask, batch, row, rows, group);
      packed = {lse == -infinity ? infinity : lse * float(log2_e), sum, interval.lo, interval.hi};
    }
    ptx::store_global_16(task.packed_rows + index,
                         make_uint4(__float_as_uint(packed.lse), __float_as_uint(packed.delta), uint32_t(packed.lo), uint32_t(packed.hi)));
  }
  if (task.packed_dq == nullptr) return;
  float* zeros = task.packed_dq + index * head_dim + column;
  ptx::store_global_16(zeros, make_uint4(0, 0, 0, 0)), ptx::store_global_16(zeros + 4, make_uint4(0, 0, 0, 0));
}

// Float c of a lane in 128 packed sums of dq, the accumulator of an m16n8 product: side by side where a reduction takes four.
TPK_DEVICE int packed_dq_place(int lane, int c) { return ptx::reduction_width == 4 ? lane * 4 + c : c * 32 + lane; }

// dq from its packed sums. A warp takes 16 places.
template <class Element, int head_dim>
__global__ void __launch_bounds__(round_threads) attention_backward_round(const __grid_constant__ BackwardTask task) {
  const AttentionShape& shape = task.call.shape;
  const int64_t sixteen = int64_t(blockIdx.x) * (round_threads / warp_threads) + threadIdx.x / warp_threads;
  if (sixteen * 16 >= task.places()) return;
  const int lane = threadIdx.x % warp_threads;
  const int64_t head = sixteen * 16 / task.head_places();
  const int batch = int(head / shape.kv_heads), kv_head = int(head % shape.kv_heads), group = int(shape.query_heads / shape.kv_heads);
  const int first_row = int(sixteen * 16 % task.head_places()) - task.shift, rows = int(shape.tokens) * group;
  const float* source = task.packed_dq + sixteen * 16 * head_dim;
#pragma unroll 4
  for (int j = 0; j < head_dim / 8; j += 2) {
    float sums[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* tile = source + (j + i) * 128;
      if constexpr (ptx::reduction_width == 4) {
        const float4 four = floats_of(ptx::load_global_16(tile + packed_dq_place(lane, 0)));
        sums[i][0] = four.x, sums[i][1] = four.y, sums[i][2] = four.z, sums[i][3] = four.w;
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][c] = tile[packed_dq_place(lane, c)];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 four = four_columns(sums[0], sums[1], half == 1, lane);
      const int row = first_row + half * 8 + lane / 4;
      if (row < 0 || row >= rows) continue;
      const RowPlace at = RowPlace::of(row, group, kv_head);
      ptx::store_global_8(address_of<Element>(task.call.dq, batch, at.token, at.head) + j * 8 + four_columns_begin(lane),
                          make_uint2(ptx::pack2<Element>(four.x, four.y), ptx::pack2<Element>(four.z, four.w)));
    }
  }
}

// dsinks[h] -= sum over rows of exp(sink - lse) * delta: one block a query head, rows in one order.
template <class Element>
__global__ void __launch_bounds__(sink_threads) attention_backward_sinks(const __grid_constant__ BackwardTask task) {
  const AttentionShape& shape = task.call.shape;
  const int head = blockIdx.x, group = int(shape.query_heads / shape.kv_heads), kv_head = head / group;
  const float sink = task.call.sinks[head] * float(log2_e);
  float sum = 0;
  for (int64_t batch = 0; batch < shape.batch; ++batch) {
    const PackedRow* rows = task.packed_rows + (batch * shape.kv_heads + kv_head) * task.head_places() + task.shift + head % group;
    for (int64_t token = threadIdx.x; token < shape.tokens; token += sink_threads) {
      const float lse = rows[token * group].lse;
      if (lse != infinity) sum = fmaf(ptx::exp2_approx(sink - lse), rows[token * group].delta, sum);
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(all_lanes, sum, distance);
  float* sums = reinterpret_cast<float*>(shared_memory());
  if (threadIdx.x % warp_threads == 0) sums[threadIdx.x / warp_threads] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0;
  for (int warp = 0; warp < sink_threads / warp_threads; ++warp) total += sums[warp];
  task.call.dsinks[head] -= total;
}

} // namespace tpk
