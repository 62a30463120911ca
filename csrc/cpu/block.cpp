// cpu/block.cpp: the order of a block's ops. No arithmetic of its own: norms, rotary and gates are fused.h's, attention attention.h's.
#include "block.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "attention.h"
#include "tpk/tiling.h"

namespace tpk::cpu {

namespace {

// This thread's memory for what no call leaves behind; it stays allocated.
std::byte* scratch_memory(int64_t bytes) {
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  static thread_local std::unique_ptr<std::byte, Free> memory;
  static thread_local int64_t held = 0;
  if (held < bytes) {
    held = 0;
    memory.reset(static_cast<std::byte*>(std::aligned_alloc(4096, round_up(bytes, 4096))));
    if (memory == nullptr) throw std::bad_alloc();
    held = bytes;
  }
  return memory.get();
}

// Parts of one block of memory, each on a cache line of its own; without memory it only counts.
class Parts {
 public:
  explicit Parts(std::byte* memory) : memory_(memory) {}
  template <class Value> Value* take(int64_t count) {
    std::byte* part = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += round_up(count * int64_t(sizeof(Value)), 64);
    return reinterpret_cast<Value*>(part);
  }
  int64_t used() const { return used_; }

 private:
  std::byte* memory_;
  int64_t used_ = 0;
};

template <class Scratch> Scratch scratch_of(const BlockShape& shape) {
  Parts counted(nullptr);
  Scratch(shape, &counted);
  Parts parts(scratch_memory(counted.used()));
  return Scratch(shape, &parts);
}

// The norms' outputs and statistics, and lse, by name.
template <class Element> struct Saved {
  Normed<Element> normed, middle_normed;
  float* lse;

  explicit Saved(const BlockCall<Element>& call) {
    const BlockShape& s = call.shape;
    float* next = call.saved.statistics;
    const auto rows = [&](int64_t count) { return std::exchange(next, next + count); };
    lse = rows(s.rows() * s.query_heads);
    normed = {call.saved.normed, nullptr, rows(s.rows())};
    middle_normed = {call.saved.middle_normed, nullptr, rows(s.rows())};
    if (!s.rms) normed.mean = rows(s.rows()), middle_normed.mean = rows(s.rows());
    if (call.normed.out != nullptr) normed = call.normed;
  }
};

// Rows whose products are summed in fp32 at once before they are rounded to Element: few enough for the sums to stay in L2.
constexpr int64_t wide_rows = 256;

// Where they gather: [wide_rows, any linear's width], and a row for a bias; fp32 needs no such place.
template <class Element> float* take_wide(const BlockShape& s, Parts* parts) {
  if constexpr (std::is_same_v<Element, float>) return nullptr;
  return parts->take<float>((std::min(wide_rows, s.rows()) + 1) * std::max({s.hidden, s.query(), s.keys(), s.ffn}));
}

template <class Element> struct ForwardScratch {
  float* wide;
  Element *k, *v, *active;

  ForwardScratch(const BlockShape& s, Parts* parts)
      : wide(take_wide<Element>(s, parts)), k(parts->take<Element>(s.rows() * s.keys())), v(parts->take<Element>(s.rows() * s.keys())),
        active(parts->take<Element>(s.rows() * s.ffn)) {}
};

// The MLP's part and attention's use the same memory, one after the other.
template <class Element> struct BackwardScratch {
  float* wide;
  Element *dnormed, *dmiddle, *ones;
  Element *active, *dgate, *dup;
  Element *dattended, *dq, *dk, *dv;

  BackwardScratch(const BlockShape& s, Parts* parts)
      : wide(take_wide<Element>(s, parts)), dnormed(parts->take<Element>(s.rows() * s.hidden)),
        dmiddle(parts->take<Element>(s.rows() * s.hidden)), ones(parts->take<Element>(s.rows())) {
    Parts mlp = *parts;
    active = mlp.take<Element>(s.rows() * s.ffn);
    dgate = s.gated ? mlp.take<Element>(s.rows() * s.ffn) : nullptr;
    dup = mlp.take<Element>(s.rows() * s.ffn);
    Parts attention = *parts;
    dattended = attention.take<Element>(s.rows() * s.query());
    dq = attention.take<Element>(s.rows() * s.query());
    dk = attention.take<Element>(s.rows() * s.keys());
    dv = attention.take<Element>(s.rows() * s.keys());
    *parts = mlp.used() > attention.used() ? mlp : attention;
  }
};

template <class Element> constexpr Element one{};
template <> constexpr float one<float> = 1.0f;
template <> constexpr Bfloat16 one<Bfloat16>{0x3f80};

// A linear's backward: dy [rows, out] times weight [out, in].
template <class Element> struct Upstream {
  const Element* dy;
  const OfModule<const Element>& parameters;
  int64_t out;
};

// Linears over the call's rows: x [rows, in], y [rows, out], weight [out, in], all row-major, which BLAS reads as their transposes.
template <class Element> struct Linears {
  const BlockCall<Element>& call;
  float* wide;

  // y = x weight^T + bias, plus the residual's rows unless it is null
  void forward(const Element* residual, const Element* x, const OfModule<const Element>& parameters, int64_t in, int64_t out,
               Element* y) const {
    const RowsView bias{const_cast<Element*>(parameters.bias), 0}; // the same row again and again
    summed(out, y, [&](int64_t first, int64_t rows, float* sums) {
      const RowsView to{sums, out};
      const RowsView start = residual == nullptr ? bias : RowsView{const_cast<Element*>(residual) + first * out, out};
      if (start.data != nullptr) widen({rows, out, to, start}, dtype_of<Element>, call.num_threads);
      run("T", "N", out, rows, in, parameters.weight, in, x + first * in, in, start.data != nullptr, sums, out);
      if (residual == nullptr || bias.data == nullptr) return;
      RowsView wide_bias = bias;
      if constexpr (!std::is_same_v<Element, float>) {
        wide_bias.data = sums + rows * out;
        widen({1, out, wide_bias, bias}, dtype_of<Element>, 1);
      }
      add({rows, out, to, wide_bias, to}, DType::float32, call.num_threads);
    });
  }

  // dx = the sum of dy weight over all linears of one input
  void input(std::initializer_list<Upstream<Element>> linears, int64_t in, Element* dx) const {
    summed(in, dx, [&](int64_t first, int64_t rows, float* sums) {
      bool add = false;
      for (const auto& [dy, parameters, out] : linears) {
        run("N", "N", in, rows, out, parameters.weight, in, dy + first * out, out, add, sums, in);
        add = true;
      }
    });
  }

  // Adds the gradients of weight and bias, where they are wanted. ones: [rows]
  void parameters(const Element* dy, const Element* x, const OfModule<float>& wanted, int64_t in, int64_t out, const Element* ones) const {
    const int64_t rows = call.shape.rows();
    if (wanted.weight != nullptr) run("N", "T", in, out, rows, x, in, dy, out, true, wanted.weight, in);
    if (wanted.bias != nullptr) run("N", "N", out, 1, rows, dy, out, ones, rows, true, wanted.bias, out);
  }

 private:
  // y = what sum(first, rows, sums) leaves in fp32: in y itself, or in `wide`, some rows at a time, and then rounded.
  template <class Sum> void summed(int64_t columns, Element* y, Sum&& sum) const {
    const int64_t rows = call.shape.rows();
    if constexpr (std::is_same_v<Element, float>) {
      sum(0, rows, y);
    } else {
      for (int64_t first = 0; first < rows; first += wide_rows) {
        const int64_t count = std::min(wide_rows, rows - first);
        sum(first, count, wide);
        narrow({count, columns, {wide, columns}, {y + first * columns, columns}}, dtype_of<Element>, call.num_threads);
      }
    }
  }

  void run(const char* transpose_a, const char* transpose_b, int64_t m, int64_t n, int64_t k, const Element* a, int64_t lda,
           const Element* b, int64_t ldb, bool add, float* c, int64_t ldc) const {
    const float factor = 1.0f, beta = add ? 1.0f : 0.0f;
    call.gemm(transpose_a, transpose_b, &m, &n, &k, &factor, a, &lda, b, &ldb, &beta, c, &ldc);
  }
};

// The slice's rows of one head: those of [batch * tokens, kv_heads * head_dim], and the slice's in a [batch, capacity, heads, dim] of
// Other with strides. move(rows, there), both as RowsView of `tokens` rows.
template <class Other, class Element, class Move>
void each_head(const BlockShape& s, const TensorView& there, int64_t start, Element* rows, Move&& move) {
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t h = 0; h < s.kv_heads; ++h)
      move(RowsView{rows + b * s.tokens * s.keys() + h * s.head_dim, s.keys()},
           RowsView{static_cast<Other*>(there.data) + b * there.batch_stride + start * there.token_stride + h * there.head_stride,
                    there.token_stride});
}

template <class Element> TensorView heads_of(const BlockShape& s, Element* rows, int64_t heads) {
  return {rows, s.tokens * heads * s.head_dim, heads * s.head_dim, s.head_dim};
}

template <class Element> AttentionShape attention_shape(const BlockCall<Element>& call) {
  const BlockShape& s = call.shape;
  return {dtype_of<Element>, s.batch, s.tokens, call.mask.keys, s.query_heads, s.kv_heads, s.head_dim, s.head_dim};
}

template <class Element>
void norm(const BlockCall<Element>& call, const Element* x, const OfModule<const Element>& parameters, const Normed<Element>& to) {
  const BlockShape& s = call.shape;
  const RowsView rows{const_cast<Element*>(x), s.hidden};
  norm_forward({s.rows(), s.hidden, s.rms, s.eps, rows, {}, rows, {to.out, s.hidden}, parameters.weight, parameters.bias, to.mean, to.rstd},
               dtype_of<Element>, call.num_threads);
}

template <class Element>
void norm_gradient(const BlockCall<Element>& call, const Element* dout, const Element* x, const Element* dresidual,
                   const Normed<Element>& from, const OfModule<const Element>& parameters, const OfModule<float>& gradients, Element* dx) {
  const BlockShape& s = call.shape;
  const auto rows = [&](const Element* data) { return RowsView{const_cast<Element*>(data), s.hidden}; };
  norm_backward({s.rows(), s.hidden, s.rms, rows(dout), rows(x), rows(dresidual), rows(dx), parameters.weight, from.mean, from.rstd,
                 gradients.weight, gradients.bias},
                dtype_of<Element>, call.num_threads);
}

template <class Element> void turn(const BlockCall<Element>& call, Element* rows, int64_t heads, bool inverse) {
  if (call.turns == nullptr) return;
  const RowsView view{rows, heads * call.shape.head_dim};
  rotary({call.shape.rows(), heads, call.shape.head_dim, call.turn_rows, inverse, view, view, call.turns}, dtype_of<Element>,
         call.num_threads);
}

Activation activation_of(const BlockShape& s) { return s.gated ? Activation::silu : Activation::gelu_tanh; }

} // namespace

std::array<int64_t, block_saved_parts> block_saved_sizes(const BlockShape& s) {
  const int64_t hidden = s.rows() * s.hidden, query = s.rows() * s.query(), ffn = s.rows() * s.ffn;
  return {hidden, hidden, hidden, query, query, s.gated ? ffn : 0, ffn, s.rows() * (s.query_heads + 4)};
}

template <class Element> void block_forward(const BlockCall<Element>& call, bool append, bool apart, Element* out) {
  const BlockShape& s = call.shape;
  const auto& p = call.parameters;
  const BlockSaved<Element>& kept = call.saved;
  const Saved<Element> saved(call);
  const auto scratch = scratch_of<ForwardScratch<Element>>(s);
  const Linears<Element> linears{call, scratch.wide};

  if (call.normed.out == nullptr) norm(call, call.x, p.attention_norm, saved.normed);
  linears.forward(nullptr, saved.normed.out, p.query, s.hidden, s.query(), kept.q);
  turn(call, kept.q, s.query_heads, false);
  if (append) {
    const auto copy = [&](const RowsView& from, const RowsView& to) {
      for (int64_t t = 0; t < s.tokens; ++t) std::memcpy(to.row<Element>(t), from.row<Element>(t), s.head_dim * sizeof(Element));
    };
    linears.forward(nullptr, saved.normed.out, p.key, s.hidden, s.keys(), scratch.k);
    linears.forward(nullptr, saved.normed.out, p.value, s.hidden, s.keys(), scratch.v);
    turn(call, scratch.k, s.kv_heads, false);
    each_head<Element>(s, call.cache_k, call.mask.start, scratch.k, copy);
    each_head<Element>(s, call.cache_v, call.mask.start, scratch.v, copy);
  }
  ForwardParams attention;
  attention.shape = attention_shape(call);
  attention.q = heads_of(s, kept.q, s.query_heads), attention.k = call.cache_k, attention.v = call.cache_v;
  attention.out = heads_of(s, kept.attended, s.query_heads), attention.lse = saved.lse;
  attention.mask = call.mask, attention.scale = call.scale;
  attention_forward(attention, call.num_threads);
  linears.forward(call.x, kept.attended, p.output, s.query(), s.hidden, kept.middle);

  norm(call, kept.middle, p.mlp_norm, saved.middle_normed);
  if (s.gated) linears.forward(nullptr, saved.middle_normed.out, p.gate, s.hidden, s.ffn, kept.gate);
  linears.forward(nullptr, saved.middle_normed.out, p.up, s.hidden, s.ffn, kept.up);
  const RowsView up{kept.up, s.ffn}, gate{kept.gate, s.ffn}, active{scratch.active, s.ffn};
  gated_forward({s.rows(), s.ffn, activation_of(s), s.gated ? gate : up, s.gated ? up : RowsView{}, active}, dtype_of<Element>,
                call.num_threads);
  if (apart)
    linears.forward(nullptr, scratch.active, p.down, s.ffn, s.hidden, out);
  else
    linears.forward(kept.middle, scratch.active, p.down, s.ffn, s.hidden, out);
}

template <class Element>
void block_backward(const BlockCall<Element>& call, const OfBlock<float>& gradients, const TensorView& sums_k, const TensorView& sums_v,
                    const Element* dout, Element* dx) {
  const BlockShape& s = call.shape;
  const auto& p = call.parameters;
  const BlockSaved<Element>& kept = call.saved;
  const Saved<Element> saved(call);
  const auto scratch = scratch_of<BackwardScratch<Element>>(s);
  const Linears<Element> linears{call, scratch.wide};
  std::fill_n(scratch.ones, s.rows(), one<Element>);

  linears.input({{dout, p.down, s.hidden}}, s.ffn, scratch.active); // the gradient of active, then active
  const RowsView up{kept.up, s.ffn}, gate{kept.gate, s.ffn}, active{scratch.active, s.ffn}, dup{scratch.dup, s.ffn};
  gated_backward({s.rows(), s.ffn, activation_of(s), active, s.gated ? gate : up, s.gated ? up : RowsView{}, active,
                  s.gated ? RowsView{scratch.dgate, s.ffn} : dup, s.gated ? dup : RowsView{}},
                 dtype_of<Element>, call.num_threads);
  linears.parameters(dout, scratch.active, gradients.down, s.ffn, s.hidden, scratch.ones);
  const Upstream<Element> of_gate{scratch.dgate, p.gate, s.ffn}, of_up{scratch.dup, p.up, s.ffn};
  if (s.gated) {
    linears.input({of_gate, of_up}, s.hidden, scratch.dnormed);
    linears.parameters(scratch.dgate, saved.middle_normed.out, gradients.gate, s.hidden, s.ffn, scratch.ones);
  } else {
    linears.input({of_up}, s.hidden, scratch.dnormed);
  }
  linears.parameters(scratch.dup, saved.middle_normed.out, gradients.up, s.hidden, s.ffn, scratch.ones);
  norm_gradient(call, scratch.dnormed, kept.middle, dout, saved.middle_normed, p.mlp_norm, gradients.mlp_norm, scratch.dmiddle);

  linears.input({{scratch.dmiddle, p.output, s.hidden}}, s.query(), scratch.dattended);
  linears.parameters(scratch.dmiddle, kept.attended, gradients.output, s.query(), s.hidden, scratch.ones);
  BackwardParams attention;
  attention.shape = attention_shape(call);
  attention.dout = heads_of(s, scratch.dattended, s.query_heads), attention.q = heads_of(s, kept.q, s.query_heads);
  attention.k = call.cache_k, attention.v = call.cache_v, attention.out = heads_of(s, kept.attended, s.query_heads);
  attention.lse = saved.lse, attention.mask = call.mask, attention.scale = call.scale;
  attention.dq = heads_of(s, scratch.dq, s.query_heads), attention.dk = sums_k, attention.dv = sums_v;
  attention_backward(attention, call.num_threads);
  const auto fetch = [&](const RowsView& to, const RowsView& from) {
    narrow({s.tokens, s.head_dim, from, to}, dtype_of<Element>, call.num_threads);
  };
  each_head<float>(s, sums_k, call.mask.start, scratch.dk, fetch);
  each_head<float>(s, sums_v, call.mask.start, scratch.dv, fetch);
  turn(call, scratch.dq, s.query_heads, true);
  turn(call, scratch.dk, s.kv_heads, true);

  linears.input({{scratch.dq, p.query, s.query()}, {scratch.dk, p.key, s.keys()}, {scratch.dv, p.value, s.keys()}}, s.hidden,
                scratch.dnormed);
  linears.parameters(scratch.dq, saved.normed.out, gradients.query, s.hidden, s.query(), scratch.ones);
  linears.parameters(scratch.dk, saved.normed.out, gradients.key, s.hidden, s.keys(), scratch.ones);
  linears.parameters(scratch.dv, saved.normed.out, gradients.value, s.hidden, s.keys(), scratch.ones);
  norm_gradient(call, scratch.dnormed, call.x, scratch.dmiddle, saved.normed, p.attention_norm, gradients.attention_norm, dx);
}

template void block_forward(const BlockCall<float>&, bool, bool, float*);
template void block_forward(const BlockCall<Bfloat16>&, bool, bool, Bfloat16*);
template void block_backward(const BlockCall<float>&, const OfBlock<float>&, const TensorView&, const TensorView&, const float*, float*);
template void block_backward(const BlockCall<Bfloat16>&, const OfBlock<float>&, const TensorView&, const TensorView&, const Bfloat16*,
                             Bfloat16*);

} // namespace tpk::cpu
