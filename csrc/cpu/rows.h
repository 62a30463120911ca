// cpu/rows.h: where the rows of q, k, v, out, ... lie, and their conversion between storage type and fp32.
// Query rows of one KV head are ordered token-major: row = token * group + g, so that a group shares each K/V row and the diagonal stays
// sharp. Trap: loads outside [0, count) rows never happen; padding is written by the callers.
#pragma once

#include "simd.h"
#include "tpk/attention_params.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

struct Rows {
  const char* base = nullptr;
  int64_t token_bytes = 0, head_bytes = 0;
  int64_t group = 1;
  DType dtype = DType::float32;

  // Rows of query head group `kv_head` (group > 1) or of one KV head (group == 1).
  static Rows of(const TensorView& view, DType dtype, int64_t batch, int64_t kv_head, int64_t group) {
    const int64_t bytes = dtype_bytes(dtype);
    return {static_cast<const char*>(view.data) + (batch * view.batch_stride + kv_head * group * view.head_stride) * bytes,
            view.token_stride * bytes, view.head_stride * bytes, group, dtype};
  }
  const char* row(int64_t index) const {
    if (group == 1) return base + index * token_bytes;
    return base + (index / group) * token_bytes + (index % group) * head_bytes;
  }
};

TPK_INLINE void prefetch_row(const Rows& rows, int64_t index, int64_t dim) {
  for (int64_t byte = 0; byte < dim * dtype_bytes(rows.dtype); byte += 64) prefetch_l2(rows.row(index) + byte);
}

// Which of a panel's rows is at a place.
using Order = int64_t (*)(int64_t place);
constexpr int64_t in_order(int64_t place) { return place; }

TPK_INLINE float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
TPK_INLINE uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
TPK_INLINE float float_of_bfloat16(uint16_t h) { return float_of_bits(uint32_t(h) << 16); }
// Round to nearest even; NaN stays NaN.
TPK_INLINE uint16_t bfloat16_of_float(float x) {
  const uint32_t bits = bits_of_float(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
TPK_INLINE float float_of_float16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return float_of_bits(sign | 0x7f800000u | (rest & 0x3ff) << 13);
  if (rest >= 0x0400) return float_of_bits(sign | ((rest << 13) + 0x38000000u));
  const float tiny = float(rest) * 5.9604644775390625e-08f; // subnormal: exact multiple of 2^-24
  return sign ? -tiny : tiny;
}
TPK_INLINE uint16_t float16_of_float(float x) {
  const uint32_t bits = bits_of_float(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000u) // subnormal: let the FPU round at 2^-24
    return uint16_t(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u));
  return uint16_t(sign | ((magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

inline void load_row(float* to, const void* from, int64_t count, DType dtype) {
  if (dtype == DType::float32) {
    std::memcpy(to, from, count * 4);
    return;
  }
  const uint16_t* half = static_cast<const uint16_t*>(from);
  int64_t i = 0;
  if (dtype == DType::bfloat16) {
    for (; i < count; ++i) to[i] = float_of_bfloat16(half[i]);
    return;
  }
#if TPK_LEVEL >= TPK_LEVEL_AVX2
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(half + i))));
#endif
  for (; i < count; ++i) to[i] = float_of_float16(half[i]);
}

inline void store_row(void* to, const float* from, int64_t count, DType dtype) {
  if (dtype == DType::float32) {
    std::memcpy(to, from, count * 4);
    return;
  }
  uint16_t* half = static_cast<uint16_t*>(to);
  int64_t i = 0;
  if (dtype == DType::bfloat16) {
#if TPK_LEVEL >= TPK_LEVEL_AVX512_BF16
    for (; i + 16 <= count; i += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(half + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
#endif
    for (; i < count; ++i) half[i] = bfloat16_of_float(from[i]);
    return;
  }
#if TPK_LEVEL >= TPK_LEVEL_AVX2
  for (; i + 8 <= count; i += 8) _mm_storeu_si128(reinterpret_cast<__m128i*>(half + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
  for (; i < count; ++i) half[i] = float16_of_float(from[i]);
}

// Of two rows of at most 256 elements, in fp32.
inline float dot_of_rows(const void* a, const void* b, int64_t count, DType dtype) {
#if TPK_LEVEL >= TPK_LEVEL_AVX512_BF16
  if (dtype == DType::bfloat16) {
    Vec sum = splat(0.0f);
    for (int64_t i = 0; i < count; i += 32) {
      const __mmask32 mask = count - i >= 32 ? 0xffffffffu : (1u << (count - i)) - 1u;
      const __m512i x = _mm512_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(a) + i);
      const __m512i y = _mm512_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(b) + i);
      sum = _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
    }
    return _mm512_reduce_add_ps(sum);
  }
#endif
  float row_a[256], row_b[256], sum[16] = {};
  load_row(row_a, a, count, dtype);
  load_row(row_b, b, count, dtype);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16)
    for (int l = 0; l < 16; ++l) sum[l] += row_a[i + l] * row_b[i + l];
  for (int l = 0; i < count; ++i, ++l) sum[l] += row_a[i] * row_b[i];
  for (int half = 8; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) sum[l] += sum[l + half];
  return sum[0];
}

TPK_INLINE bool finite_bits(float x) { return (bits_of_float(x) & 0x7f800000u) != 0x7f800000u; }

// Replaces non-finite elements by 0 and tells whether there were any. A masked probability is exactly 0, and 0 * NaN would leak.
inline bool clean_row(float* row, int64_t count) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < count; ++i) bad |= uint32_t((bits_of_float(row[i]) & 0x7f800000u) == 0x7f800000u);
  if (bad == 0) return false;
  for (int64_t i = 0; i < count; ++i)
    if (!finite_bits(row[i])) row[i] = 0.0f;
  return true;
}

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
