// include/tpk/elements.h: 16-bit elements of tensors as kernels see them: bits in memory. Arithmetic is fp32 only; cuda/ptx.cuh converts.
#pragma once

#include <cstdint>

namespace tpk {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

} // namespace tpk
