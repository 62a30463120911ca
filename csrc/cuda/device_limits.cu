// cuda/device_limits.cu: what there is of CUDA devices, asked once a device.
#include <mutex>
#include <vector>

#include "cuda/attention.h"
#include "cuda/cuda_launcher.cuh"

namespace tpk::cuda {

int device_count() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice) return cudaGetLastError(), 0;
  CudaLauncher::check(error, "cudaGetDeviceCount");
  return count;
}

DeviceLimits limits_of(int device) {
  static std::mutex mutex;
  static std::vector<DeviceLimits> known;
  const std::lock_guard lock(mutex);
  if (known.empty()) known.resize(device_count(), DeviceLimits{0});
  if (device < 0 || device >= int(known.size()))
    throw std::invalid_argument("attention backend cuda: there is no device " + std::to_string(device) + " among " +
                                std::to_string(known.size()));
  DeviceLimits& limits = known[device];
  if (limits.capability != 0) return limits;
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    CudaLauncher::check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
    return value;
  };
  DeviceLimits found;
  found.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  found.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  found.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  found.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
  if (found.capability < 80)
    throw std::runtime_error("attention backend cuda: device " + std::to_string(device) + " has compute capability " +
                             std::to_string(found.capability / 10) + "." + std::to_string(found.capability % 10) +
                             "; the kernels need 8.0 or newer");
  return limits = found;
}

} // namespace tpk::cuda
