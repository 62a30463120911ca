// cuda/dispatch.h: from run-time values to template arguments, and what a launcher is. Plain C++.
// A launcher has   template <class Task> void run(void (*kernel)(Task), const char* name, int64_t grid, int threads, int shared_bytes,
// const Task& task):   on a GPU it launches on a stream (cuda_launcher.cuh), in the emulator it runs the blocks.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "tpk/attention_params.h"
#include "tpk/device_limits.h"
#include "tpk/elements.h"

namespace tpk {

inline constexpr int64_t largest_grid = 0x7fffffff, largest_position = int64_t(1) << 30;

inline void refuse(const std::string& why) { throw std::invalid_argument("attention backend cuda: " + why); }

// f.template operator()<Element, head_dim>() for the kernels that are compiled.
template <class F> void dispatch(DType dtype, int64_t head_dim, F&& f) {
  const auto with = [&]<class Element>() {
    if (head_dim == 64) return f.template operator()<Element, 64>();
    if (head_dim == 128) return f.template operator()<Element, 128>();
    refuse("head_dim " + std::to_string(head_dim) + " is neither 64 nor 128; backend triton serves others");
  };
  if (dtype == DType::bfloat16) return with.template operator()<bf16>();
  if (dtype == DType::float16) return with.template operator()<fp16>();
  refuse("it computes bf16 and fp16, not fp32; backend triton serves fp32");
}

// Refuses what 32-bit rows and positions, 16-byte copies or the compiled kernels cannot do.
inline void check_shape(const AttentionShape& shape, const MaskIntervals& mask) {
  const int64_t rows = shape.tokens * shape.group();
  if (shape.head_dim != shape.value_head_dim)
    refuse("head_dim " + std::to_string(shape.head_dim) + " of keys and " + std::to_string(shape.value_head_dim) + " of values differ");
  if (shape.keys > largest_position || rows > largest_position || mask.start + shape.tokens > largest_position)
    refuse(std::to_string(shape.keys) + " keys or " + std::to_string(rows) + " query rows (tokens x heads of a group) exceed " +
           std::to_string(largest_position) + "; use fewer tokens a call");
}
inline void check_rows(const char* name, const TensorView& view, int64_t element_bytes) {
  const int64_t unit = 16 / element_bytes;
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0 || view.batch_stride % unit != 0 || view.token_stride % unit != 0 ||
      view.head_stride % unit != 0)
    refuse(std::string(name) + " has rows that do not start at a multiple of 16 bytes; pass a contiguous tensor");
}
inline void check_grid(int64_t blocks) {
  if (blocks > largest_grid)
    refuse("the call needs " + std::to_string(blocks) + " blocks, more than a grid's " + std::to_string(largest_grid) +
           "; split the batch");
}

} // namespace tpk
