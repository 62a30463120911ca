// cpu/block.cpp: the order of a block's ops. No arithmetic of its own: norms, rotary and gates are fused.h's, attention attention.h's.
#include "block.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "attention.h"
#include "tpk/tiling.h"

namespace tpk::cpu {

namespace {

// This thread's memory for what no call leaves behind; it stays allocated.
float* scratch_memory(int64_t floats) {
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  static thread_local std::unique_ptr<float, Free> memory;
  static thread_local int64_t held = 0;
  if (held < floats) {
    held = 0;
    memory.reset(static_cast<float*>(std::aligned_alloc(4096, round_up(floats * int64_t(sizeof(float)), 4096))));
    if (memory == nullptr) throw std::bad_alloc();
    held = floats;
  }
  return memory.get();
}

// Parts of one block of memory, each on a cache line of its own; without memory it only counts.
class Parts {
 public:
  explicit Parts(float* memory) : memory_(memory) {}
  float* take(int64_t floats) {
    float* part = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += round_up(floats, 16);
    return part;
  }
  int64_t used() const { return used_; }

 private:
  float* memory_;
  int64_t used_ = 0;
};

template <class Scratch> Scratch scratch_of(const BlockShape& shape) {
  Parts counted(nullptr);
  Scratch(shape, &counted);
  Parts parts(scratch_memory(counted.used()));
  return Scratch(shape, &parts);
}

// The norms' outputs and statistics, and lse, by name.
struct Saved {
  Normed normed, middle_normed;
  float* lse;

  explicit Saved(const BlockCall& call) {
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

struct ForwardScratch {
  float *k, *v, *active;

  ForwardScratch(const BlockShape& s, Parts* parts)
      : k(parts->take(s.rows() * s.keys())), v(parts->take(s.rows() * s.keys())), active(parts->take(s.rows() * s.ffn)) {}
};

// The MLP's part and attention's use the same memory, one after the other.
struct BackwardScratch {
  float *dnormed, *dmiddle, *ones;
  float *active, *dgate, *dup;
  float *dattended, *dq, *dk, *dv;

  BackwardScratch(const BlockShape& s, Parts* parts)
      : dnormed(parts->take(s.rows() * s.hidden)), dmiddle(parts->take(s.rows() * s.hidden)), ones(parts->take(s.rows())) {
    Parts mlp = *parts;
    active = mlp.take(s.rows() * s.ffn);
    dgate = s.gated ? mlp.take(s.rows() * s.ffn) : nullptr;
    dup = mlp.take(s.rows() * s.ffn);
    Parts attention = *parts;
    dattended = attention.take(s.rows() * s.query());
    dq = attention.take(s.rows() * s.query());
    dk = attention.take(s.rows() * s.keys());
    dv = attention.take(s.rows() * s.keys());
    *parts = mlp.used() > attention.used() ? mlp : attention;
  }
};

// GEMMs of linears over rows: y [rows, out], x [rows, in], weight [out, in], all row-major, which BLAS reads as their transposes.
struct Blas {
  Sgemm sgemm;

  // y = x weight^T, plus what y holds.
  void forward(const float* x, const float* weight, int64_t rows, int64_t in, int64_t out, bool add, float* y) const {
    run("T", "N", out, rows, in, weight, in, x, in, add, y, out);
  }
  // dx = dy weight, plus what dx holds.
  void input(const float* dy, const float* weight, int64_t rows, int64_t in, int64_t out, bool add, float* dx) const {
    run("N", "N", in, rows, out, weight, in, dy, out, add, dx, in);
  }
  // dweight += dy^T x
  void weight(const float* dy, const float* x, int64_t rows, int64_t in, int64_t out, float* dweight) const {
    run("N", "T", in, out, rows, x, in, dy, out, true, dweight, in);
  }

 private:
  void run(const char* transpose_a, const char* transpose_b, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
           int64_t ldb, bool add, float* c, int64_t ldc) const {
    const float one = 1.0f, beta = add ? 1.0f : 0.0f;
    sgemm(transpose_a, transpose_b, &m, &n, &k, &one, a, &lda, b, &ldb, &beta, c, &ldc);
  }
};

void repeat_row(const float* row, int64_t rows, int64_t columns, float* to) {
  for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * columns, row, columns * sizeof(float));
}

void add_row(const float* row, int64_t rows, int64_t columns, float* to) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[r * columns + c] += row[c];
}

// Rows [batch * tokens, heads * dim] and tokens start, start + 1, ... of a [batch, capacity, heads, dim] with strides.
template <class Move> void each_token(const BlockShape& s, const TensorView& there, int64_t start, float* rows, Move&& move) {
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t h = 0; h < s.kv_heads; ++h)
      for (int64_t t = 0; t < s.tokens; ++t)
        move(rows + ((b * s.tokens + t) * s.kv_heads + h) * s.head_dim,
             static_cast<float*>(there.data) + b * there.batch_stride + (start + t) * there.token_stride + h * there.head_stride);
}

TensorView heads_of(const BlockShape& s, float* rows, int64_t heads) {
  return {rows, s.tokens * heads * s.head_dim, heads * s.head_dim, s.head_dim};
}

AttentionShape attention_shape(const BlockCall& call) {
  const BlockShape& s = call.shape;
  return {DType::float32, s.batch, s.tokens, call.mask.keys, s.query_heads, s.kv_heads, s.head_dim, s.head_dim};
}

void norm(const BlockCall& call, const float* x, const OfModule<const float>& parameters, const Normed& to) {
  const BlockShape& s = call.shape;
  const RowsView rows{const_cast<float*>(x), s.hidden};
  norm_forward({s.rows(), s.hidden, s.rms, s.eps, rows, {}, rows, {to.out, s.hidden}, parameters.weight, parameters.bias, to.mean, to.rstd},
               DType::float32, call.num_threads);
}

void norm_gradient(const BlockCall& call, const float* dout, const float* x, const float* dresidual, const Normed& from,
                   const OfModule<const float>& parameters, const OfModule<float>& gradients, float* dx) {
  const BlockShape& s = call.shape;
  const auto rows = [&](const float* data) { return RowsView{const_cast<float*>(data), s.hidden}; };
  norm_backward({s.rows(), s.hidden, s.rms, rows(dout), rows(x), rows(dresidual), rows(dx), parameters.weight, from.mean, from.rstd,
                 gradients.weight, gradients.bias},
                DType::float32, call.num_threads);
}

void turn(const BlockCall& call, float* rows, int64_t heads, bool inverse) {
  if (call.turns == nullptr) return;
  const RowsView view{rows, heads * call.shape.head_dim};
  rotary({call.shape.rows(), heads, call.shape.head_dim, call.turn_rows, inverse, view, view, call.turns}, DType::float32,
         call.num_threads);
}

Activation activation_of(const BlockShape& s) { return s.gated ? Activation::silu : Activation::gelu_tanh; }

// y = linear(x)
void linear(const BlockCall& call, const float* x, const OfModule<const float>& parameters, int64_t in, int64_t out, float* y) {
  const int64_t rows = call.shape.rows();
  if (parameters.bias != nullptr) repeat_row(parameters.bias, rows, out, y);
  Blas{call.sgemm}.forward(x, parameters.weight, rows, in, out, parameters.bias != nullptr, y);
}

// y = residual + linear(x)
void add_linear(const BlockCall& call, const float* residual, const float* x, const OfModule<const float>& parameters, int64_t in,
                int64_t out, float* y) {
  const int64_t rows = call.shape.rows();
  std::memcpy(y, residual, rows * out * sizeof(float));
  Blas{call.sgemm}.forward(x, parameters.weight, rows, in, out, true, y);
  if (parameters.bias != nullptr) add_row(parameters.bias, rows, out, y);
}

void linear_gradients(const BlockCall& call, const float* dy, const float* x, const OfModule<float>& gradients, int64_t in, int64_t out,
                      const float* ones) {
  const int64_t rows = call.shape.rows();
  if (gradients.weight != nullptr) Blas{call.sgemm}.weight(dy, x, rows, in, out, gradients.weight);
  if (gradients.bias != nullptr) Blas{call.sgemm}.input(ones, dy, 1, out, rows, true, gradients.bias);
}

} // namespace

std::array<int64_t, block_saved_parts> block_saved_floats(const BlockShape& s) {
  const int64_t hidden = s.rows() * s.hidden, query = s.rows() * s.query(), ffn = s.rows() * s.ffn;
  return {hidden, hidden, hidden, query, query, s.gated ? ffn : 0, ffn, s.rows() * (s.query_heads + 4)};
}

void block_forward(const BlockCall& call, bool append, bool apart, float* out) {
  const BlockShape& s = call.shape;
  const auto& p = call.parameters;
  const BlockSaved& kept = call.saved;
  const Saved saved(call);
  const auto scratch = scratch_of<ForwardScratch>(s);

  if (call.normed.out == nullptr) norm(call, call.x, p.attention_norm, saved.normed);
  linear(call, saved.normed.out, p.query, s.hidden, s.query(), kept.q);
  turn(call, kept.q, s.query_heads, false);
  if (append) {
    const auto copy = [&](const float* from, float* to) { std::memcpy(to, from, s.head_dim * sizeof(float)); };
    linear(call, saved.normed.out, p.key, s.hidden, s.keys(), scratch.k);
    linear(call, saved.normed.out, p.value, s.hidden, s.keys(), scratch.v);
    turn(call, scratch.k, s.kv_heads, false);
    each_token(s, call.cache_k, call.mask.start, scratch.k, copy);
    each_token(s, call.cache_v, call.mask.start, scratch.v, copy);
  }
  ForwardParams attention;
  attention.shape = attention_shape(call);
  attention.q = heads_of(s, kept.q, s.query_heads), attention.k = call.cache_k, attention.v = call.cache_v;
  attention.out = heads_of(s, kept.attended, s.query_heads), attention.lse = saved.lse;
  attention.mask = call.mask, attention.scale = call.scale;
  attention_forward(attention, call.num_threads);
  add_linear(call, call.x, kept.attended, p.output, s.query(), s.hidden, kept.middle);

  norm(call, kept.middle, p.mlp_norm, saved.middle_normed);
  if (s.gated) linear(call, saved.middle_normed.out, p.gate, s.hidden, s.ffn, kept.gate);
  linear(call, saved.middle_normed.out, p.up, s.hidden, s.ffn, kept.up);
  const RowsView up{kept.up, s.ffn}, gate{kept.gate, s.ffn}, active{scratch.active, s.ffn};
  gated_forward({s.rows(), s.ffn, activation_of(s), s.gated ? gate : up, s.gated ? up : RowsView{}, active}, DType::float32,
                call.num_threads);
  if (apart)
    linear(call, scratch.active, p.down, s.ffn, s.hidden, out);
  else
    add_linear(call, kept.middle, scratch.active, p.down, s.ffn, s.hidden, out);
}

void block_backward(const BlockCall& call, const OfBlock<float>& gradients, const TensorView& sums_k, const TensorView& sums_v,
                    const float* dout, float* dx) {
  const BlockShape& s = call.shape;
  const auto& p = call.parameters;
  const Blas blas{call.sgemm};
  const BlockSaved& kept = call.saved;
  const Saved saved(call);
  const auto scratch = scratch_of<BackwardScratch>(s);
  std::fill_n(scratch.ones, s.rows(), 1.0f);

  blas.input(dout, p.down.weight, s.rows(), s.ffn, s.hidden, false, scratch.active); // the gradient of active, then active
  const RowsView up{kept.up, s.ffn}, gate{kept.gate, s.ffn}, active{scratch.active, s.ffn}, dup{scratch.dup, s.ffn};
  gated_backward({s.rows(), s.ffn, activation_of(s), active, s.gated ? gate : up, s.gated ? up : RowsView{}, active,
                  s.gated ? RowsView{scratch.dgate, s.ffn} : dup, s.gated ? dup : RowsView{}},
                 DType::float32, call.num_threads);
  linear_gradients(call, dout, scratch.active, gradients.down, s.ffn, s.hidden, scratch.ones);
  if (s.gated) {
    blas.input(scratch.dgate, p.gate.weight, s.rows(), s.hidden, s.ffn, false, scratch.dnormed);
    linear_gradients(call, scratch.dgate, saved.middle_normed.out, gradients.gate, s.hidden, s.ffn, scratch.ones);
  }
  blas.input(scratch.dup, p.up.weight, s.rows(), s.hidden, s.ffn, s.gated, scratch.dnormed);
  linear_gradients(call, scratch.dup, saved.middle_normed.out, gradients.up, s.hidden, s.ffn, scratch.ones);
  norm_gradient(call, scratch.dnormed, kept.middle, dout, saved.middle_normed, p.mlp_norm, gradients.mlp_norm, scratch.dmiddle);

  blas.input(scratch.dmiddle, p.output.weight, s.rows(), s.query(), s.hidden, false, scratch.dattended);
  linear_gradients(call, scratch.dmiddle, kept.attended, gradients.output, s.query(), s.hidden, scratch.ones);
  BackwardParams attention;
  attention.shape = attention_shape(call);
  attention.dout = heads_of(s, scratch.dattended, s.query_heads), attention.q = heads_of(s, kept.q, s.query_heads);
  attention.k = call.cache_k, attention.v = call.cache_v, attention.out = heads_of(s, kept.attended, s.query_heads);
  attention.lse = saved.lse, attention.mask = call.mask, attention.scale = call.scale;
  attention.dq = heads_of(s, scratch.dq, s.query_heads), attention.dk = sums_k, attention.dv = sums_v;
  attention_backward(attention, call.num_threads);
  const auto fetch = [&](float* to, const float* from) { std::memcpy(to, from, s.head_dim * sizeof(float)); };
  each_token(s, sums_k, call.mask.start, scratch.dk, fetch);
  each_token(s, sums_v, call.mask.start, scratch.dv, fetch);
  turn(call, scratch.dq, s.query_heads, true);
  turn(call, scratch.dk, s.kv_heads, true);

  const auto into = [&](const float* dy, const OfModule<const float>& parameters, const OfModule<float>& wanted, int64_t out, bool add) {
    blas.input(dy, parameters.weight, s.rows(), s.hidden, out, add, scratch.dnormed);
    linear_gradients(call, dy, saved.normed.out, wanted, s.hidden, out, scratch.ones);
  };
  into(scratch.dq, p.query, gradients.query, s.query(), false);
  into(scratch.dk, p.key, gradients.key, s.keys(), true);
  into(scratch.dv, p.value, gradients.value, s.keys(), true);
  norm_gradient(call, scratch.dnormed, call.x, scratch.dmiddle, saved.normed, p.attention_norm, gradients.attention_norm, dx);
}

} // namespace tpk::cpu
