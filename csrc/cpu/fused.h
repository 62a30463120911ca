// cpu/fused.h: the elementwise and row-wise parts of a transformer block, forward and backward, each in one pass over memory.
// A tensor is `rows` rows of contiguous elements in the storage type, rows `stride` elements apart; arithmetic is fp32. A row's result
// depends on that row alone, whatever the range of rows or the number of threads: any slicing gives the same bits. Sums over rows
// (gradients of norm weights) run in fixed blocks of rows, so only they depend on how rows are cut.
#pragma once

#include <cstdint>

#include "tpk/fused_params.h"

namespace tpk::cpu {

using tpk::NormBackward, tpk::NormForward, tpk::RowsView;

// Pairs of neighbouring channels turn by (cos, sin): x [rows, heads * head_dim], turns fp32 [turn_rows, head_dim] as cos, sin, cos, ...
struct Rotary {
  int64_t rows = 0, heads = 0, head_dim = 0, turn_rows = 0; // row r uses row r % turn_rows of turns
  bool inverse = false;
  RowsView x, out; // may be the same memory
  const float* turns = nullptr;
};

enum class Activation : int32_t { silu = 0, gelu_tanh = 1 };

// out = activation(gate) * up, or activation(gate) without up.
struct GatedForward {
  int64_t rows = 0, dim = 0;
  Activation activation = Activation::silu;
  RowsView gate, up, out;
};

// Also recomputes the forward's out, which the weight gradient of the next linear needs, unless out is null.
struct GatedBackward {
  int64_t rows = 0, dim = 0;
  Activation activation = Activation::silu;
  RowsView dout, gate, up, out, dgate, dup;
};

// out = x + residual, rounded once.
struct Add {
  int64_t rows = 0, dim = 0;
  RowsView x, residual, out;
};

// Between fp32 rows and rows of the storage type.
struct Convert {
  int64_t rows = 0, dim = 0;
  RowsView wide, narrow;
};

void norm_forward(const NormForward&, DType, int64_t num_threads);
void norm_backward(const NormBackward&, DType, int64_t num_threads);
void rotary(const Rotary&, DType, int64_t num_threads);
void gated_forward(const GatedForward&, DType, int64_t num_threads);
void gated_backward(const GatedBackward&, DType, int64_t num_threads);
void add(const Add&, DType, int64_t num_threads);
void narrow(const Convert&, DType, int64_t num_threads);
void widen(const Convert&, DType, int64_t num_threads);

// One ISA level's kernels for one storage type, over rows [first, end). sums: [2][dim] of this range, written, or null.
struct FusedKernels {
  void (*norm_forward)(const NormForward&, int64_t first, int64_t end);
  void (*norm_backward)(const NormBackward&, int64_t first, int64_t end, float* sums);
  void (*rotary)(const Rotary&, int64_t first, int64_t end);
  void (*gated_forward)(const GatedForward&, int64_t first, int64_t end);
  void (*gated_backward)(const GatedBackward&, int64_t first, int64_t end);
  void (*add)(const Add&, int64_t first, int64_t end);
  void (*narrow)(const Convert&, int64_t first, int64_t end);
  void (*widen)(const Convert&, int64_t first, int64_t end);
};

const FusedKernels* fused_kernels_baseline(DType);
const FusedKernels* fused_kernels_avx2(DType);
const FusedKernels* fused_kernels_avx512(DType);
const FusedKernels* fused_kernels_avx512_bf16(DType);

} // namespace tpk::cpu
