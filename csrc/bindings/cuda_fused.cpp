// bindings/cuda_fused.cpp: the fused kernels in tpkernels._cuda, export only.
#include "cuda_fused.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bindings/attention_arguments.h"
#include "cuda/fused.h"

namespace py = pybind11;

namespace {

using tpk::bindings::pointer, tpk::bindings::Rows, tpk::bindings::rows_at, tpk::bindings::Tensor, tpk::bindings::view;
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

void cache_append(int dtype, const tpk::bindings::Sizes& sizes, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& q_out,
                  const Tensor& cache_k, const Tensor& cache_v, int64_t turns, int64_t turns_batch_stride, int device, int64_t stream) {
  const tpk::AttentionShape shape = tpk::bindings::shape_of("cuda fused kernels", dtype, sizes);
  tpk::CacheAppend p;
  p.dtype = shape.dtype, p.batch = shape.batch, p.tokens = shape.tokens, p.query_heads = shape.query_heads, p.kv_heads = shape.kv_heads;
  p.head_dim = shape.head_dim, p.value_head_dim = shape.value_head_dim;
  p.q = view(q), p.k = view(k), p.v = view(v), p.q_out = view(q_out), p.cache_k = view(cache_k), p.cache_v = view(cache_v);
  p.turns = pointer<const float>(turns), p.turns_batch_stride = turns_batch_stride;
  const py::gil_scoped_release unlocked;
  tpk::cuda::cache_append(p, {device, pointer<void>(stream)});
}

} // namespace

void bind_cuda_fused(py::module_& m) {
  using py::arg;
  m.def("norm_forward", &norm_forward, py::kw_only(), arg("dtype"), arg("rms"), arg("rows"), arg("dim"), arg("eps"), arg("x"), arg("delta"),
        arg("total"), arg("out"), arg("weight"), arg("bias"), arg("mean"), arg("rstd"), arg("device"), arg("stream"));
  m.def("norm_backward", &norm_backward, py::kw_only(), arg("dtype"), arg("rms"), arg("rows"), arg("dim"), arg("dout"), arg("x"),
        arg("dresidual"), arg("dx"), arg("weight"), arg("mean"), arg("rstd"), arg("dweight"), arg("dbias"), arg("device"), arg("stream"),
        arg("allocate"));
  m.def("cache_append", &cache_append, py::kw_only(), arg("dtype"), arg("sizes"), arg("q"), arg("k"), arg("v"), arg("q_out"),
        arg("cache_k"), arg("cache_v"), arg("turns"), arg("turns_batch_stride"), arg("device"), arg("stream"));
}
