// cuda/peer_launch.cuh: launches of a peer link's kernels, on a GPU (peer.cu) or in the emulator.
#pragma once

#include <algorithm>

#include "cuda/peer_matmul.cuh"
#include "cuda/peer_rows.cuh"

namespace tpk {

template <class F> void dispatch_peer(DType dtype, F&& f) {
  if (dtype == DType::float32) return f.template operator()<float>();
  dispatch_element(dtype, f);
}

// Rows of so many elements are read and written 16 bytes at a time.
inline void check_wide(const char* name, int64_t columns, DType dtype) {
  const int64_t width = dtype == DType::float32 ? 4 : 8;
  if (columns < width || columns % width != 0)
    refuse(std::string(name) + " has " + std::to_string(columns) + " columns; the kernels of a peer link take multiples of " +
           std::to_string(width) + ", language triton takes any");
}
inline void check_start(const char* name, const void* data) { check_rows(name, RowsView{const_cast<void*>(data), 0}); }

template <class Launcher> void launch_peer_take_credit(const PeerSlot& slot, Launcher& launcher) {
  launcher.run(peer_take_credit, "peer_take_credit", 1, warp_threads, 0, PeerUse{slot});
}
template <class Launcher> void launch_peer_begin_use(const PeerSlot& slot, int tiles, Launcher& launcher) {
  launcher.run(peer_begin_use, "peer_begin_use", 1, warp_threads, 0, PeerUse{slot, tiles});
}
template <class Launcher> void launch_peer_end_use(const PeerSlot& slot, bool release, Launcher& launcher) {
  launcher.run(peer_end_use, "peer_end_use", 1, warp_threads, 0, PeerUse{slot, 0, release});
}

template <class Launcher> void launch_peer_add_put(const PeerSlot& slot, const PeerAddPut& call, DType dtype, Launcher& launcher) {
  check_wide("x", call.columns, dtype);
  check_start("x", call.x), check_start("residual", call.residual), check_start("out", call.out);
  dispatch_peer(dtype, [&]<class Element>() {
    const AddPutTask task{slot, call};
    const int64_t blocks = task.tiles() * task.template blocks_of_tile<Element>();
    check_grid(blocks);
    if (blocks > 0) launcher.run(add_put<Element>, "add_put", blocks, add_put_threads, 16, task);
  });
}

template <class Launcher> void launch_peer_wait_norm(const PeerSlot& slot, const NormForward& call, DType dtype, Launcher& launcher) {
  check_wide("x", call.dim, dtype);
  check_grid(call.rows);
  check_start("x", call.x.data), check_start("out", call.out.data), check_start("weight", call.weight), check_start("bias", call.bias);
  if (call.rows == 0) return;
  dispatch_peer(dtype, [&]<class Element>() {
    constexpr int width = RowChunk<Element>::width, most = 1024 * norm_chunks * width;
    if (call.dim > most)
      refuse("a norm over " + std::to_string(call.dim) + " channels of this dtype; it serves up to " + std::to_string(most));
    launcher.run(wait_norm<Element>, "wait_norm", call.rows, norm_threads(call.dim, width), 272, WaitNormTask{slot, call});
  });
}

// f.template operator()<Tile>() and the number of blocks.
template <class F> void dispatch_product(const PeerMatmul& call, DType dtype, F&& f) {
  check_wide("a", call.k, dtype), check_wide("the product", call.n, dtype);
  check_start("a", call.a), check_start("b", call.b), check_start("residual", call.residual), check_start("out", call.out);
  dispatch_peer(dtype, [&]<class Element>() {
    const auto with = [&]<class Tile>() {
      const PeerMatmulTask task{{}, call};
      const int64_t blocks = task.tiles() * task.column_tiles(Tile::columns);
      check_grid(blocks);
      if (blocks > 0) f.template operator()<Tile>(blocks);
    };
    if (call.transposed)
      with.template operator()<ProductTile<Element, true>>();
    else
      with.template operator()<ProductTile<Element, false>>();
  });
}

template <class Launcher> void launch_peer_matmul_add_put(const PeerSlot& slot, const PeerMatmul& call, DType dtype, Launcher& launcher) {
  dispatch_product(call, dtype, [&]<class Tile>(int64_t blocks) {
    launcher.run(matmul_add_put<Tile>, "matmul_add_put", blocks, Tile::threads, Tile::shared_bytes, PeerMatmulTask{slot, call});
  });
}
template <class Launcher> void launch_peer_wait_matmul(const PeerSlot& slot, const PeerMatmul& call, DType dtype, Launcher& launcher) {
  dispatch_product(call, dtype, [&]<class Tile>(int64_t blocks) {
    launcher.run(wait_matmul<Tile>, "wait_matmul", blocks, Tile::threads, Tile::shared_bytes, PeerMatmulTask{slot, call});
  });
}

} // namespace tpk
