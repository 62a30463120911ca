// emulator/attention_backward.cpp: the backward kernels of csrc/cuda in the emulator, for bindings/cuda.cpp.
#include "cuda/attention.h"
#include "cuda/attention_backward_launch.cuh"
#include "emulator/session.h"

namespace tpk::cuda {

int64_t backward_workspace_bytes(const BackwardParams& params, bool deterministic, const Place& place) {
  return tpk::backward_workspace_bytes(params, limits_of(place.device), deterministic);
}

void attention_backward(const BackwardParams& params, bool deterministic, void* workspace, const Place& place) {
  emulator::EmulatorLauncher launcher;
  launch_backward(params, limits_of(place.device), deterministic, workspace, launcher);
}

int invariance_rows(int64_t head_dim, int device) { return backward_invariance_rows(head_dim, limits_of(device)); }

} // namespace tpk::cuda
