// bindings/fused.cpp: the fused kernels in tpkernels._core, export only. A tensor is (address, row stride in elements), address 0 none;
// a range of rows is an address further on and fewer rows. Arguments are positional, since these calls are counted in microseconds.
#include "fused.h"

#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>

#include "cpu/fused.h"

namespace py = pybind11;

namespace {

using Tensor = std::array<int64_t, 2>;

template <class T> T* pointer(int64_t address) { return reinterpret_cast<T*>(static_cast<intptr_t>(address)); }

tpk::cpu::RowsView view(const Tensor& t) { return {pointer<void>(t[0]), t[1]}; }

tpk::DType dtype_of(int code) {
  if (code < 0 || code > 2) throw std::invalid_argument("cpu fused kernels: unknown dtype code " + std::to_string(code));
  return static_cast<tpk::DType>(code);
}

tpk::cpu::Activation activation_of(int code) {
  if (code < 0 || code > 1) throw std::invalid_argument("cpu fused kernels: unknown activation code " + std::to_string(code));
  return static_cast<tpk::cpu::Activation>(code);
}

void norm_forward(int dtype, bool rms, int64_t rows, int64_t dim, float eps, const Tensor& x, const Tensor& delta, const Tensor& total,
                  const Tensor& out, int64_t weight, int64_t bias, int64_t mean, int64_t rstd, int64_t num_threads) {
  const tpk::cpu::NormForward p{rows,
                                dim,
                                rms,
                                eps,
                                view(x),
                                view(delta),
                                view(total),
                                view(out),
                                pointer<void>(weight),
                                pointer<void>(bias),
                                pointer<float>(mean),
                                pointer<float>(rstd)};
  const py::gil_scoped_release unlocked;
  tpk::cpu::norm_forward(p, dtype_of(dtype), num_threads);
}

void norm_backward(int dtype, bool rms, int64_t rows, int64_t dim, const Tensor& dout, const Tensor& x, const Tensor& dresidual,
                   const Tensor& dx, int64_t weight, int64_t mean, int64_t rstd, int64_t dweight, int64_t dbias, int64_t num_threads) {
  const tpk::cpu::NormBackward p{rows,
                                 dim,
                                 rms,
                                 view(dout),
                                 view(x),
                                 view(dresidual),
                                 view(dx),
                                 pointer<void>(weight),
                                 pointer<float>(mean),
                                 pointer<float>(rstd),
                                 pointer<float>(dweight),
                                 pointer<float>(dbias)};
  const py::gil_scoped_release unlocked;
  tpk::cpu::norm_backward(p, dtype_of(dtype), num_threads);
}

void rotary(int dtype, bool inverse, int64_t rows, int64_t heads, int64_t head_dim, int64_t turn_rows, const Tensor& x, const Tensor& out,
            int64_t turns, int64_t num_threads) {
  const tpk::cpu::Rotary p{rows, heads, head_dim, turn_rows, inverse, view(x), view(out), pointer<float>(turns)};
  const py::gil_scoped_release unlocked;
  tpk::cpu::rotary(p, dtype_of(dtype), num_threads);
}

void gated_forward(int dtype, int activation, int64_t rows, int64_t dim, const Tensor& gate, const Tensor& up, const Tensor& out,
                   int64_t num_threads) {
  const tpk::cpu::GatedForward p{rows, dim, activation_of(activation), view(gate), view(up), view(out)};
  const py::gil_scoped_release unlocked;
  tpk::cpu::gated_forward(p, dtype_of(dtype), num_threads);
}

void gated_backward(int dtype, int activation, int64_t rows, int64_t dim, const Tensor& dout, const Tensor& gate, const Tensor& up,
                    const Tensor& out, const Tensor& dgate, const Tensor& dup, int64_t num_threads) {
  const tpk::cpu::GatedBackward p{rows,        dim,      activation_of(activation), view(dout), view(gate), view(up), view(out),
                                  view(dgate), view(dup)};
  const py::gil_scoped_release unlocked;
  tpk::cpu::gated_backward(p, dtype_of(dtype), num_threads);
}

} // namespace

void bind_fused(py::module_& m) {
  m.def("norm_forward", &norm_forward);
  m.def("norm_backward", &norm_backward);
  m.def("rotary", &rotary);
  m.def("gated_forward", &gated_forward);
  m.def("gated_backward", &gated_backward);
}
