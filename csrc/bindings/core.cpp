// bindings/core.cpp: tpkernels._core, export only: pointers, sizes and strides become parameter structs; errors become exceptions.
// The GIL is released while a kernel runs.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/attention_arguments.h"
#include "bindings/block.h"
#include "bindings/links.h"
#include "cpu/attention.h"
#include "cpu/cpu_features.h"
#include "fused.h"
#include "tpk/tiling.h"

namespace py = pybind11;

namespace {

using namespace tpk::bindings;

tpk::AttentionShape shape_of(int dtype, const Sizes& n) {
  const tpk::AttentionShape shape = tpk::bindings::shape_of("cpu attention", dtype, n);
  if (n[5] < 1 || n[5] > 256 || n[6] < 1 || n[6] > 256)
    throw std::invalid_argument("cpu attention: head_dim " + std::to_string(n[5]) + " / " + std::to_string(n[6]) + " is outside 1..256");
  if (n[2] >= std::numeric_limits<int32_t>::max() / 2)
    throw std::invalid_argument("cpu attention: " + std::to_string(n[2]) + " keys are more than 2^30");
  return shape;
}

void forward(int dtype, const Sizes& sizes, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, int64_t lse,
             const MaskSizes& mask, float scale, float softcap, int64_t sinks, int64_t num_threads) {
  tpk::ForwardParams p;
  p.shape = shape_of(dtype, sizes);
  p.q = view(q), p.k = view(k), p.v = view(v), p.out = view(out);
  p.lse = pointer<float>(lse);
  p.mask = mask_of(mask, p.shape.keys);
  p.scale = scale, p.softcap = softcap, p.sinks = pointer<const float>(sinks);
  const py::gil_scoped_release unlocked;
  tpk::cpu::attention_forward(p, num_threads);
}

void backward(int dtype, const Sizes& sizes, const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
              int64_t lse, const Tensor& dq, const Tensor& dk, const Tensor& dv, int64_t dsinks, const MaskSizes& mask, float scale,
              float softcap, int64_t sinks, int64_t num_threads) {
  tpk::BackwardParams p;
  p.shape = shape_of(dtype, sizes);
  p.dout = view(dout), p.q = view(q), p.k = view(k), p.v = view(v), p.out = view(out);
  p.lse = pointer<const float>(lse);
  p.dq = view(dq), p.dk = view(dk), p.dv = view(dv), p.dsinks = pointer<float>(dsinks);
  p.mask = mask_of(mask, p.shape.keys);
  p.scale = scale, p.softcap = softcap, p.sinks = pointer<const float>(sinks);
  const py::gil_scoped_release unlocked;
  tpk::cpu::attention_backward(p, num_threads);
}

} // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "CPU kernels of tpkernels. Raw addresses: use tpkernels.prefix_attention instead.";
  m.def("isa_levels", [] {
    std::vector<std::string> names;
    for (const auto level : tpk::cpu::usable_isa_levels()) names.emplace_back(tpk::cpu::name_of(level));
    return names;
  });
  m.def("isa_level", [] { return std::string(tpk::cpu::name_of(tpk::cpu::chosen_isa_level())); });
  bind_block(m);
  bind_fused(m);
  m.def("backward_query_tokens", &tpk::backward_query_tokens, py::arg("group"));
  m.def("attention_forward", &forward, py::kw_only(), py::arg("dtype"), py::arg("sizes"), py::arg("q"), py::arg("k"), py::arg("v"),
        py::arg("out"), py::arg("lse"), py::arg("mask"), py::arg("scale"), py::arg("softcap"), py::arg("sinks"), py::arg("num_threads"));
  m.def("attention_backward", &backward, py::kw_only(), py::arg("dtype"), py::arg("sizes"), py::arg("dout"), py::arg("q"), py::arg("k"),
        py::arg("v"), py::arg("out"), py::arg("lse"), py::arg("dq"), py::arg("dk"), py::arg("dv"), py::arg("dsinks"), py::arg("mask"),
        py::arg("scale"), py::arg("softcap"), py::arg("sinks"), py::arg("num_threads"));
#ifdef TPK_SHM_LINKS
  bind_beat(m);
  bind_links(m);
#endif
}
