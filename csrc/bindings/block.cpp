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
using tpk::cpu::BlockCall, tpk::cpu::BlockShape, tpk::cpu::OfBlock, tpk::cpu::OfModule;

using Saved = std::array<int64_t, tpk::cpu::block_saved_parts>;
using Addresses = std::array<int64_t, 18>; // weight and bias of each module of OfBlock, in its order

template <class Value> OfBlock<Value> of_block(const Addresses& a) {
  const auto module = [&](int index) { return OfModule<Value>{pointer<Value>(a[2 * index]), pointer<Value>(a[2 * index + 1])}; };
  return {module(0), module(1), module(2), module(3), module(4), module(5), module(6), module(7), module(8)};
}

// What stays the same for all calls of a block.
class Block {
 public:
  Block(int64_t sgemm, int64_t hidden, int64_t query_heads, int64_t kv_heads, int64_t head_dim, int64_t ffn, bool rms, bool gated,
        float eps)
      : sgemm_(pointer<void>(sgemm)), shape_{hidden, query_heads, kv_heads, head_dim, ffn, rms, gated, eps, 0, 0} {
    if (sgemm == 0 || hidden < 1 || kv_heads < 1 || query_heads % kv_heads != 0 || head_dim < 1 || head_dim > 256 || ffn < 1)
      throw std::invalid_argument("cpu block: sizes " + std::to_string(hidden) + ", " + std::to_string(query_heads) + ", " +
                                  std::to_string(kv_heads) + ", " + std::to_string(head_dim) + ", " + std::to_string(ffn) +
                                  " make no block, or there is no sgemm");
  }

  Saved saved_floats(int64_t batch, int64_t tokens) const { return tpk::cpu::block_saved_floats(shape(batch, tokens)); }

  void forward(int64_t batch, int64_t tokens, const Addresses& parameters, int64_t x, const std::array<int64_t, 3>& normed,
               const std::array<int64_t, 2>& turns, const Tensor& cache_k, const Tensor& cache_v, const MaskSizes& mask, float scale,
               const Saved& saved, int64_t num_threads, bool append, bool apart, int64_t out) const {
    const BlockCall c = call(batch, tokens, parameters, x, normed, turns, cache_k, cache_v, mask, scale, saved, num_threads);
    const py::gil_scoped_release unlocked;
    tpk::cpu::block_forward(c, append, apart, pointer<float>(out));
  }

  void backward(int64_t batch, int64_t tokens, const Addresses& parameters, int64_t x, const std::array<int64_t, 3>& normed,
                const std::array<int64_t, 2>& turns, const Tensor& cache_k, const Tensor& cache_v, const MaskSizes& mask, float scale,
                const Saved& saved, int64_t num_threads, const Addresses& gradients, const Tensor& sums_k, const Tensor& sums_v,
                int64_t dout, int64_t dx) const {
    const BlockCall c = call(batch, tokens, parameters, x, normed, turns, cache_k, cache_v, mask, scale, saved, num_threads);
    const py::gil_scoped_release unlocked;
    tpk::cpu::block_backward(c, of_block<float>(gradients), view(sums_k), view(sums_v), pointer<const float>(dout), pointer<float>(dx));
  }

 private:
  BlockShape shape(int64_t batch, int64_t tokens) const {
    BlockShape s = shape_;
    s.batch = batch, s.tokens = tokens;
    const int64_t most = std::numeric_limits<int32_t>::max();
    if (batch < 1 || tokens < 1 || s.rows() > most || s.hidden > most || s.ffn > most || s.query() > most)
      throw std::invalid_argument("cpu block: " + std::to_string(batch) + " x " + std::to_string(tokens) + " tokens are outside 1..2^31");
    return s;
  }

  BlockCall call(int64_t batch, int64_t tokens, const Addresses& parameters, int64_t x, const std::array<int64_t, 3>& normed,
                 const std::array<int64_t, 2>& turns, const Tensor& cache_k, const Tensor& cache_v, const MaskSizes& mask, float scale,
                 const Saved& saved, int64_t num_threads) const {
    return {reinterpret_cast<tpk::cpu::Sgemm>(sgemm_),
            shape(batch, tokens),
            of_block<const float>(parameters),
            pointer<const float>(x),
            {pointer<float>(normed[0]), pointer<float>(normed[1]), pointer<float>(normed[2])},
            pointer<const float>(turns[0]),
            turns[1],
            view(cache_k),
            view(cache_v),
            mask_of(mask, mask[0] + tokens),
            scale,
            {pointer<float>(saved[0]), pointer<float>(saved[1]), pointer<float>(saved[2]), pointer<float>(saved[3]),
             pointer<float>(saved[4]), pointer<float>(saved[5]), pointer<float>(saved[6]), pointer<float>(saved[7])},
            num_threads};
  }

  void* sgemm_;
  BlockShape shape_;
};

} // namespace

void bind_block(py::module_& m) {
  py::class_<Block>(m, "Block")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool, float>())
      .def("saved_floats", &Block::saved_floats)
      .def("forward", &Block::forward)
      .def("backward", &Block::backward);
}
