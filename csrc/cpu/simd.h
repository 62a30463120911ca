// cpu/simd.h: one vector type `Vec` of fp32 lanes for the ISA level this translation unit is compiled for, and the few operations the
// kernels need. AVX-512 and AVX2 use intrinsics; the baseline uses GCC vector extensions, which compile on any architecture.
// Trap: maximum(a, b) returns b when either is NaN (as x86 does); the callers place the operand whose NaN must survive second.
#pragma once

#include <cstdint>
#include <cstring>

#if TPK_LEVEL >= TPK_LEVEL_AVX2
#include <immintrin.h>
#endif

#define TPK_INLINE inline __attribute__((always_inline))

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

#if TPK_LEVEL >= TPK_LEVEL_AVX512
using Vec = __m512;
TPK_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
TPK_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
TPK_INLINE Vec splat(float x) { return _mm512_set1_ps(x); }
TPK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
TPK_INLINE Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a, b); }
TPK_INLINE Vec minimum(Vec a, Vec b) { return _mm512_min_ps(a, b); }
// value where a != b, else 0
TPK_INLINE Vec zero_where_equal(Vec a, Vec b, Vec value) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ), value); }
// Whether a <= limit in every lane; NaN is above any limit.
TPK_INLINE bool none_above(Vec a, Vec limit) { return _mm512_cmp_ps_mask(a, limit, _CMP_LE_OQ) == 0xffff; }
TPK_INLINE Vec select_above(Vec a, Vec limit, Vec above, Vec otherwise) {
  return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(a, limit, _CMP_NLE_UQ), above);
}
TPK_INLINE bool all_equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ) == 0xffff; }
#elif TPK_LEVEL >= TPK_LEVEL_AVX2
using Vec = __m256;
TPK_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
TPK_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
TPK_INLINE Vec splat(float x) { return _mm256_set1_ps(x); }
TPK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
TPK_INLINE Vec maximum(Vec a, Vec b) { return _mm256_max_ps(a, b); }
TPK_INLINE Vec minimum(Vec a, Vec b) { return _mm256_min_ps(a, b); }
TPK_INLINE Vec zero_where_equal(Vec a, Vec b, Vec value) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ), value); }
TPK_INLINE bool none_above(Vec a, Vec limit) { return _mm256_movemask_ps(_mm256_cmp_ps(a, limit, _CMP_LE_OQ)) == 0xff; }
TPK_INLINE Vec select_above(Vec a, Vec limit, Vec above, Vec otherwise) {
  return _mm256_blendv_ps(otherwise, above, _mm256_cmp_ps(a, limit, _CMP_NLE_UQ));
}
TPK_INLINE bool all_equal(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)) == 0xff; }
#else
typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));
TPK_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
TPK_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
TPK_INLINE Vec splat(float x) { return Vec{x, x, x, x}; }
TPK_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
TPK_INLINE Vec maximum(Vec a, Vec b) { return a > b ? a : b; }
TPK_INLINE Vec minimum(Vec a, Vec b) { return a < b ? a : b; }
TPK_INLINE Vec zero_where_equal(Vec a, Vec b, Vec value) { return a != b ? value : splat(0.0f); }
TPK_INLINE bool all_set(IntVec mask) { return (mask[0] & mask[1] & mask[2] & mask[3]) != 0; }
TPK_INLINE bool none_above(Vec a, Vec limit) { return all_set(a <= limit); }
TPK_INLINE Vec select_above(Vec a, Vec limit, Vec above, Vec otherwise) { return a <= limit ? otherwise : above; }
TPK_INLINE bool all_equal(Vec a, Vec b) { return all_set(a == b); }
#endif

inline constexpr int vec_lanes = sizeof(Vec) / sizeof(float);

// Keeps a loaded value in a register: g++ 12 otherwise re-reads it as the memory operand of every FMA that uses it (-25 %).
TPK_INLINE void pin(Vec& v) {
#if TPK_LEVEL >= TPK_LEVEL_AVX2
  asm("" : "+v"(v));
#else
  (void)v;
#endif
}

TPK_INLINE void prefetch_l2([[maybe_unused]] const void* p) {
#if TPK_LEVEL >= TPK_LEVEL_AVX2
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
#endif
}

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
