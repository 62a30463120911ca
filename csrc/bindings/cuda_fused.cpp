// bindings/cuda_fused.cpp: the fused kernels in tpkernels._cuda, export only.
#include "cuda_fused.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bindings/addresses.h"
#include "cuda/fused.h"

namespace py = pybind11;

namespace {

using tpk::bindings::pointer, tpk::bindings::Rows, tpk::bindings::rows_at;
using Allocate = std::function<int64_t(int64_t)>;

tpk::DType dtype_of(int code) { return tpk::bindings::dtype_of("cuda fused kernels", code); }

void norm_forward(int dtype, bool rms, int64_t rows, int64_t dim, double eps, const Rows& x, const Rows& delta, const Rows& total,
                  const Rows& out, int64_t weight, int64_t bias, int64_t mean, int64_t rstd, int device, int64_t stream) {
  tpk::NormForward p;
  p.rows = rows, p.dim = dim, p.rms = rms, p.eps = float(eps);
  p.x = rows_at(x), p.delta = rows_at(delta), p.total = rows_at(total), p.out = rows_at(out);
  p.weight = pointer<void>(weight), p.bias = pointer<void>(bias), p.mean = pointer<float>(mean), p.rstd = pointer<float>(rstd);
  const py::gil_scoped_release unlocked;
  tpk::cuda::norm_forward(p, dtype_of(dtype), {device, pointer<void>(stream)});
}

void norm_backward(int dtype, bool rms, int64_t rows, int64_t dim, const Rows& dout, const Rows& x, const Rows& dresidual, const Rows& dx,
                   int64_t weight, int64_t mean, int64_t rstd, int64_t dweight, int64_t dbias, int device, int64_t stream,
                   const Allocate& allocate) {
  tpk::NormBackward p;
  p.rows = rows, p.dim = dim, p.rms = rms;
  p.dout = rows_at(dout), p.x = rows_at(x), p.dresidual = rows_at(dresidual), p.dx = rows_at(dx);
  p.weight = pointer<void>(weight), p.mean = pointer<float>(mean), p.rstd = pointer<float>(rstd);
  p.dweight = pointer<float>(dweight), p.dbias = pointer<float>(dbias);
  const int64_t bytes = tpk::cuda::norm_backward_workspace_bytes(p);
  void* workspace = bytes == 0 ? nullptr : pointer<void>(allocate(bytes));
  const py::gil_scoped_release unlocked;
  tpk::cuda::norm_backward(p, dtype_of(dtype), workspace, {device, pointer<void>(stream)});
}

} // namespace

void bind_cuda_fused(py::module_& m) {
  using py::arg;
  m.def("norm_forward", &norm_forward, py::kw_only(), arg("dtype"), arg("rms"), arg("rows"), arg("dim"), arg("eps"), arg("x"), arg("delta"),
        arg("total"), arg("out"), arg("weight"), arg("bias"), arg("mean"), arg("rstd"), arg("device"), arg("stream"));
  m.def("norm_backward", &norm_backward, py::kw_only(), arg("dtype"), arg("rms"), arg("rows"), arg("dim"), arg("dout"), arg("x"),
        arg("dresidual"), arg("dx"), arg("weight"), arg("mean"), arg("rstd"), arg("dweight"), arg("dbias"), arg("device"), arg("stream"),
        arg("allocate"));
}
