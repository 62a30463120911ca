// cuda/attention_backward_launch.cuh: launches of a backward call, on a GPU (attention_backward.cu) or in the emulator.
#pragma once

#include "cuda/attention_backward_keys.cuh"
#include "cuda/attention_backward_queries.cuh"

namespace tpk {

// f.template operator()<tile that owns keys, tile that owns query rows>().
template <class F> void dispatch_backward(DType dtype, int64_t head_dim, const DeviceLimits& device, F&& f) {
  dispatch(dtype, head_dim, [&]<class Element, int dim>() {
    using Queries = QueryTile<Element, dim>;
    if constexpr (KeyTile<Element, dim, false>::shared_bytes > small_shared_bytes) {
      if (device.shared_bytes < KeyTile<Element, dim, false>::shared_bytes) {
        f.template operator()<KeyTile<Element, dim, true>, Queries>();
        return;
      }
    }
    f.template operator()<KeyTile<Element, dim, false>, Queries>();
  });
}

inline int64_t backward_workspace_bytes(const BackwardParams& call, const DeviceLimits& device, bool deterministic) {
  int64_t bytes = 0;
  dispatch_backward(call.shape.dtype, call.shape.head_dim, device, [&]<class Keys, class Queries>() {
    bytes = plan_backward<Keys, Queries>(call, device, deterministic).workspace_bytes();
  });
  return bytes;
}

inline int backward_invariance_rows(int64_t head_dim, const DeviceLimits& device) {
  int rows = 0;
  dispatch_backward(DType::bfloat16, head_dim, device, [&]<class Keys, class Queries>() { rows = Keys::rows; });
  return rows;
}

template <class Launcher>
void launch_backward(const BackwardParams& call, const DeviceLimits& device, bool deterministic, void* workspace, Launcher& launcher) {
  dispatch_backward(call.shape.dtype, call.shape.head_dim, device, [&]<class Keys, class Queries>() {
    using Element = typename Keys::Element;
    constexpr int dim = Keys::head_dim;
    BackwardTask task = plan_backward<Keys, Queries>(call, device, deterministic);
    task.take_workspace(workspace);
    const auto blocks = [](int64_t work, int64_t a_block) { return (work + a_block - 1) / a_block; };
    launcher.run(attention_backward_prepare<Element, dim>, "attention_backward_prepare", blocks(task.places(), prepare_threads / (dim / 8)),
                 prepare_threads, 0, task);
    if (call.dsinks != nullptr)
      launcher.run(attention_backward_sinks<Element>, "attention_backward_sinks", call.shape.query_heads, sink_threads,
                   sink_threads / 32 * 4, task);
    launcher.run(attention_backward_keys<Keys>, "attention_backward_keys", task.key_order.tiles(), Keys::threads, Keys::shared_bytes, task);
    if (deterministic)
      launcher.run(attention_backward_queries<Queries>, "attention_backward_queries", task.row_order.tiles(), Queries::threads,
                   Queries::shared_bytes, task);
    else
      launcher.run(attention_backward_round<Element, dim>, "attention_backward_round", blocks(task.places() / 16, round_threads / 32),
                   round_threads, 0, task);
  });
}

} // namespace tpk
