// cpu/fixed_exponential.h: 2^x straight to the bits of bfloat16, 32 at once (AMX level; vpermi2b needs VBMI).
// The exponent of bfloat16 followed by its mantissa, read as one integer, is 128 * (log2 p + 127) but for the bend of 2^f inside an octave:
// so 128 * (x + 127), rounded to an integer and saturated to 16 bits, needs only a table of 128 bytes that takes the bend off. Relative
// error at most 0.0065 (rms 0.0022; rounding to bfloat16 alone: 0.0039 and 0.0016). Beside tiles few instructions count: 9 for 32
// probabilities. Trap: the conversion to integers makes NaN and what lies beyond 2^31 the lowest integer, which would pass for a hidden
// key. So operands whose scores might get there (`fixed_element_limit`) take the checked form; all other scores have the same bits in both.
#pragma once

#include <cmath>

#include "simd.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

inline constexpr float fixed_one = 128.0f; // steps an octave

// Bits of a bfloat16. While the elements of both operands stay below, scores are finite and within 2^22 octaves, and so is a reference
// among them. 0 where the scale or the softcap allows no element.
inline uint16_t fixed_element_limit(double scale, double softcap, int64_t depth) {
  const double finite = 0x1p55; // 256 products of two such elements
  double limit = softcap > 0 ? (softcap < 0x1p21 ? finite : 0.0) : std::sqrt(0x1p22 / (scale * 1.44269504088896340736 * double(depth)));
  if (!(limit > 0.0)) return 0;
  const float bounded = float(limit < finite ? limit : finite);
  uint32_t bits;
  std::memcpy(&bits, &bounded, sizeof bits);
  return uint16_t(bits >> 16);
}

// 128 * (f - (2^f - 1)), f = i / 128, rounded.
alignas(64) inline constexpr uint8_t octave_bend[128] = {
    0,  0,  1,  1,  1,  1,  2,  2,  2,  3,  3,  3,  3,  4,  4,  4,  4,  5,  5,  5,  5,  6,  6,  6,  6,  6,  7,  7,  7,  7,  7,  8,
    8,  8,  8,  8,  8,  9,  9,  9,  9,  9,  9,  9,  10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11,
    11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 10, 10, 10, 10, 10, 10, 10, 10, 10, 9,  9,  9,  9,  9,
    9,  9,  8,  8,  8,  8,  8,  7,  7,  7,  7,  7,  6,  6,  6,  6,  5,  5,  5,  4,  4,  4,  3,  3,  3,  3,  2,  2,  1,  1,  1,  0,
};

// Probabilities 2^(scale * score - reference), one reference a lane.
template <bool Checked> class FixedExponential {
 public:
  FixedExponential(float scale_log2, Vec reference)
      : scale_(splat(scale_log2 * fixed_one)), shift_(fma(reference, splat(-fixed_one), splat(127.0f * fixed_one))) {}

  // 16 scores of `a`, 16 of `b` -> in each quarter four probabilities of `a`, then four of `b`.
  static TPK_INLINE __m512i packed(const FixedExponential& a, Vec of_a, const FixedExponential& b, Vec of_b) {
    const __m512i both = _mm512_packus_epi32(a.fixed(of_a), b.fixed(of_b));
    const __m512i bend =
        _mm512_maskz_permutex2var_epi8(0x5555555555555555u, _mm512_load_si512(octave_bend), both, _mm512_load_si512(octave_bend + 64));
    return _mm512_sub_epi16(both, bend);
  }

  // Scores of two keys -> 16 pairs, one a lane. The sum is that of the rounded probabilities.
  TPK_INLINE __m512i pair(Vec first, Vec second, Vec& sum) {
    const __m512i pairs = _mm512_broadcast_i32x4(_mm_set_epi8(15, 14, 7, 6, 13, 12, 5, 4, 11, 10, 3, 2, 9, 8, 1, 0));
    const __m512i p = _mm512_shuffle_epi8(packed(*this, first, *this, second), pairs);
    seen_ = _mm512_or_si512(seen_, p);
    sum = _mm512_dpbf16_ps(sum, (__m512bh)p, (__m512bh)_mm512_set1_epi16(0x3f80));
    return p;
  }

  // NaN in lanes that met a score 129 octaves or more above the reference, or have no reference yet (-inf).
  TPK_INLINE Vec nan_where_out_of_range(Vec sum) const {
    const __mmask16 high = _mm512_test_epi32_mask(seen_, _mm512_set1_epi32(int(0x80008000)));
    const __mmask16 none = _mm512_cmp_ps_mask(shift_, splat(__builtin_inff()), _CMP_EQ_OQ);
    return _mm512_mask_mov_ps(sum, high | none, splat(__builtin_nanf("")));
  }

 private:
  // The highest score, being the reference, gives 2^0 to the last bit.
  TPK_INLINE __m512i fixed(Vec score) const {
    const Vec steps = fma(score, scale_, shift_);
    const __m512i rounded = _mm512_cvtps_epi32(steps);
    if constexpr (!Checked) return rounded;
    const __mmask16 out = _mm512_cmp_ps_mask(steps, splat(32767.0f), _CMP_NLE_UQ);
    const __mmask16 seen = _mm512_cmp_ps_mask(score, splat(-__builtin_inff()), _CMP_NEQ_UQ);
    return _mm512_maskz_mov_epi32(seen, _mm512_mask_mov_epi32(rounded, out, _mm512_set1_epi32(0x7fff))); // bits of a NaN
  }

  Vec scale_, shift_;
  __m512i seen_ = _mm512_setzero_si512();
};

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
