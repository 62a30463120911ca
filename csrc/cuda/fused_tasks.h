// cuda/fused_tasks.h: what the fused kernels take, and the choices of a call. Plain C++.
#pragma once

#include "cuda/dispatch.h"
#include "tpk/fused_params.h"

namespace tpk {

// A thread owns up to two chunks of 16 bytes of a row, so a block of 1024 threads a row of 16384 elements of 16 bits.
inline constexpr int norm_chunks = 2, largest_norm_dim = norm_chunks * 8 * 1024;
// Rows whose share of the weights' gradients one block sums: fixed, so that the sums do not depend on the device.
inline constexpr int64_t norm_block_rows = 16;
inline constexpr int weight_sum_threads = 256;

struct NormForwardTask {
  NormForward call;
};
struct NormBackwardTask {
  NormBackward call;
  float* shares = nullptr; // [row blocks, 2, dim]: of dweight and dbias; null when neither is wanted

  constexpr int64_t blocks() const { return (call.rows + norm_block_rows - 1) / norm_block_rows; }
  constexpr bool sums() const { return call.dweight != nullptr || call.dbias != nullptr; }
  constexpr int64_t workspace_bytes() const { return sums() ? blocks() * 2 * call.dim * int64_t(sizeof(float)) : 0; }
};

// Threads of a block that norms a row at a time.
constexpr int norm_threads(int64_t dim, int width = 8) {
  const int64_t threads = (dim + norm_chunks * width - 1) / (norm_chunks * width);
  return int((threads + 31) / 32 * 32);
}

inline void check_norm(int64_t rows, int64_t dim) {
  if (dim % 8 != 0 || dim < 8 || dim > largest_norm_dim)
    refuse("a norm over " + std::to_string(dim) + " channels; it serves multiples of 8 up to " + std::to_string(largest_norm_dim));
  check_grid(rows);
}
inline void check_rows(const char* name, const RowsView& view) { check_rows(name, TensorView{view.data, 0, view.stride, 0}, 2); }

template <class F> void dispatch_element(DType dtype, F&& f) {
  if (dtype == DType::bfloat16) return f.template operator()<bf16>();
  if (dtype == DType::float16) return f.template operator()<fp16>();
  refuse("it computes bf16 and fp16, not fp32");
}

} // namespace tpk
