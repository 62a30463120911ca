// cpu/block.h: a whole pre-norm transformer block over one slice, forward and backward, in fp32 or bf16: the kernels of this folder, and
// between them the GEMMs of whatever BLAS the caller brings. One call, since what a slice costs beyond its arithmetic is the many small
// calls. Rows are tokens, batch-major; every tensor here is contiguous but for the cache and the sums of its gradients. Products are
// summed in fp32 whatever the Element: with bf16 a sum of several is rounded once, and gradients of parameters not at all. Trap: BLAS has
// its own idea of threads; the caller sees to it that it agrees with num_threads.
#pragma once

#include <array>
#include <cstdint>

#include "fused.h"
#include "tpk/attention_params.h"

namespace tpk::cpu {

struct Bfloat16 {
  uint16_t bits;
};
template <class Element> constexpr DType dtype_of = DType::float32;
template <> inline constexpr DType dtype_of<Bfloat16> = DType::bfloat16;

// sgemm_ or gemm_bf16bf16f32_ of the Fortran interface: a and b of Element, c of float. Sizes are passed as 64-bit integers, which on a
// little-endian machine a BLAS of either width reads.
using Gemm = void (*)(const char* transpose_a, const char* transpose_b, const int64_t* m, const int64_t* n, const int64_t* k,
                      const float* alpha, const void* a, const int64_t* lda, const void* b, const int64_t* ldb, const float* beta, float* c,
                      const int64_t* ldc);

struct BlockShape {
  int64_t hidden = 0, query_heads = 0, kv_heads = 0, head_dim = 0, ffn = 0;
  bool rms = false, gated = false; // RMSNorm or LayerNorm; silu(gate) * up or gelu(up)
  float eps = 0.0f;
  int64_t batch = 0, tokens = 0;

  int64_t rows() const { return batch * tokens; }
  int64_t query() const { return query_heads * head_dim; }
  int64_t keys() const { return kv_heads * head_dim; }
};

// One value for each parameter of a block; null where it has none, or its gradient is not wanted.
template <class Value> struct OfModule {
  Value *weight = nullptr, *bias = nullptr;
};
template <class Value> struct OfBlock {
  OfModule<Value> attention_norm, query, key, value, output, mlp_norm, gate, up, down;
};

// A norm's output and statistics, where somebody else has computed them.
template <class Element> struct Normed {
  Element* out = nullptr;
  float *mean = nullptr, *rstd = nullptr;
};

// What forward fills and backward reads, part by part: many blocks of moderate size, as allocators like them.
template <class Element> struct BlockSaved {
  Element *middle = nullptr, *normed = nullptr, *middle_normed = nullptr; // [rows, hidden]; middle: x + attention
  Element *q = nullptr, *attended = nullptr;                              // [rows, query]
  Element *gate = nullptr, *up = nullptr;                                 // [rows, ffn]; gate only if gated
  float* statistics = nullptr;                                            // lse, and of both norms rstd and mean
};
constexpr int block_saved_parts = 8;
std::array<int64_t, block_saved_parts> block_saved_sizes(const BlockShape&); // numbers of elements, in the order above

// What forward and backward share.
template <class Element> struct BlockCall {
  Gemm gemm = nullptr;
  BlockShape shape;
  OfBlock<const Element> parameters;
  const Element* x = nullptr;   // [rows, hidden]
  Normed<Element> normed;       // of x; out null: forward computes it
  const float* turns = nullptr; // [turn_rows, head_dim] as cos, sin, ..., or null
  int64_t turn_rows = 0;
  TensorView cache_k, cache_v;
  MaskIntervals mask; // its start is the slice's place in the cache, its keys that plus tokens
  float scale = 1.0f;
  BlockSaved<Element> saved;
  int64_t num_threads = 1;
};

// out [rows, hidden]: x + attention + mlp; with apart the last summand alone (the others are saved.middle). append: k and v of the slice
// are written to the cache, else they are there already.
template <class Element> void block_forward(const BlockCall<Element>&, bool append, bool apart, Element* out);

// dx [rows, hidden], may not be dout. Adds into gradients, and into sums_k and sums_v for every key the slice saw; the slice's own rows
// of them are final.
template <class Element>
void block_backward(const BlockCall<Element>&, const OfBlock<float>& gradients, const TensorView& sums_k, const TensorView& sums_v,
                    const Element* dout, Element* dx);

extern template void block_forward(const BlockCall<float>&, bool, bool, float*);
extern template void block_forward(const BlockCall<Bfloat16>&, bool, bool, Bfloat16*);
extern template void block_backward(const BlockCall<float>&, const OfBlock<float>&, const TensorView&, const TensorView&, const float*,
                                    float*);
extern template void block_backward(const BlockCall<Bfloat16>&, const OfBlock<float>&, const TensorView&, const TensorView&,
                                    const Bfloat16*, Bfloat16*);

} // namespace tpk::cpu
