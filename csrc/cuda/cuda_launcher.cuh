// cuda/cuda_launcher.cuh: launches a kernel on a stream of a device; an error becomes an exception with the launch's values.
// For *.cu files only. Trap: an error of an earlier, asynchronous kernel may surface here; the message says so.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace tpk {

class CudaLauncher {
 public:
  CudaLauncher(int device, void* stream) : stream_(static_cast<cudaStream_t>(stream)) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~CudaLauncher() { cudaSetDevice(before_); }
  CudaLauncher(const CudaLauncher&) = delete;
  CudaLauncher& operator=(const CudaLauncher&) = delete;

  template <class Task> void run(void (*kernel)(Task), const char* name, int64_t grid, int threads, int shared_bytes, const Task& task) {
    const auto* function = reinterpret_cast<const void*>(kernel);
    const std::string launch = std::string(name) + " (" + std::to_string(grid) + " blocks of " + std::to_string(threads) + " threads, " +
                               std::to_string(shared_bytes) + " bytes of shared memory)";
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), launch);
    void* arguments[] = {const_cast<Task*>(&task)};
    check(cudaLaunchKernel(function, dim3(static_cast<unsigned>(grid)), dim3(threads), arguments, shared_bytes, stream_), launch);
  }

  static void check(cudaError_t error, const std::string& what) {
    if (error == cudaSuccess) return;
    cudaGetLastError(); // this one is reported here, not again by the next call
    const std::string said = std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error) + ")";
    if (error == cudaErrorInsufficientDriver)
      throw std::runtime_error("attention backend cuda: there is no NVIDIA driver here, or it is older than the kernels need: " + said);
    if (error == cudaErrorNoKernelImageForDevice)
      throw std::runtime_error("attention backend cuda: it was not compiled for this device: " + said +
                               "; build again with TPK_CUDA=1 and CUDAARCHS naming its architecture");
    throw std::runtime_error("attention backend cuda: " + what + " failed: " + said +
                             "; an earlier kernel may be the cause, CUDA_LAUNCH_BLOCKING=1 tells");
  }

 private:
  cudaStream_t stream_;
  int before_ = 0;
};

} // namespace tpk
