// cuda/fused_launch.cuh: launches of the fused ops, on a GPU (fused.cu) or in the emulator.
#pragma once

#include "cuda/cache_append.cuh"
#include "cuda/norm.cuh"

namespace tpk {

template <class Launcher> void launch_norm_forward(const NormForward& call, DType dtype, Launcher& launcher) {
  check_norm(call.rows, call.dim);
  check_rows("x", call.x), check_rows("delta", call.delta), check_rows("total", call.total), check_rows("out", call.out);
  check_rows("weight", {const_cast<void*>(call.weight), 0}), check_rows("bias", {const_cast<void*>(call.bias), 0});
  if (call.rows == 0) return;
  dispatch_element(dtype, [&]<class Element>() {
    launcher.run(norm_forward<Element>, "norm_forward", call.rows, norm_threads(call.dim), 256, NormForwardTask{call});
  });
}

template <class Launcher> void launch_norm_backward(const NormBackward& call, DType dtype, void* workspace, Launcher& launcher) {
  check_norm(call.rows, call.dim);
  check_rows("dout", call.dout), check_rows("x", call.x), check_rows("dresidual", call.dresidual), check_rows("dx", call.dx);
  check_rows("weight", {const_cast<void*>(call.weight), 0});
  if (call.rows == 0) return;
  dispatch_element(dtype, [&]<class Element>() {
    NormBackwardTask task{call};
    if (task.sums()) task.shares = static_cast<float*>(workspace);
    launcher.run(norm_backward<Element>, "norm_backward", task.blocks(), norm_threads(call.dim), 256, task);
    if (task.sums())
      launcher.run(norm_weight_sums<Element>, "norm_weight_sums", (2 * call.dim + weight_sum_threads - 1) / weight_sum_threads,
                   weight_sum_threads, 0, task);
  });
}

template <class Launcher> void launch_cache_append(const CacheAppend& call, Launcher& launcher) {
  if (call.head_dim % 8 != 0 || call.value_head_dim % 8 != 0)
    refuse("head_dim " + std::to_string(call.head_dim) + "/" + std::to_string(call.value_head_dim) + " must be multiples of 8 to append");
  check_rows("q", call.q, 2), check_rows("k", call.k, 2), check_rows("v", call.v, 2), check_rows("q_out", call.q_out, 2);
  check_rows("the key cache", call.cache_k, 2), check_rows("the value cache", call.cache_v, 2);
  check_rows("turns", {const_cast<float*>(call.turns), call.turns_batch_stride, 0, 0}, 4);
  AppendTask task{call};
  if (call.turns == nullptr) task.call.q = task.call.q_out = {};
  const int64_t blocks = (task.chunks() + append_threads - 1) / append_threads;
  check_grid(blocks);
  if (blocks == 0) return;
  dispatch_element(call.dtype,
                   [&]<class Element>() { launcher.run(cache_append<Element>, "cache_append", blocks, append_threads, 0, task); });
}

} // namespace tpk
