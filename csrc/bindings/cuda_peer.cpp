// bindings/cuda_peer.cpp: the kernels of a peer link in tpkernels._cuda, export only. A slot is the addresses of data, claim, flags,
// credit, uses, arrived, control and words, its budget in nanoseconds and its index; all 0: none. Tensors are addresses of contiguous rows,
// 0 none.
#include "cuda_peer.h"

#include <pybind11/stl.h>

#include "bindings/attention_arguments.h"
#include "cuda/peer.h"

namespace py = pybind11;

namespace {

using tpk::bindings::pointer;
using Slot = std::array<int64_t, 10>;

tpk::PeerSlot slot_of(const Slot& s) {
  return {pointer<void>(s[0]),
          pointer<uint32_t>(s[1]),
          pointer<uint32_t>(s[2]),
          pointer<uint32_t>(s[3]),
          pointer<uint32_t>(s[4]),
          pointer<uint32_t>(s[5]),
          pointer<uint32_t>(s[6]),
          pointer<uint32_t>(s[7]),
          s[8],
          int32_t(s[9])};
}

tpk::DType dtype_of(int code) {
  if (code < 0 || code > 2) throw std::invalid_argument("cuda kernels of a peer link: unknown dtype code " + std::to_string(code));
  return static_cast<tpk::DType>(code);
}

void take_credit(const Slot& slot, int device, int64_t stream) {
  const py::gil_scoped_release unlocked;
  tpk::cuda::peer_take_credit(slot_of(slot), {device, pointer<void>(stream)});
}

void begin_use(const Slot& slot, int tiles, int device, int64_t stream) {
  const py::gil_scoped_release unlocked;
  tpk::cuda::peer_begin_use(slot_of(slot), tiles, {device, pointer<void>(stream)});
}

void end_use(const Slot& slot, bool release, int device, int64_t stream) {
  const py::gil_scoped_release unlocked;
  tpk::cuda::peer_end_use(slot_of(slot), release, {device, pointer<void>(stream)});
}

void add_put(const Slot& slot, int dtype, int64_t rows, int64_t columns, int64_t x, int64_t residual, int64_t out, int device,
             int64_t stream) {
  const tpk::PeerAddPut p{rows, columns, pointer<void>(x), pointer<void>(residual), pointer<void>(out)};
  const py::gil_scoped_release unlocked;
  tpk::cuda::peer_add_put(slot_of(slot), p, dtype_of(dtype), {device, pointer<void>(stream)});
}

void wait_norm(const Slot& slot, int dtype, bool rms, int64_t rows, int64_t columns, double eps, int64_t x, int64_t out, int64_t weight,
               int64_t bias, int64_t mean, int64_t rstd, int device, int64_t stream) {
  tpk::NormForward p;
  p.rows = rows, p.dim = columns, p.rms = rms, p.eps = float(eps);
  p.x = {pointer<void>(x), columns}, p.out = {pointer<void>(out), columns};
  p.weight = pointer<void>(weight), p.bias = pointer<void>(bias), p.mean = pointer<float>(mean), p.rstd = pointer<float>(rstd);
  const py::gil_scoped_release unlocked;
  tpk::cuda::peer_wait_norm(slot_of(slot), p, dtype_of(dtype), {device, pointer<void>(stream)});
}

template <void (*launch)(const tpk::PeerSlot&, const tpk::PeerMatmul&, tpk::DType, const tpk::cuda::Place&)>
void matmul(const Slot& slot, int dtype, int64_t rows, int64_t n, int64_t k, bool transposed, int64_t a, int64_t b, int64_t residual,
            int64_t out, int device, int64_t stream) {
  const tpk::PeerMatmul p{rows, n, k, transposed, pointer<void>(a), pointer<void>(b), pointer<void>(residual), pointer<void>(out)};
  const py::gil_scoped_release unlocked;
  launch(slot_of(slot), p, dtype_of(dtype), {device, pointer<void>(stream)});
}

} // namespace

void bind_cuda_peer(py::module_& m) {
  using py::arg, tpk::PeerControl, tpk::PeerWords, tpk::PeerWho;
  m.attr("peer_words") =
      py::dict(arg("STOPPED") = PeerControl::stopped, arg("REPORTER") = PeerControl::reporter, arg("DIRECTION") = PeerControl::direction,
               arg("GENERATION") = PeerControl::generation, arg("ABORT") = PeerWords::abort, arg("REPORT") = PeerWords::report,
               arg("SENDER") = int(PeerWho::sender), arg("RECEIVER") = int(PeerWho::receiver), arg("HOLDER") = int(PeerWho::holder));
  m.attr("peer_tile_rows") = tpk::peer_tile_rows;
  m.def("peer_take_credit", &take_credit, py::kw_only(), arg("slot"), arg("device"), arg("stream"));
  m.def("peer_begin_use", &begin_use, py::kw_only(), arg("slot"), arg("tiles"), arg("device"), arg("stream"));
  m.def("peer_end_use", &end_use, py::kw_only(), arg("slot"), arg("release"), arg("device"), arg("stream"));
  m.def("peer_add_put", &add_put, py::kw_only(), arg("slot"), arg("dtype"), arg("rows"), arg("columns"), arg("x"), arg("residual"),
        arg("out"), arg("device"), arg("stream"));
  m.def("peer_wait_norm", &wait_norm, py::kw_only(), arg("slot"), arg("dtype"), arg("rms"), arg("rows"), arg("columns"), arg("eps"),
        arg("x"), arg("out"), arg("weight"), arg("bias"), arg("mean"), arg("rstd"), arg("device"), arg("stream"));
  m.def("peer_matmul_add_put", &matmul<tpk::cuda::peer_matmul_add_put>, py::kw_only(), arg("slot"), arg("dtype"), arg("rows"), arg("n"),
        arg("k"), arg("transposed"), arg("a"), arg("b"), arg("residual"), arg("out"), arg("device"), arg("stream"));
  m.def("peer_wait_matmul", &matmul<tpk::cuda::peer_wait_matmul>, py::kw_only(), arg("slot"), arg("dtype"), arg("rows"), arg("n"), arg("k"),
        arg("transposed"), arg("a"), arg("b"), arg("residual"), arg("out"), arg("device"), arg("stream"));
}
