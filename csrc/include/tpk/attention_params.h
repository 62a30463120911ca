// include/tpk/attention_params.h: plain parameters of prefix attention, forward and backward. Strides in elements, 64-bit.
// q [B,T,Hq,D], k [B,S,Hkv,D], v [B,S,Hkv,Dv], out and dout [B,T,Hq,Dv], lse [B,Hq,T] contiguous; the last dimension of every tensor is
// contiguous. Query head h uses KV head h / (Hq / Hkv). The backward adds into the fp32 tensors dk, dv and dsinks and writes dq.
#pragma once

#include <cstdint>

#include "tpk/mask_intervals.h"

namespace tpk {

enum class DType : int32_t { float32 = 0, bfloat16 = 1, float16 = 2 };

constexpr int64_t dtype_bytes(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

struct TensorView {
  void* data = nullptr;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;
};

struct AttentionShape {
  DType dtype = DType::float32;
  int64_t batch = 0, tokens = 0, keys = 0, query_heads = 0, kv_heads = 0, head_dim = 0, value_head_dim = 0;

  constexpr int64_t group() const { return query_heads / kv_heads; }
};

struct ForwardParams {
  AttentionShape shape;
  TensorView q, k, v, out;
  float* lse = nullptr;
  MaskIntervals mask;
  float scale = 1.0f, softcap = 0.0f;
  const float* sinks = nullptr; // [Hq] or null
};

struct BackwardParams {
  AttentionShape shape;
  TensorView dout, q, k, v, out;
  const float* lse = nullptr;
  TensorView dq, dk, dv; // dq in the model dtype; dk, dv fp32
  float* dsinks = nullptr;
  MaskIntervals mask;
  float scale = 1.0f, softcap = 0.0f;
  const float* sinks = nullptr;
};

} // namespace tpk
