// cuda/cache_append.cuh: a slice's keys and values into the prefix cache, turned by RoPE on the way, and its queries.        (kernel)
// A thread moves 16 bytes: 8 channels of one head of one token. Where `turns` is null nothing is turned and q is not touched.
#pragma once

#include "cuda/fused_tasks.h"
#include "cuda/query_rows.cuh"

namespace tpk {

// 8 channels times (cos, sin) of their 4 pairs, in fp32.
template <class Element> TPK_DEVICE uint4 turned(uint4 packed, const float* turns) {
  const float4 first = floats_of(ptx::load_global_16(turns)), second = floats_of(ptx::load_global_16(turns + 4));
  const auto turn = [](uint32_t pair, float cosine, float sine) {
    const float2 x = ptx::unpack2<Element>(pair);
    return ptx::pack2<Element>(fmaf(x.x, cosine, -(x.y * sine)), fmaf(x.x, sine, x.y * cosine));
  };
  return make_uint4(turn(packed.x, first.x, first.y), turn(packed.y, first.z, first.w), turn(packed.z, second.x, second.y),
                    turn(packed.w, second.z, second.w));
}

template <class Element> __global__ void __launch_bounds__(append_threads) cache_append(const __grid_constant__ AppendTask task) {
  const CacheAppend& call = task.call;
  const int64_t index = int64_t(blockIdx.x) * append_threads + threadIdx.x;
  if (index >= task.chunks()) return;
  const int64_t row = index / task.head_chunks(), heads = task.heads();
  const int chunk = int(index % task.head_chunks()), of_all = int(row % heads), kv_heads = int(call.kv_heads);
  const int token = int(row / heads % call.tokens), batch = int(row / heads / call.tokens);
  const bool value = of_all >= kv_heads && of_all < 2 * kv_heads, query = of_all >= 2 * kv_heads;
  const int head = of_all - (query ? 2 * kv_heads : value ? kv_heads : 0);
  if (chunk * 8 >= (value ? call.value_head_dim : call.head_dim)) return;
  const TensorView &from = query ? call.q : value ? call.v : call.k, &to = query ? call.q_out : value ? call.cache_v : call.cache_k;
  uint4 packed = ptx::load_global_16(address_of<const Element>(from, batch, token, head) + chunk * 8);
  if (!value && call.turns != nullptr)
    packed = turned<Element>(packed, call.turns + batch * call.turns_batch_stride + token * call.head_dim + chunk * 8);
  ptx::store_global_16(address_of<Element>(to, batch, token, head) + chunk * 8, packed);
}

} // namespace tpk
