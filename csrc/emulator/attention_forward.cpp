// emulator/attention_forward.cpp: the forward kernels of csrc/cuda in the emulator, for bindings/cuda.cpp.
#include "cuda/attention.h"
#include "cuda/attention_forward_launch.cuh"
#include "emulator/session.h"

namespace tpk::cuda {

int64_t forward_workspace_bytes(const ForwardParams& params, bool deterministic, const Place& place) {
  return tpk::forward_workspace_bytes(params, limits_of(place.device), deterministic);
}

void attention_forward(const ForwardParams& params, bool deterministic, void* workspace, const Place& place) {
  emulator::EmulatorLauncher launcher;
  launch_forward(params, limits_of(place.device), deterministic, workspace, launcher);
}

} // namespace tpk::cuda
