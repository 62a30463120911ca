// cpu/fused_activations.h: rotary turns of q and k, and the gated activations of the MLP: silu or tanh-GELU, times `up` or alone.
// Both activations are x * sigmoid(y(x)): y = x, or y = 2 sqrt(2/pi) (x + 0.044715 x^3), since (1 + tanh u) / 2 = sigmoid(2 u). This form
// keeps its relative accuracy far out on the negative side, where 1 + tanh cancels. Trap: e^-y is capped, or 1 - sigmoid were inf * 0.
#pragma once

#include "exponential.h"
#include "fused.h"
#include "fused_elements.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

template <class Element> struct Turn {
  // (a, b) -> (a cos - b sin, a sin + b cos), the inverse with -sin.
  TPK_INLINE static Vec turned(Vec x, Vec turn, bool inverse) {
#if TPK_LEVEL >= TPK_LEVEL_AVX512
    const Vec cosine = _mm512_moveldup_ps(turn), crossed = _mm512_permute_ps(x, 0xb1) * _mm512_movehdup_ps(turn);
    return inverse ? _mm512_fmsubadd_ps(x, cosine, crossed) : _mm512_fmaddsub_ps(x, cosine, crossed);
#elif TPK_LEVEL >= TPK_LEVEL_AVX2
    const Vec cosine = _mm256_moveldup_ps(turn), crossed = _mm256_permute_ps(x, 0xb1) * _mm256_movehdup_ps(turn);
    return inverse ? _mm256_fmsubadd_ps(x, cosine, crossed) : _mm256_fmaddsub_ps(x, cosine, crossed);
#else
    Vec out;
    for (int i = 0; i < vec_lanes; i += 2) {
      const float cosine = turn[i], sine = inverse ? -turn[i + 1] : turn[i + 1];
      out[i] = x[i] * cosine - x[i + 1] * sine;
      out[i + 1] = x[i + 1] * cosine + x[i] * sine;
    }
    return out;
#endif
  }

  static void rows(const Rotary& p, int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) {
      const float* turns = p.turns + r % p.turn_rows * p.head_dim;
      for (int64_t head = 0; head < p.heads; ++head) {
        const Element* x = p.x.row<const Element>(r) + head * p.head_dim;
        Element* out = p.out.row<Element>(r) + head * p.head_dim;
        for (int64_t d = 0; d < p.head_dim; d += vec_lanes) {
          const int64_t lanes = p.head_dim - d;
          store_some(out + d, turned(load_some(x + d, lanes), load_some(turns + d, lanes), p.inverse), lanes);
        }
      }
    }
  }
};

struct Sigmoid {
  Vec value, complement; // sigmoid(y) and 1 - sigmoid(y)
};

// Of x in [1, 2^126]. A division takes as long as all the rest of a sigmoid; 14 bits and one Newton step are exact to an ulp.
TPK_INLINE Vec reciprocal(Vec x) {
#if TPK_LEVEL >= TPK_LEVEL_AVX512
  const Vec guess = _mm512_rcp14_ps(x);
  return fma(guess, _mm512_fnmadd_ps(x, guess, splat(1.0f)), guess);
#else
  return splat(1.0f) / x;
#endif
}

TPK_INLINE Sigmoid sigmoid(Vec y) {
  const Vec power = exp2_approx<6>(minimum(splat(126.0f), y * splat(-1.44269504088896340736f)));
  const Vec value = reciprocal(splat(1.0f) + power);
  return {value, power * value};
}

inline constexpr float gelu_slope = 1.5957691216057308f, gelu_cubic = 0.044715f; // 2 sqrt(2/pi)

template <Activation kind> TPK_INLINE Vec activated(Vec x) {
  if constexpr (kind == Activation::silu) return x * sigmoid(x).value;
  const Vec cubic = fma(x * x, splat(gelu_cubic), splat(1.0f));
  return x * sigmoid(x * splat(gelu_slope) * cubic).value;
}

struct ActivationAndSlope {
  Vec value, slope;
};

// d(x s(y)) / dx = s + x s (1 - s) y'
template <Activation kind> TPK_INLINE ActivationAndSlope activated_with_slope(Vec x) {
  if constexpr (kind == Activation::silu) {
    const Sigmoid s = sigmoid(x);
    const Vec value = x * s.value;
    return {value, fma(value, s.complement, s.value)};
  }
  const Vec square = x * x;
  const Vec inner_slope = splat(gelu_slope) * fma(square, splat(3.0f * gelu_cubic), splat(1.0f));
  const Sigmoid s = sigmoid(x * splat(gelu_slope) * fma(square, splat(gelu_cubic), splat(1.0f)));
  const Vec value = x * s.value;
  return {value, fma(value * s.complement, inner_slope, s.value)};
}

template <class Element> struct Gated {
  template <Activation kind> static void forward_rows(const GatedForward& p, int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) {
      const Element *gate = p.gate.row<const Element>(r), *up = p.up.data == nullptr ? nullptr : p.up.row<const Element>(r);
      Element* out = p.out.row<Element>(r);
      if (up == nullptr)
        each_column(p.dim, [&](int64_t c, int64_t n) { store_some(out + c, activated<kind>(load_some(gate + c, n)), n); });
      else
        each_column(p.dim,
                    [&](int64_t c, int64_t n) { store_some(out + c, activated<kind>(load_some(gate + c, n)) * load_some(up + c, n), n); });
    }
  }
  static void forward(const GatedForward& p, int64_t first, int64_t end) {
    if (p.activation == Activation::silu)
      forward_rows<Activation::silu>(p, first, end);
    else
      forward_rows<Activation::gelu_tanh>(p, first, end);
  }

  template <Activation kind> static void backward_rows(const GatedBackward& p, int64_t first, int64_t end) {
    const bool gated = p.up.data != nullptr;
    for (int64_t r = first; r < end; ++r) {
      const Element *gate = p.gate.row<const Element>(r), *dout = p.dout.row<const Element>(r);
      Element *dgate = p.dgate.row<Element>(r), *out = p.out.data == nullptr ? nullptr : p.out.row<Element>(r);
      each_column(p.dim, [&](int64_t c, int64_t n) {
        const ActivationAndSlope a = activated_with_slope<kind>(load_some(gate + c, n));
        const Vec upstream = load_some(dout + c, n);
        if (gated) {
          const Vec up = load_some(p.up.row<const Element>(r) + c, n);
          if (out != nullptr) store_some(out + c, a.value * up, n);
          store_some(p.dup.row<Element>(r) + c, upstream * a.value, n);
          store_some(dgate + c, upstream * up * a.slope, n);
        } else {
          if (out != nullptr) store_some(out + c, a.value, n);
          store_some(dgate + c, upstream * a.slope, n);
        }
      });
    }
  }
  static void backward(const GatedBackward& p, int64_t first, int64_t end) {
    if (p.activation == Activation::silu)
      backward_rows<Activation::silu>(p, first, end);
    else
      backward_rows<Activation::gelu_tanh>(p, first, end);
  }
};

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
