// cpu/softmax.h: elementwise passes over a panel of scores [keys][lanes] (lanes are query rows): mask, softcap, online softmax.
// Everything is vertical: row statistics are vectors over lanes, so no pass ever reduces across a vector and a query row's result cannot
// depend on its neighbours. Trap: sums run in four chains chosen by the absolute key, so skipped keys leave the order of the rest alone.
#pragma once

#include "core_f32.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

inline constexpr float log2_of_e = 1.44269504088896340736f;
inline constexpr float minus_infinity = -__builtin_inff();

// scores[r][lane] = -inf unless lo[lane] <= first_key + r < hi[lane].
template <int Lanes> void mask_scores(float* scores, int64_t rows, int32_t first_key, const int32_t* lo, const int32_t* hi) {
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t key = first_key + int32_t(r);
    float* row = scores + r * Lanes;
    for (int l = 0; l < Lanes; ++l) row[l] = (key >= lo[l]) & (key < hi[l]) ? row[l] : minus_infinity;
  }
}

// scores = softcap * tanh(scale * scores / softcap) in units of log2; slope (may be null) receives 1 - tanh^2.
inline void cap_scores(float* scores, float* slope, int64_t count, float scale, float softcap) {
  const Vec inner = splat(scale / softcap), outer = splat(softcap * log2_of_e);
  for (int64_t i = 0; i < count; i += vec_lanes) {
    const Vec t = tanh_approx(load(scores + i) * inner);
    store(scores + i, t * outer);
    if (slope != nullptr) store(slope + i, splat(1.0f) - t * t);
  }
}

// One step of the online softmax over `rows` keys (a multiple of 4): raw scores -> probabilities relative to the new maximum.
// maximum, sum: running statistics in log2 units; alpha: factor for what was accumulated before. Returns whether any alpha is not 1.
template <class Core>
bool online_softmax(const float* scores, typename Core::Element* probabilities, int64_t rows, float scale_log2, float* maximum_, float* sum,
                    float* alpha) {
  bool rescale = false;
  for (int v = 0; v < 2; ++v) {
    const float* s = scores + v * vec_lanes;
    Vec m0 = splat(minus_infinity), m1 = m0, m2 = m0, m3 = m0;
    for (int64_t r = 0; r < rows; r += 4) { // a NaN score is dropped here and comes back through its own exponential
      m0 = maximum(load(s + (r + 0) * Core::lanes), m0);
      m1 = maximum(load(s + (r + 1) * Core::lanes), m1);
      m2 = maximum(load(s + (r + 2) * Core::lanes), m2);
      m3 = maximum(load(s + (r + 3) * Core::lanes), m3);
    }
    const Vec scale = splat(scale_log2);
    const Vec before = load(maximum_ + v * vec_lanes);
    const Vec now = maximum(maximum(maximum(m0, m1), maximum(m2, m3)) * scale, before);
    store(maximum_ + v * vec_lanes, now);
    // A row that has seen no key yet: reference 0 keeps -inf - (-inf) away.
    const Vec reference = zero_where_equal(now, splat(minus_infinity), now);
    const Vec factor = exp2_approx<Core::exp_degree>(before - reference);
    store(alpha + v * vec_lanes, factor);
    rescale |= !all_equal(factor, splat(1.0f));
    if (v == 1) Core::wake();
    const Vec shift = splat(0.0f) - reference;
    Vec s0 = splat(0.0f), s1 = s0, s2 = s0, s3 = s0;
    for (int64_t r = 0; r < rows; r += 4) {
      const Vec p0 = exp2_approx<Core::exp_degree>(fma(load(s + (r + 0) * Core::lanes), scale, shift));
      const Vec p1 = exp2_approx<Core::exp_degree>(fma(load(s + (r + 1) * Core::lanes), scale, shift));
      const Vec p2 = exp2_approx<Core::exp_degree>(fma(load(s + (r + 2) * Core::lanes), scale, shift));
      const Vec p3 = exp2_approx<Core::exp_degree>(fma(load(s + (r + 3) * Core::lanes), scale, shift));
      s0 = s0 + p0;
      s1 = s1 + p1;
      s2 = s2 + p2;
      s3 = s3 + p3;
      Core::emit_depth_pair(probabilities, r, v, p0, p1);
      Core::emit_depth_pair(probabilities, r + 2, v, p2, p3);
    }
    store(sum + v * vec_lanes, fma(load(sum + v * vec_lanes), factor, (s0 + s1) + (s2 + s3)));
  }
  return rescale;
}

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
