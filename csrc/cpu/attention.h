// cpu/attention.h: prefix attention on the CPU, forward and backward, for any usable ISA level. Results do not depend on num_threads.
#pragma once

#include "tpk/attention_params.h"

namespace tpk::cpu {

void attention_forward(const ForwardParams& params, int64_t num_threads);
// Adds into dk, dv and dsinks; writes dq.
void attention_backward(const BackwardParams& params, int64_t num_threads);

} // namespace tpk::cpu
