// cpu/softmax.h: elementwise passes over a panel of scores [keys][lanes] (lanes are query rows): mask, softcap, online softmax.
// Everything is vertical: row statistics are vectors over lanes, so no pass ever reduces across a vector and a query row's result cannot
// depend on its neighbours. Trap: sums run in four chains chosen by the absolute key, so skipped keys leave the order of the rest alone.
#pragma once

#include "core_f32.h"
#if TPK_LEVEL >= TPK_LEVEL_AMX_BF16
#include "fixed_exponential.h"
#endif

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

// Highest score of `rows` keys in units of log2, or `at_least`. A NaN score is dropped here and comes back through its own exponential.
template <class Core> TPK_INLINE Vec highest_score(const float* s, int64_t rows, float scale_log2, Vec at_least) {
  Vec m0 = splat(minus_infinity), m1 = m0, m2 = m0, m3 = m0;
  for (int64_t r = 0; r < rows; r += 4) {
    m0 = maximum(load(s + (r + 0) * Core::lanes), m0);
    m1 = maximum(load(s + (r + 1) * Core::lanes), m1);
    m2 = maximum(load(s + (r + 2) * Core::lanes), m2);
    m3 = maximum(load(s + (r + 3) * Core::lanes), m3);
  }
  return maximum(maximum(maximum(m0, m1), maximum(m2, m3)) * splat(scale_log2), at_least);
}

// Writes 2^(score - reference) of vector v of the panel and returns its sum over the keys: NaN where a score is NaN or too high.
// Checked: see fixed_exponential.h; other cores need no second form.
template <class Core, bool Checked>
TPK_INLINE Vec exponentials(const float* s, typename Core::Element* probabilities, int64_t rows, float scale_log2, Vec reference, int v) {
  Vec s0 = splat(0.0f), s1 = s0;
#if TPK_LEVEL >= TPK_LEVEL_AMX_BF16
  FixedExponential<Checked> exponential(scale_log2, reference);
  for (int64_t r = 0; r < rows; r += 4, s += 4 * Core::lanes) {
    Core::store_depth_pair(probabilities, r, v, exponential.pair(load(s), load(s + Core::lanes), s0));
    Core::store_depth_pair(probabilities, r + 2, v, exponential.pair(load(s + 2 * Core::lanes), load(s + 3 * Core::lanes), s1));
  }
  return exponential.nan_where_out_of_range(s0 + s1);
#else
  Vec s2 = s0, s3 = s0;
  const Vec scale = splat(scale_log2), shift = splat(0.0f) - reference;
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
  return (s0 + s1) + (s2 + s3);
#endif
}

// Running statistics of one panel of query rows, one value a lane, in units of log2.
struct RowStatistics {
  float* reference; // probabilities are 2^(score - reference); -inf before the first key
  float* sum;       // of the probabilities
  float* alpha;     // out: factor for what was accumulated before
};

// A turn whose probabilities sum to more than this moves the reference; until then bf16 and fp32 lose nothing, being floating-point.
inline constexpr float highest_lagging_sum = 1048576.0f;

// Probabilities against a new reference; what was accumulated before is worth alpha.
template <class Core, bool Checked>
TPK_INLINE bool restart(const float* s, typename Core::Element* probabilities, int64_t rows, float scale_log2, Vec before, Vec now, Vec sum,
                        const RowStatistics& state, int v) {
  // A row that has seen no key yet: reference 0 keeps -inf - (-inf) away.
  const Vec reference = zero_where_equal(now, splat(minus_infinity), now);
  const Vec alpha = exp2_approx<Core::exp_degree>(before - reference);
  const Vec tile_sum = exponentials<Core, Checked>(s, probabilities, rows, scale_log2, reference, v);
  store(state.reference + v * vec_lanes, now);
  store(state.alpha + v * vec_lanes, alpha);
  store(state.sum + v * vec_lanes, fma(sum, alpha, tile_sum));
  return !all_equal(alpha, splat(1.0f));
}

// One step of the online softmax over `rows` keys (a multiple of 4): raw scores -> probabilities, sum and reference brought up to date.
// Every decision is a lane's own, so a row does not depend on the rows beside it. Returns whether any alpha is not 1.
// Core::lagging: the reference of the last turn is tried first, without a look at the maximum; scores must survive for the second try.
template <class Core, bool Checked>
bool online_softmax(const float* scores, typename Core::Element* probabilities, int64_t rows, float scale_log2,
                    const RowStatistics& state) {
  bool rescale = false;
  for (int v = 0; v < 2; ++v) {
    const float* s = scores + v * vec_lanes;
    const Vec before = load(state.reference + v * vec_lanes), sum = load(state.sum + v * vec_lanes);
    if (Core::lagging && !all_equal(before, splat(minus_infinity))) {
      const Vec tile_sum = exponentials<Core, Checked>(s, probabilities, rows, scale_log2, before, v);
      if (none_above(tile_sum, splat(highest_lagging_sum))) { // false for NaN, and for a lane without a reference (inf or NaN)
        store(state.sum + v * vec_lanes, sum + tile_sum);
        store(state.alpha + v * vec_lanes, splat(1.0f));
        continue;
      }
      const Vec now = select_above(tile_sum, splat(highest_lagging_sum), highest_score<Core>(s, rows, scale_log2, before), before);
      rescale |= restart<Core, Checked>(s, probabilities, rows, scale_log2, before, now, sum, state, v);
    } else {
      const Vec now = highest_score<Core>(s, rows, scale_log2, before);
      rescale |= restart<Core, Checked>(s, probabilities, rows, scale_log2, before, now, sum, state, v);
    }
  }
  return rescale;
}

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
