// include/tpk/device_limits.h: what the choices of a launch depend on, of the CUDA device that it runs on.
#pragma once

#include <cstdint>

namespace tpk {

struct DeviceLimits {
  int capability = 80; // 90 is 9.0
  int multiprocessors = 108;
  int shared_bytes = 163 * 1024; // that a block may have
  int64_t l2_bytes = int64_t(40) << 20;
};

} // namespace tpk
