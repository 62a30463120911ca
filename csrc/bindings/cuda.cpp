// bindings/cuda.cpp: tpkernels._cuda, export only: pointers, sizes, strides and a stream become parameter structs; errors become
// exceptions. The GIL is released while a call plans and launches. Also the emulator's module, over the same functions: TPK_CUDA_MODULE
// names it.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/attention_arguments.h"
#include "bindings/cuda_fused.h"
#include "bindings/cuda_peer.h"
#include "cuda/attention.h"

#ifndef TPK_CUDA_MODULE
#define TPK_CUDA_MODULE _cuda
#endif

namespace py = pybind11;

namespace {

using namespace tpk::bindings;

constexpr const char* who = "attention backend cuda";

// allocate: bytes -> address of memory of the device that outlives the kernels of the call; asked only when some is needed.
using Allocate = std::function<int64_t(int64_t)>;

void forward(int dtype, const Sizes& sizes, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, int64_t lse,
             const MaskSizes& mask, double scale, double softcap, int64_t sinks, bool deterministic, int device, int64_t stream,
             const Allocate& allocate) {
  tpk::ForwardParams p;
  p.shape = shape_of(who, dtype, sizes);
  p.q = view(q), p.k = view(k), p.v = view(v), p.out = view(out);
  p.lse = pointer<float>(lse);
  p.mask = mask_of(mask, p.shape.keys);
  p.scale = float(scale), p.softcap = float(softcap), p.sinks = pointer<const float>(sinks);
  const tpk::cuda::Place place{device, pointer<void>(stream)};
  const int64_t bytes = tpk::cuda::forward_workspace_bytes(p, deterministic, place);
  void* workspace = bytes == 0 ? nullptr : pointer<void>(allocate(bytes));
  const py::gil_scoped_release unlocked;
  tpk::cuda::attention_forward(p, deterministic, workspace, place);
}

void backward(int dtype, const Sizes& sizes, const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
              int64_t lse, const Tensor& dq, const Tensor& dk, const Tensor& dv, int64_t dsinks, const MaskSizes& mask, double scale,
              double softcap, int64_t sinks, bool deterministic, int device, int64_t stream, const Allocate& allocate) {
  tpk::BackwardParams p;
  p.shape = shape_of(who, dtype, sizes);
  p.dout = view(dout), p.q = view(q), p.k = view(k), p.v = view(v), p.out = view(out);
  p.lse = pointer<const float>(lse);
  p.dq = view(dq), p.dk = view(dk), p.dv = view(dv), p.dsinks = pointer<float>(dsinks);
  p.mask = mask_of(mask, p.shape.keys);
  p.scale = float(scale), p.softcap = float(softcap), p.sinks = pointer<const float>(sinks);
  const tpk::cuda::Place place{device, pointer<void>(stream)};
  void* workspace = pointer<void>(allocate(tpk::cuda::backward_workspace_bytes(p, deterministic, place)));
  const py::gil_scoped_release unlocked;
  tpk::cuda::attention_backward(p, deterministic, workspace, place);
}

} // namespace

PYBIND11_MODULE(TPK_CUDA_MODULE, m) {
  using py::arg;
  m.doc() = "CUDA kernels of tpkernels. Raw addresses: use tpkernels.prefix_attention instead.";
  m.def("device_count", &tpk::cuda::device_count);
  m.def("capability", [](int device) { return tpk::cuda::limits_of(device).capability; }, arg("device"));
  m.def("invariance_rows", &tpk::cuda::invariance_rows, arg("head_dim"), arg("device"));
  m.def("attention_forward", &forward, py::kw_only(), arg("dtype"), arg("sizes"), arg("q"), arg("k"), arg("v"), arg("out"), arg("lse"),
        arg("mask"), arg("scale"), arg("softcap"), arg("sinks"), arg("deterministic"), arg("device"), arg("stream"), arg("allocate"));
  m.def("attention_backward", &backward, py::kw_only(), arg("dtype"), arg("sizes"), arg("dout"), arg("q"), arg("k"), arg("v"), arg("out"),
        arg("lse"), arg("dq"), arg("dk"), arg("dv"), arg("dsinks"), arg("mask"), arg("scale"), arg("softcap"), arg("sinks"),
        arg("deterministic"), arg("device"), arg("stream"), arg("allocate"));
  bind_cuda_fused(m);
  bind_cuda_peer(m);
}
