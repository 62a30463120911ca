// cuda/attention_forward.cu: the forward kernels on a GPU.                                                              (launcher)
#include "cuda/attention.h"
#include "cuda/attention_forward_launch.cuh"
#include "cuda/cuda_launcher.cuh"

namespace tpk::cuda {

int64_t forward_workspace_bytes(const ForwardParams& params, bool deterministic, const Place& place) {
  return tpk::forward_workspace_bytes(params, limits_of(place.device), deterministic);
}

void attention_forward(const ForwardParams& params, bool deterministic, void* workspace, const Place& place) {
  CudaLauncher launcher(place.device, place.stream);
  launch_forward(params, limits_of(place.device), deterministic, workspace, launcher);
}

} // namespace tpk::cuda
