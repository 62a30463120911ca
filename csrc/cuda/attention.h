// cuda/attention.h: prefix attention on a CUDA device, as the bindings call it. No CUDA header, so that bindings compile without them.
// Errors are std::invalid_argument (the call) or std::runtime_error (the device), with values.
#pragma once

#include "tpk/attention_params.h"
#include "tpk/device_limits.h"

namespace tpk::cuda {

// The device's stream that a call runs on; stream is a cudaStream_t.
struct Place {
  int device = 0;
  void* stream = nullptr;
};

// Number of CUDA devices; throws with the driver's reason when there is no usable driver.
int device_count();
DeviceLimits limits_of(int device);

int64_t forward_workspace_bytes(const ForwardParams& params, bool deterministic, const Place& place);
void attention_forward(const ForwardParams& params, bool deterministic, void* workspace, const Place& place);

// Adds into dk, dv and dsinks; writes dq.
int64_t backward_workspace_bytes(const BackwardParams& params, bool deterministic, const Place& place);
void attention_backward(const BackwardParams& params, bool deterministic, void* workspace, const Place& place);
// Packed query rows of the backward's tile: slices at multiples of it, in rows, leave dk and dv bitwise the same (deterministic).
int invariance_rows(int64_t head_dim, int device);

} // namespace tpk::cuda
