// cuda/peer.h: the kernels of a peer link on a CUDA device, as the bindings call them. No CUDA header. Errors as in attention.h.
#pragma once

#include "cuda/attention.h"
#include "tpk/fused_params.h"
#include "tpk/peer_params.h"

namespace tpk::cuda {

void peer_take_credit(const PeerSlot& slot, const Place& place);
void peer_begin_use(const PeerSlot& slot, int tiles, const Place& place);
void peer_end_use(const PeerSlot& slot, bool release, const Place& place);
void peer_add_put(const PeerSlot& slot, const PeerAddPut& params, DType dtype, const Place& place);
void peer_wait_norm(const PeerSlot& slot, const NormForward& params, DType dtype, const Place& place);
void peer_matmul_add_put(const PeerSlot& slot, const PeerMatmul& params, DType dtype, const Place& place);
void peer_wait_matmul(const PeerSlot& slot, const PeerMatmul& params, DType dtype, const Place& place);

} // namespace tpk::cuda
