// bindings/block.cpp: cpu/block.h in tpkernels._core, export only. Addresses and sizes; tpkernels/block.py says what they are.
#include "bindings/block.h"

#include <pybind11/stl.h>

#include <array>
#include <limits>
#include <stdexcept>
#include <string>

#include "attention_arguments.h"
#include "cpu/block.h"

namespace py = pybind11;

namespace {

using namespace tpk::bindings;
using tpk::cpu::BlockCall, tpk::cpu::BlockShape, tpk::cpu::OfBlock, tpk::cpu::OfModule, tpk::cpu::Bfloat16;

using Saved = std::array<int64_t, tpk::cpu::block_saved_parts>;
using Addresses = std::array<int64_t, 18>; // weight and bias of each module of OfBlock, in its order

template <class Value> OfBlock<Value> of_block(const Addresses& a) {
  const auto module = [&](int index) { return OfModule<Value>{pointer<Value>(a[2 * index]), pointer<Value>(a[2 * index + 1])}; };
  return {module(0), module(1), module(2), module(3), module(4), module(5), module(6), module(7), module(8)};
}

// What stays the same for all calls of a block.
class Block {
 public:
  Block(int64_t gemm, int dtype, int64_t hidden, int64_t query_heads, int64_t kv_heads, int64_t head_dim, int64_t ffn, bool rms, bool gated,
        float eps)
      : gemm_(pointer<void>(gemm)), dtype_(static_cast<tpk::DType>(dtype)),
        shape_{hidden, query_heads, kv_heads, head_dim, ffn, rms, gated, eps, 0, 0} {
    if (gemm == 0 || hidden < 1 || kv_heads < 1 || query_heads % kv_heads != 0 || head_dim < 1 || head_dim > 256 || ffn < 1)
      throw std::invalid_argument("cpu block: sizes " + std::to_string(hidden) + ", " + std::to_string(query_heads) + ", " +
                                  std::to_string(kv_heads) + ", " + std::to_string(head_dim) + ", " + std::to_string(ffn) +
                                  " make no block, or there is no GEMM");
    if (dtype_ != tpk::DType::float32 && dtype_ != tpk::DType::bfloat16)
      throw std::invalid_argument("cpu block: no blocks of dtype code " + std::to_string(dtype));
  }

  Saved saved_sizes(int64_t batch, int64_t tokens) const { return tpk::cpu::block_saved_sizes(shape(batch, tokens)); }

  void forward(int64_t batch, int64_t tokens, const Addresses& parameters, int64_t x, const std::array<int64_t, 3>& normed,
               const std::array<int64_t, 2>& turns, const Tensor& cache_k, const Tensor& cache_v, const MaskSizes& mask, float scale,
               const Saved& saved, int64_t num_threads, bool append, bool apart, int64_t out) const {
    with_element([&]<class Element>(Element) {
      const auto c = call<Element>(batch, tokens, parameters, x, normed, turns, cache_k, cache_v, mask, scale, saved, num_threads);
      const py::gil_scoped_release unlocked;
      tpk::cpu::block_forward(c, append, apart, pointer<Element>(out));
    });
  }

  void backward(int64_t batch, int64_t tokens, const Addresses& parameters, int64_t x, const std::array<int64_t, 3>& normed,
                const std::array<int64_t, 2>& turns, const Tensor& cache_k, const Tensor& cache_v, const MaskSizes& mask, float scale,
                const Saved& saved, int64_t num_threads, const Addresses& gradients, const Tensor& sums_k, const Tensor& sums_v,
                int64_t dout, int64_t dx) const {
    with_element([&]<class Element>(Element) {
      const auto c = call<Element>(batch, tokens, parameters, x, normed, turns, cache_k, cache_v, mask, scale, saved, num_threads);
      const py::gil_scoped_release unlocked;
      tpk::cpu::block_backward(c, of_block<float>(gradients), view(sums_k), view(sums_v), pointer<const Element>(dout),
                               pointer<Element>(dx));
    });
  }

 private:
  template <class Run> void with_element(Run&& run) const {
    if (dtype_ == tpk::DType::bfloat16)
      run(Bfloat16{});
    else
      run(float{});
  }

  BlockShape shape(int64_t batch, int64_t tokens) const {
    BlockShape s = shape_;
    s.batch = batch, s.tokens = tokens;
    const int64_t most = std::numeric_limits<int32_t>::max();
    if (batch < 1 || tokens < 1 || s.rows() > most || s.hidden > most || s.ffn > most || s.query() > most)
      throw std::invalid_argument("cpu block: " + std::to_string(batch) + " x " + std::to_string(tokens) + " tokens are outside 1..2^31");
    return s;
  }

  template <class Element>
  BlockCall<Element> call(int64_t batch, int64_t tokens, const Addresses& parameters, int64_t x, const std::array<int64_t, 3>& normed,
                          const std::array<int64_t, 2>& turns, const Tensor& cache_k, const Tensor& cache_v, const MaskSizes& mask,
                          float scale, const Saved& saved, int64_t num_threads) const {
    const auto part = [&](int index) { return pointer<Element>(saved[index]); };
    return {reinterpret_cast<tpk::cpu::Gemm>(gemm_),
            shape(batch, tokens),
            of_block<const Element>(parameters),
            pointer<const Element>(x),
            {pointer<Element>(normed[0]), pointer<float>(normed[1]), pointer<float>(normed[2])},
            pointer<const float>(turns[0]),
            turns[1],
            view(cache_k),
            view(cache_v),
            mask_of(mask, mask[0] + tokens),
            scale,
            {part(0), part(1), part(2), part(3), part(4), part(5), part(6), pointer<float>(saved[7])},
            num_threads};
  }

  void* gemm_;
  tpk::DType dtype_;
  BlockShape shape_;
};

} // namespace

void bind_block(py::module_& m) {
  py::class_<Block>(m, "Block")
      .def(py::init<int64_t, int, int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool, float>())
      .def("saved_sizes", &Block::saved_sizes)
      .def("forward", &Block::forward)
      .def("backward", &Block::backward);
}
