// bindings/fused.cpp: the fused kernels in tpkernels._core, export only. Tensors are rows (addresses.h); a range of rows is an address
// further on and fewer rows. Arguments are positional, since these calls are counted in microseconds.
#include "fused.h"

#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "bindings/addresses.h"
#include "cpu/fused.h"

namespace py = pybind11;

namespace {

using tpk::bindings::pointer, tpk::bindings::Rows, tpk::bindings::rows_at;

tpk::DType dtype_of(int code) { return tpk::bindings::dtype_of("cpu fused kernels", code); }

tpk::cpu::Activation activation_of(int code) {
  if (code < 0 || code > 1) throw std::invalid_argument("cpu fused kernels: unknown activation code " + std::to_string(code));
  return static_cast<tpk::cpu::Activation>(code);
}

void norm_forward(int dtype, bool rms, int64_t rows, int64_t dim, float eps, const Rows& x, const Rows& delta, const Rows& total,
                  const Rows& out, int64_t weight, int64_t bias, int64_t mean, int64_t rstd, int64_t num_threads) {
  const tpk::cpu::NormForward p{rows,
                                dim,
                                rms,
                                eps,
                                rows_at(x),
                                rows_at(delta),
                                rows_at(total),
                                rows_at(out),
                                pointer<void>(weight),
                                pointer<void>(bias),
                                pointer<float>(mean),
                                pointer<float>(rstd)};
  const py::gil_scoped_release unlocked;
  tpk::cpu::norm_forward(p, dtype_of(dtype), num_threads);
}

void norm_backward(int dtype, bool rms, int64_t rows, int64_t dim, const Rows& dout, const Rows& x, const Rows& dresidual, const Rows& dx,
                   int64_t weight, int64_t mean, int64_t rstd, int64_t dweight, int64_t dbias, int64_t num_threads) {
  const tpk::cpu::NormBackward p{rows,
                                 dim,
                                 rms,
                                 rows_at(dout),
                                 rows_at(x),
                                 rows_at(dresidual),
                                 rows_at(dx),
                                 pointer<void>(weight),
                                 pointer<float>(mean),
                                 pointer<float>(rstd),
                                 pointer<float>(dweight),
                                 pointer<float>(dbias)};
  const py::gil_scoped_release unlocked;
  tpk::cpu::norm_backward(p, dtype_of(dtype), num_threads);
}

void rotary(int dtype, bool inverse, int64_t rows, int64_t heads, int64_t head_dim, int64_t turn_rows, const Rows& x, const Rows& out,
            int64_t turns, int64_t num_threads) {
  const tpk::cpu::Rotary p{rows, heads, head_dim, turn_rows, inverse, rows_at(x), rows_at(out), pointer<float>(turns)};
  const py::gil_scoped_release unlocked;
  tpk::cpu::rotary(p, dtype_of(dtype), num_threads);
}

void gated_forward(int dtype, int activation, int64_t rows, int64_t dim, const Rows& gate, const Rows& up, const Rows& out,
                   int64_t num_threads) {
  const tpk::cpu::GatedForward p{rows, dim, activation_of(activation), rows_at(gate), rows_at(up), rows_at(out)};
  const py::gil_scoped_release unlocked;
  tpk::cpu::gated_forward(p, dtype_of(dtype), num_threads);
}

void gated_backward(int dtype, int activation, int64_t rows, int64_t dim, const Rows& dout, const Rows& gate, const Rows& up,
                    const Rows& out, const Rows& dgate, const Rows& dup, int64_t num_threads) {
  const tpk::cpu::GatedBackward p{
      rows, dim, activation_of(activation), rows_at(dout), rows_at(gate), rows_at(up), rows_at(out), rows_at(dgate), rows_at(dup)};
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
