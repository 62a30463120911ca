// cuda/softmax.cuh: scores from products, and the running softmax of the rows of a warp, in base 2 and fp32.
// Accumulators of mma m16n8k16: elements 0 and 1 belong to row g, 2 and 3 to row g + 8; a row's columns lie in the four lanes of a quad.
// Every fma that decides a bit is written, and the compiler forms none (-fmad=false): full and masked tiles do the same arithmetic.
#pragma once

#include "cuda/device.cuh"
#include "tpk/scoring.h"

namespace tpk {

inline constexpr float infinity = __builtin_huge_valf();

// tanh to about two ulp (Cephes tanhf): a polynomial near zero, where 1 - 2 / (e^2x + 1) cancels.
TPK_DEVICE float tanh_fp32(float x) {
  const float magnitude = fabsf(x), z = x * x;
  float polynomial = fmaf(z, -5.70498872745e-3f, 2.06390887954e-2f);
  polynomial = fmaf(polynomial, z, -5.37397155531e-2f);
  polynomial = fmaf(polynomial, z, 1.33314422036e-1f);
  polynomial = fmaf(polynomial, z, -3.33332819422e-1f);
  const float large = 1.0f - 2.0f * ptx::reciprocal_approx(ptx::exp2_approx(magnitude * float(2 * log2_e)) + 1.0f);
  return magnitude < 0.625f ? fmaf(polynomial * z, x, x) : copysignf(large, x);
}

// Scores from products, in place.
template <int columns> TPK_DEVICE void to_scores(float (&s)[columns][4], const Scoring& scoring) {
  if (scoring.cap != 0) {
#pragma unroll
    for (int j = 0; j < columns; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] = scoring.cap * tanh_fp32(s[j][e] * scoring.cap_scale);
  } else if (scoring.sign != 1) {
#pragma unroll
    for (int j = 0; j < columns; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] *= scoring.sign;
  }
}

TPK_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(all_lanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(all_lanes, x, 2));
}
TPK_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(all_lanes, x, 1);
  return x + __shfl_xor_sync(all_lanes, x, 2);
}

// Running maximum of the scores and sum of this lane's p of one row; both, and what p weighs, are relative to the maximum.
struct RunningRow {
  float largest = -infinity, total = 0;

  // Takes the row's elements `first`, `first` + 1 of a tile of scores, turns them into p and returns what earlier sums fade by.
  template <int columns> TPK_DEVICE float take(float (&s)[columns][4], int first, float multiplier) {
    float now = largest;
#pragma unroll
    for (int j = 0; j < columns; ++j) now = fmaxf(now, fmaxf(s[j][first], s[j][first + 1]));
    now = quad_max(now);
    // Of a row that has seen no key yet, -inf less -inf must not become NaN.
    const float base = now == -infinity ? 0.0f : now, shift = base * multiplier;
    // Exactly 1 where the maximum stays: how many masked tiles follow a row's last key depends on the rows beside it.
    const float fade = ptx::exp2_approx((largest - base) * multiplier);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < columns; ++j) {
#pragma unroll
      for (int e = first; e < first + 2; ++e) {
        s[j][e] = ptx::exp2_approx(fmaf(s[j][e], multiplier, -shift));
        sum += s[j][e];
      }
    }
    total = fmaf(total, fade, sum);
    largest = now;
    return fade;
  }
};

// What a row's weighted sum is multiplied by to give `out`, and its natural logarithm of the sum of exponents.
struct RowResult {
  float factor, lse;
  bool empty; // out is 0 whatever the sums hold

  // top: the natural score that `total` is relative to. Only a mask makes a row empty: a row that sees keys, all of them with a score
  // of -inf, is NaN, as softmax has it. sink: a logit that only adds to the denominator; has_sink says whether there is one.
  TPK_DEVICE static RowResult of(float top, float total, bool empty, bool has_sink, float sink) {
    float fade = 1, lse_empty = empty ? -infinity : __builtin_nanf("");
    if (has_sink) {
      const float peak = fmaxf(top, sink), base = peak == -infinity ? 0.0f : peak;
      fade = ptx::exp2_approx((top - base) * float(log2_e));
      total = fmaf(total, fade, ptx::exp2_approx((sink - base) * float(log2_e)));
      top = base;
      if (empty) lse_empty = sink;
    }
    const bool nothing = total == 0 || empty;
    return {fade / total, nothing ? lse_empty : fmaf(float(ln_2), ptx::log2_approx(total), top), empty};
  }
};

} // namespace tpk
