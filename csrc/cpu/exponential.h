// cpu/exponential.h: 2^x and tanh(x) on vectors of fp32, both NaN in, NaN out; exp2 gives exactly 1 at 0 and exactly 0 at -inf.
// 2^x: polynomial in the fractional part, relative error 2e-9 (degree 6) or 9e-5 (degree 3, for bf16 probabilities) before rounding. Trap:
// a rescale factor must be exactly 1 when the maximum did not move, or slicing would change bits; hence the constant term is exactly 1.
#pragma once

#include "simd.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

#if TPK_LEVEL >= TPK_LEVEL_AVX512
// Fraction in [0, 1): VREDUCE maps an infinite x to fraction 0 and VSCALEF(., -inf) is 0, so no clamp is needed.
template <int Degree> TPK_INLINE Vec exp2_approx(Vec x) {
  const Vec r = _mm512_reduce_ps(x, 0x01);
  Vec p;
  if constexpr (Degree >= 6) {
    p = splat(0.00021612914861179888f);
    p = fma(p, r, splat(0.0012467845808714628f));
    p = fma(p, r, splat(0.009675451554358006f));
    p = fma(p, r, splat(0.055485282093286514f));
    p = fma(p, r, splat(0.2402293086051941f));
    p = fma(p, r, splat(0.6931470632553101f));
  } else {
    p = splat(0.07706703990697861f);
    p = fma(p, r, splat(0.22764499485492706f));
    p = fma(p, r, splat(0.6951167583465576f));
  }
  p = fma(p, r, splat(1.0f));
  return _mm512_scalef_ps(p, x);
}
#else
// Fraction in [-0.5, 0.5]; the exponent is added to the bits, so x is clamped first and results below 2^-126 become 0.
template <int Degree> TPK_INLINE Vec exp2_approx(Vec x) {
  const Vec shifter = splat(12582912.0f); // 1.5 * 2^23: the integer part lands in the low mantissa bits
  const Vec clamped = minimum(splat(127.49f), maximum(splat(-126.0f), x));
  const Vec shifted = clamped + shifter;
  const Vec r = clamped - (shifted - shifter);
  Vec p = splat(0.00015353361959569156f);
  p = fma(p, r, splat(0.0013398873852565885f));
  p = fma(p, r, splat(0.00961843691766262f));
  p = fma(p, r, splat(0.055503323674201965f));
  p = fma(p, r, splat(0.24022647738456726f));
  p = fma(p, r, splat(0.6931471824645996f));
  p = fma(p, r, splat(1.0f));
#if TPK_LEVEL >= TPK_LEVEL_AVX2
  const Vec power = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
  return _mm256_andnot_ps(_mm256_cmp_ps(x, splat(-126.0f), _CMP_LT_OQ), power);
#else
  const Vec power = (Vec)((IntVec)p + ((IntVec)shifted << 23));
  return x < splat(-126.0f) ? splat(0.0f) : power;
#endif
}
#endif

// Odd rational approximation (degree 13 over 6), within a few ulp everywhere, relative near 0.
TPK_INLINE Vec tanh_approx(Vec x) {
  x = minimum(splat(7.90531110763549805f), maximum(splat(-7.90531110763549805f), x));
  const Vec y = x * x;
  Vec p = splat(-2.76076847742355e-16f);
  p = fma(p, y, splat(2.00018790482477e-13f));
  p = fma(p, y, splat(-8.60467152213735e-11f));
  p = fma(p, y, splat(5.12229709037114e-08f));
  p = fma(p, y, splat(1.48572235717979e-05f));
  p = fma(p, y, splat(6.37261928875436e-04f));
  p = fma(p, y, splat(4.89352455891786e-03f));
  Vec q = splat(1.19825839466702e-06f);
  q = fma(q, y, splat(1.18534705686654e-04f));
  q = fma(q, y, splat(2.26843463243900e-03f));
  q = fma(q, y, splat(4.89352518554385e-03f));
  return x * p / q;
}

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
