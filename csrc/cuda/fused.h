// cuda/fused.h: the fused ops on a CUDA device, as the bindings call them. No CUDA header. Errors as in attention.h.
#pragma once

#include "cuda/attention.h"
#include "tpk/fused_params.h"

namespace tpk::cuda {

void norm_forward(const NormForward& params, DType dtype, const Place& place);
// Bytes of device memory that the backward needs besides its tensors.
int64_t norm_backward_workspace_bytes(const NormBackward& params);
void norm_backward(const NormBackward& params, DType dtype, void* workspace, const Place& place);

} // namespace tpk::cuda
