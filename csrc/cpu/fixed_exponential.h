// cpu/fixed_exponential.h: 2^x straight to the bits of bfloat16, two keys of 16 query rows at once (AMX level; vpermi2b needs VBMI).
// The exponent of bfloat16 followed by its mantissa, read as one integer, is 128 * (log2 p + 127) but for the bend of 2^f inside an octave:
// so adding 2^23 leaves 128 * (x + 127) in the low bits of the float, and a table of 128 bytes takes the bend off. Relative error at
// most 0.0065 (rms 0.0022; rounding to bfloat16 alone: 0.0039 and 0.0016), and the sum is that of the rounded probabilities. While tiles
// are in use the second multiplier rests, so what counts here is few multiplications: 2 for 32 probabilities instead of 10. Trap: whatever
// leaves the range (NaN, +inf, 2^128) must not pass for a probability: the high half of every float is watched.
#pragma once

#include "simd.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

inline constexpr float fixed_one = 128.0f; // steps an octave

// 128 * (f - (2^f - 1)), f = i / 128, rounded.
alignas(64) inline constexpr uint8_t octave_bend[128] = {
    0,  0,  1,  1,  1,  1,  2,  2,  2,  3,  3,  3,  3,  4,  4,  4,  4,  5,  5,  5,  5,  6,  6,  6,  6,  6,  7,  7,  7,  7,  7,  8,
    8,  8,  8,  8,  8,  9,  9,  9,  9,  9,  9,  9,  10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11,
    11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 10, 10, 10, 10, 10, 10, 10, 10, 10, 9,  9,  9,  9,  9,
    9,  9,  8,  8,  8,  8,  8,  7,  7,  7,  7,  7,  6,  6,  6,  6,  5,  5,  5,  4,  4,  4,  3,  3,  3,  3,  2,  2,  1,  1,  1,  0,
};

// Probabilities 2^(scale * score - reference) of keys as they come, and their sum.
class FixedExponential {
 public:
  FixedExponential(float scale_log2, Vec reference) : scale_(splat(scale_log2 * fixed_one)), shift_(reference * splat(-fixed_one)) {}

  // scores of two keys -> 16 pairs of bfloat16.
  TPK_INLINE __m512i pair(Vec first, Vec second, Vec& sum) {
    const __m512i a = fixed(first), b = fixed(second), low_half = _mm512_set1_epi32(0xffff);
    seen_ = _mm512_ternarylogic_epi32(seen_, a, b, 0xfe);                                         // seen | a | b
    const __m512i both = _mm512_ternarylogic_epi32(low_half, a, _mm512_bslli_epi128(b, 2), 0xca); // low_half ? a : b
    const __m512i bend =
        _mm512_maskz_permutex2var_epi8(0x5555555555555555u, _mm512_load_si512(octave_bend), both, _mm512_load_si512(octave_bend + 64));
    const __m512i p = _mm512_sub_epi16(both, bend);
    sum = _mm512_dpbf16_ps(sum, (__m512bh)p, (__m512bh)_mm512_set1_epi16(0x3f80));
    return p;
  }

  // NaN in the lanes that met a score out of range.
  TPK_INLINE Vec nan_where_out_of_range(Vec sum) const {
    const __mmask16 out = _mm512_cmpneq_epi32_mask(_mm512_srli_epi32(seen_, 15), _mm512_set1_epi32(0x4b000000 >> 15));
    return _mm512_mask_mov_ps(sum, out, splat(__builtin_nanf("")));
  }

 private:
  static constexpr float lowest = 8388608.0f; // 2^23, whose bits are 0x4b000000

  // The reference goes first, so that the highest score is 2^0 to the last bit. A NaN passes the maximum, being its second operand.
  TPK_INLINE __m512i fixed(Vec score) const {
    const Vec steps = fma(score, scale_, shift_);
    return _mm512_castps_si512(_mm512_max_ps(splat(lowest), steps + splat(lowest + 127.0f * fixed_one)));
  }

  Vec scale_, shift_;
  __m512i seen_ = _mm512_setzero_si512();
};

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
