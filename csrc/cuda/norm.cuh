// cuda/norm.cuh: residual addition with RMSNorm or LayerNorm, and its backward.                                          (kernels)
// A block norms a row at a time, in registers: a thread owns chunks of 16 bytes. A row's result depends on that row alone. The weights'
// gradients are summed over fixed blocks of 16 rows, whose shares norm_weight_sums adds in order: no atomics, one order of addition.
#pragma once

#include "cuda/device.cuh"
#include "cuda/fused_tasks.h"
#include "cuda/row_chunk.cuh"

namespace tpk {

// The sum of two numbers over the block, the same bits in every thread. Uses shared memory: 64 floats.
TPK_DEVICE float2 block_sum(float2 x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x.x += __shfl_xor_sync(all_lanes, x.x, distance);
    x.y += __shfl_xor_sync(all_lanes, x.y, distance);
  }
  float* sums = reinterpret_cast<float*>(shared_memory());
  const int warps = blockDim.x / warp_threads, warp = threadIdx.x / warp_threads;
  if (warps == 1) return x;
  __syncthreads(); // the sums before have been read
  if (threadIdx.x % warp_threads == 0) sums[warp] = x.x, sums[32 + warp] = x.y;
  __syncthreads();
  float2 total = make_float2(0, 0);
  for (int i = 0; i < warps; ++i) total.x += sums[i], total.y += sums[32 + i];
  return total;
}

// f(i, chunk) for the chunks of a row that the thread owns.
template <class Element, class F> TPK_DEVICE void own_chunks(int64_t dim, const F& f) {
#pragma unroll
  for (int i = 0; i < norm_chunks; ++i) {
    const int chunk = threadIdx.x + i * blockDim.x;
    if (chunk < dim / RowChunk<Element>::width) f(i, chunk);
  }
}

// One row of a call. Also of rows that come from another device (peer_rows.cuh).
template <class Element> TPK_DEVICE void norm_row(const NormForward& call, int64_t row) {
  constexpr int width = RowChunk<Element>::width;
  const auto* weight = static_cast<const Element*>(call.weight);
  const auto* bias = static_cast<const Element*>(call.bias);
  const float share = 1.0f / float(call.dim);
  RowChunk<Element> x[norm_chunks];
  float2 sum = make_float2(0, 0);
  own_chunks<Element>(call.dim, [&](int i, int chunk) {
    x[i].load(call.x.row<const Element>(row), chunk);
    if (call.delta.data != nullptr) {
      RowChunk<Element> delta;
      delta.load(call.delta.row<const Element>(row), chunk);
      x[i].add(delta);
      x[i].round();
      x[i].store(call.total.row<Element>(row), chunk);
    }
#pragma unroll
    for (int e = 0; e < width; ++e) sum.x += x[i].value[e];
  });
  const float mean = call.rms ? 0.0f : block_sum(sum).x * share;
  sum.x = 0;
  own_chunks<Element>(call.dim, [&](int i, int) {
#pragma unroll
    for (int e = 0; e < width; ++e) {
      x[i].value[e] -= mean;
      sum.x = fmaf(x[i].value[e], x[i].value[e], sum.x);
    }
  });
  const float rstd = 1.0f / sqrtf(fmaf(block_sum(sum).x, share, call.eps));
  if (threadIdx.x == 0) {
    if (!call.rms) call.mean[row] = mean;
    call.rstd[row] = rstd;
  }
  own_chunks<Element>(call.dim, [&](int i, int chunk) {
    RowChunk<Element> scale, shift;
    scale.load(weight, chunk);
    if (bias != nullptr) shift.load(bias, chunk);
#pragma unroll
    for (int e = 0; e < width; ++e) {
      x[i].value[e] *= rstd * scale.value[e];
      if (bias != nullptr) x[i].value[e] += shift.value[e];
    }
    x[i].store(call.out.row<Element>(row), chunk);
  });
}

template <class Element> __global__ void __launch_bounds__(1024) norm_forward(const __grid_constant__ NormForwardTask task) {
  norm_row<Element>(task.call, blockIdx.x);
}

template <class Element> __global__ void __launch_bounds__(1024) norm_backward(const __grid_constant__ NormBackwardTask task) {
  const NormBackward& call = task.call;
  const auto* weight = static_cast<const Element*>(call.weight);
  const float share = 1.0f / float(call.dim);
  float dweight[norm_chunks][8] = {}, dbias[norm_chunks][8] = {};
  const int64_t first = int64_t(blockIdx.x) * norm_block_rows,
                end = first + norm_block_rows < call.rows ? first + norm_block_rows : call.rows;
  for (int64_t row = first; row < end; ++row) {
    const float mean = call.rms ? 0.0f : call.mean[row], rstd = call.rstd[row];
    // Both passes read the row: held in registers between them it would spill, and it is in the L1 cache.
    const auto read = [&](int chunk, RowChunk<Element>& normed, RowChunk<Element>& dout) {
      normed.load(call.x.row<const Element>(row), chunk);
      dout.load(call.dout.row<const Element>(row), chunk);
#pragma unroll
      for (int e = 0; e < 8; ++e) normed.value[e] = (normed.value[e] - mean) * rstd;
    };
    float2 sums = make_float2(0, 0); // of dout * weight * normed, and of dout * weight
    own_chunks<Element>(call.dim, [&](int i, int chunk) {
      RowChunk<Element> normed, dout, scale;
      read(chunk, normed, dout);
      scale.load(weight, chunk);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        dweight[i][e] = fmaf(dout.value[e], normed.value[e], dweight[i][e]);
        dbias[i][e] += dout.value[e];
        const float inner = dout.value[e] * scale.value[e];
        sums.x = fmaf(inner, normed.value[e], sums.x);
        sums.y += inner;
      }
    });
    const float2 total = block_sum(sums);
    const float along = total.x * share, across = call.rms ? 0.0f : total.y * share;
    own_chunks<Element>(call.dim, [&](int, int chunk) {
      RowChunk<Element> normed, dx, scale, beside{};
      read(chunk, normed, dx);
      scale.load(weight, chunk);
      if (call.dresidual.data != nullptr) beside.load(call.dresidual.row<const Element>(row), chunk);
#pragma unroll
      for (int e = 0; e < 8; ++e)
        dx.value[e] = fmaf(fmaf(-normed.value[e], along, dx.value[e] * scale.value[e]) - across, rstd, beside.value[e]);
      dx.store(call.dx.row<Element>(row), chunk);
    });
  }
  if (task.shares == nullptr) return;
  own_chunks<Element>(call.dim, [&](int i, int chunk) {
    float* shares = task.shares + int64_t(blockIdx.x) * 2 * call.dim + chunk * 8;
#pragma unroll
    for (int e = 0; e < 8; e += 4) {
      ptx::store_global_16(shares + e, make_uint4(__float_as_uint(dweight[i][e]), __float_as_uint(dweight[i][e + 1]),
                                                  __float_as_uint(dweight[i][e + 2]), __float_as_uint(dweight[i][e + 3])));
      ptx::store_global_16(shares + call.dim + e, make_uint4(__float_as_uint(dbias[i][e]), __float_as_uint(dbias[i][e + 1]),
                                                             __float_as_uint(dbias[i][e + 2]), __float_as_uint(dbias[i][e + 3])));
    }
  });
}

// dweight and dbias += the blocks' shares, in order. A thread a column of [2, dim].
template <class Element>
__global__ void __launch_bounds__(weight_sum_threads) norm_weight_sums(const __grid_constant__ NormBackwardTask task) {
  const NormBackward& call = task.call;
  const int64_t column = int64_t(blockIdx.x) * weight_sum_threads + threadIdx.x;
  if (column >= 2 * call.dim) return;
  float* sum = column < call.dim ? call.dweight : call.dbias;
  if (sum == nullptr) return;
  float total = 0;
#pragma unroll 8
  for (int64_t block = 0; block < task.blocks(); ++block) total += task.shares[block * 2 * call.dim + column];
  sum[column < call.dim ? column : column - call.dim] += total;
}

} // namespace tpk
