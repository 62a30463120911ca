// emulator/peer.cpp: the kernels of a peer link in the emulator, for bindings/cuda_peer.cpp. A place is a stream of its own.
#include "cuda/peer.h"

#include "cuda/peer_launch.cuh"
#include "emulator/session.h"

namespace tpk::cuda {

void peer_take_credit(const PeerSlot& slot, const Place& place) {
  emulator::EmulatorLauncher launcher{place};
  launch_peer_take_credit(slot, launcher);
}
void peer_begin_use(const PeerSlot& slot, int tiles, const Place& place) {
  emulator::EmulatorLauncher launcher{place};
  launch_peer_begin_use(slot, tiles, launcher);
}
void peer_end_use(const PeerSlot& slot, bool release, const Place& place) {
  emulator::EmulatorLauncher launcher{place};
  launch_peer_end_use(slot, release, launcher);
}
void peer_add_put(const PeerSlot& slot, const PeerAddPut& params, DType dtype, const Place& place) {
  emulator::EmulatorLauncher launcher{place};
  launch_peer_add_put(slot, params, dtype, launcher);
}
void peer_wait_norm(const PeerSlot& slot, const NormForward& params, DType dtype, const Place& place) {
  emulator::EmulatorLauncher launcher{place};
  launch_peer_wait_norm(slot, params, dtype, launcher);
}
void peer_matmul_add_put(const PeerSlot& slot, const PeerMatmul& params, DType dtype, const Place& place) {
  emulator::EmulatorLauncher launcher{place};
  launch_peer_matmul_add_put(slot, params, dtype, launcher);
}
void peer_wait_matmul(const PeerSlot& slot, const PeerMatmul& params, DType dtype, const Place& place) {
  emulator::EmulatorLauncher launcher{place};
  launch_peer_wait_matmul(slot, params, dtype, launcher);
}

} // namespace tpk::cuda
