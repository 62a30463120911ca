// emulator/test_kernels.h: small kernels that test the emulator itself.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace tpk::emulator {

struct TestTask {
  std::array<void*, 4> tensors{};
  std::array<int64_t, 4> sizes{};
};

// Throws std::invalid_argument for a name that there is not.
void run_test_kernel(const std::string& name, int64_t grid, int threads, int64_t shared_bytes, const TestTask& task);
std::vector<std::string> test_kernel_names();

} // namespace tpk::emulator
