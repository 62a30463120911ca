// cpu/fused_elements.h: vectors of fp32 from and to rows of fp32, bf16 or fp16, whole or the first `count` lanes.
// Trap: the lanes of a partial load beyond `count` are zero, so that sums may take them, and nothing beyond is read or written.
#pragma once

#include "rows.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

struct Bfloat16 {
  uint16_t bits;
  static constexpr DType dtype = DType::bfloat16;
};
struct Float16 {
  uint16_t bits;
  static constexpr DType dtype = DType::float16;
};

template <class Element> TPK_INLINE Vec load_elements(const Element* p) {
#if TPK_LEVEL >= TPK_LEVEL_AVX512
  if constexpr (Element::dtype == DType::bfloat16)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
  else
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif TPK_LEVEL >= TPK_LEVEL_AVX2
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  if constexpr (Element::dtype == DType::bfloat16)
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  else
    return _mm256_cvtph_ps(half);
#else
  float wide[vec_lanes];
  for (int i = 0; i < vec_lanes; ++i)
    wide[i] = Element::dtype == DType::bfloat16 ? float_of_bfloat16(p[i].bits) : float_of_float16(p[i].bits);
  return load(wide);
#endif
}
template <> TPK_INLINE Vec load_elements<float>(const float* p) { return load(p); }

template <class Element> TPK_INLINE void store_elements(Element* p, Vec v) {
  float wide[vec_lanes];
  store(wide, v);
  store_row(p, wide, vec_lanes, Element::dtype);
}
template <> TPK_INLINE void store_elements<float>(float* p, Vec v) { store(p, v); }

// Lanes [0, count) of a vector; the rest is zero.
template <class Element> TPK_INLINE Vec load_some(const Element* p, int64_t count) {
  if (count >= vec_lanes) return load_elements(p);
  Element padded[vec_lanes] = {};
  std::memcpy(padded, p, count * sizeof(Element));
  return load_elements(padded);
}

template <class Element> TPK_INLINE void store_some(Element* p, Vec v, int64_t count) {
  if (count >= vec_lanes) return store_elements(p, v);
  Element padded[vec_lanes];
  store_elements(padded, v);
  std::memcpy(p, padded, count * sizeof(Element));
}

// visit(column, lanes) for each vector of a row; inlined twice, so that only the last one is ever partial.
template <class Visit> TPK_INLINE void each_column(int64_t dim, Visit&& visit) {
  int64_t c = 0;
  for (; c + vec_lanes <= dim; c += vec_lanes) visit(c, vec_lanes);
  if (c < dim) visit(c, dim - c);
}

// Sum of the lanes, always in the same order.
TPK_INLINE float sum_lanes(Vec v) {
  float lane[vec_lanes];
  store(lane, v);
  for (int width = vec_lanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
