// emulator/test_kernels.h: small kernels that test the emulator itself (test_kernels.cpp), fragments' index maths
// (fragment_kernels.cpp), and the watch over order (order_kernels.cpp).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "cuda/attention.h"

namespace tpk::emulator {

struct TestTask {
  std::array<void*, 4> tensors{};
  std::array<int64_t, 4> sizes{};
};

struct TestKernel {
  const char* name;
  void (*kernel)(TestTask);
};

std::span<const TestKernel> fragment_kernels();
std::span<const TestKernel> order_kernels();

// Throws std::invalid_argument for a name that there is not.
void run_test_kernel(const std::string& name, int64_t grid, int threads, int64_t shared_bytes, const TestTask& task,
                     const cuda::Place& place);

} // namespace tpk::emulator
