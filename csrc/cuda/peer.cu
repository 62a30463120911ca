// cuda/peer.cu: the kernels of a peer link on a GPU.                                                                    (launcher)
#include "cuda/peer.h"

#include "cuda/cuda_launcher.cuh"
#include "cuda/peer_launch.cuh"

namespace tpk::cuda {

void peer_take_credit(const PeerSlot& slot, const Place& place) {
  CudaLauncher launcher(place.device, place.stream);
  launch_peer_take_credit(slot, launcher);
}
void peer_begin_use(const PeerSlot& slot, int tiles, const Place& place) {
  CudaLauncher launcher(place.device, place.stream);
  launch_peer_begin_use(slot, tiles, launcher);
}
void peer_end_use(const PeerSlot& slot, bool release, const Place& place) {
  CudaLauncher launcher(place.device, place.stream);
  launch_peer_end_use(slot, release, launcher);
}
void peer_add_put(const PeerSlot& slot, const PeerAddPut& params, DType dtype, const Place& place) {
  CudaLauncher launcher(place.device, place.stream);
  launch_peer_add_put(slot, params, dtype, launcher);
}
void peer_wait_norm(const PeerSlot& slot, const NormForward& params, DType dtype, const Place& place) {
  CudaLauncher launcher(place.device, place.stream);
  launch_peer_wait_norm(slot, params, dtype, launcher);
}
void peer_matmul_add_put(const PeerSlot& slot, const PeerMatmul& params, DType dtype, const Place& place) {
  CudaLauncher launcher(place.device, place.stream);
  launch_peer_matmul_add_put(slot, params, dtype, launcher);
}
void peer_wait_matmul(const PeerSlot& slot, const PeerMatmul& params, DType dtype, const Place& place) {
  CudaLauncher launcher(place.device, place.stream);
  launch_peer_wait_matmul(slot, params, dtype, launcher);
}

} // namespace tpk::cuda
