// cuda/fused_launch.cuh: launches of the fused ops, on a GPU (fused.cu) or in the emulator.
#pragma once

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

} // namespace tpk
