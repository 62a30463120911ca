// emulator/fused.cpp: the fused kernels of csrc/cuda in the emulator, for bindings/cuda_fused.cpp.
#include "cuda/fused.h"
#include "cuda/fused_launch.cuh"
#include "emulator/session.h"

namespace tpk::cuda {

void norm_forward(const NormForward& params, DType dtype, const Place&) {
  emulator::EmulatorLauncher launcher;
  launch_norm_forward(params, dtype, launcher);
}

int64_t norm_backward_workspace_bytes(const NormBackward& params) { return NormBackwardTask{params}.workspace_bytes(); }

void norm_backward(const NormBackward& params, DType dtype, void* workspace, const Place&) {
  emulator::EmulatorLauncher launcher;
  launch_norm_backward(params, dtype, workspace, launcher);
}

} // namespace tpk::cuda
