// cuda/peer_rows.cuh: a sum whose rows go into the peer's memory, and a norm of rows that come from there.                      (kernels)
// [rows, columns], contiguous. add_put: a row tile is one range of elements, split over blocks of 16 KiB, of which the last posts.
// wait_norm: a block a row, which waits for the row's tile. Without flags both are the plain op, bit for bit.
#pragma once

#include "cuda/norm.cuh"
#include "cuda/peer_protocol.cuh"

namespace tpk {

inline constexpr int add_put_threads = 256, add_put_chunks = 4; // 16 bytes each a thread: loads of all are under way at once

struct AddPutTask {
  PeerSlot slot;
  PeerAddPut call;

  template <class Element> constexpr int64_t tile_chunks() const { // a tile starts at a multiple of 16 bytes: it has 64 rows
    return call.columns * peer_tile_rows / (16 / int(sizeof(Element)));
  }
  template <class Element> constexpr int64_t blocks_of_tile() const {
    return (tile_chunks<Element>() + add_put_threads * add_put_chunks - 1) / (add_put_threads * add_put_chunks);
  }
  constexpr int64_t tiles() const { return (call.rows + peer_tile_rows - 1) / peer_tile_rows; }
};

template <class Element> __global__ void __launch_bounds__(add_put_threads) add_put(const __grid_constant__ AddPutTask task) {
  using Chunk = RowChunk<Element>;
  const PeerAddPut& call = task.call;
  const bool handed_on = task.slot.flags != nullptr;
  if (handed_on && !block_follows(0, [&] { return !stopped(task.slot); })) return;
  const auto blocks = uint32_t(task.blocks_of_tile<Element>());
  const uint32_t tile = blockIdx.x / blocks, part = blockIdx.x - tile * blocks;
  const auto* x = static_cast<const Element*>(call.x);
  const auto* residual = static_cast<const Element*>(call.residual);
  auto* out = static_cast<Element*>(call.out);
  const int64_t tile_chunks = task.tile_chunks<Element>(), begin = tile * tile_chunks,
                left = call.rows * call.columns / Chunk::width - begin;
  Chunk value[add_put_chunks], beside[add_put_chunks];
  const auto each = [&](const auto& f) { // f(i, chunk of the tensor) for this thread's chunks
#pragma unroll
    for (int i = 0; i < add_put_chunks; ++i) {
      const int64_t chunk = (int64_t(part) * add_put_chunks + i) * add_put_threads + threadIdx.x;
      if (chunk < tile_chunks && chunk < left) f(i, begin + chunk);
    }
  };
  each([&](int i, int64_t chunk) {
    value[i].load(x, chunk);
    if (residual != nullptr) beside[i].load(residual, chunk);
  });
  each([&](int i, int64_t chunk) {
    if (residual != nullptr) value[i].add(beside[i]);
    value[i].store(out, chunk);
  });
  if (handed_on) post_tile(task.slot, tile, blocks);
}

struct WaitNormTask {
  PeerSlot slot;
  NormForward call;
};

template <class Element> __global__ void __launch_bounds__(1024) wait_norm(const __grid_constant__ WaitNormTask task) {
  const int64_t row = blockIdx.x;
  if (task.slot.flags != nullptr && !tile_came(task.slot, uint32_t(row / peer_tile_rows), 256)) return;
  norm_row<Element>(task.call, row);
}

} // namespace tpk
