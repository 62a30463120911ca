// cuda/fused.cu: the fused kernels on a GPU.                                                                            (launcher)
#include "cuda/fused.h"

#include "cuda/cuda_launcher.cuh"
#include "cuda/fused_launch.cuh"

namespace tpk::cuda {

void norm_forward(const NormForward& params, DType dtype, const Place& place) {
  CudaLauncher launcher(place.device, place.stream);
  launch_norm_forward(params, dtype, launcher);
}

int64_t norm_backward_workspace_bytes(const NormBackward& params) { return NormBackwardTask{params}.workspace_bytes(); }

void norm_backward(const NormBackward& params, DType dtype, void* workspace, const Place& place) {
  CudaLauncher launcher(place.device, place.stream);
  launch_norm_backward(params, dtype, workspace, launcher);
}

} // namespace tpk::cuda
