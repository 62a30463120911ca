// cuda/attention_forward_launch.cuh: launches of a forward call, on a GPU (attention_forward.cu) or in the emulator.
#pragma once

#include "cuda/attention_forward.cuh"

namespace tpk {

// Bytes of device memory that the call needs besides its tensors.
inline int64_t forward_workspace_bytes(const ForwardParams& call, const DeviceLimits& device, bool deterministic) {
  int64_t bytes = 0;
  dispatch(call.shape.dtype, call.shape.head_dim, [&]<class Element, int head_dim>() {
    bytes = plan_forward<ForwardTile<Element, head_dim>>(call, device, deterministic).workspace_bytes();
  });
  return bytes;
}

template <class Launcher>
void launch_forward(const ForwardParams& call, const DeviceLimits& device, bool deterministic, void* workspace, Launcher& launcher) {
  dispatch(call.shape.dtype, call.shape.head_dim, [&]<class Element, int head_dim>() {
    using Tile = ForwardTile<Element, head_dim>;
    ForwardTask task = plan_forward<Tile>(call, device, deterministic);
    task.take_workspace(workspace);
    const int64_t tiles = task.order.tiles();
    launcher.run(attention_forward<Tile>, "attention_forward", std::min<int64_t>(tiles, int64_t(device.multiprocessors) * Tile::blocks),
                 Tile::threads, Tile::shared_bytes, task);
    if (task.order.splits == 1) return;
    const int64_t block_rows = combine_threads / (head_dim / 4);
    launcher.run(attention_combine<Element, head_dim>, "attention_combine", (task.rows() + block_rows - 1) / block_rows, combine_threads, 0,
                 task);
  });
}

} // namespace tpk
