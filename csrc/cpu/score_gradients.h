// cpu/score_gradients.h: from scores and dP of 32 keys of one panel to probabilities and score gradients, as operands of the three products
// that follow: P and dS with keys as rows (for dv and dk), dS with keys as depth (for dq).
// Trap: where scores are masked, -inf means "not seen" and gives exactly 0 whatever else is NaN. With the fixed exponential P's depth and
// the lanes of dS as depth come in orders of their own (Core::probability_order, Core::gradient_order), which save shuffles.
#pragma once

#include "softmax.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

template <class Element> struct ScoreGradients {
  const float *scores, *dp, *slope; // [key_chunk][lanes]; slope: of the softcap
  const float *lse_log2, *delta;    // per lane
  float scale_log2, scale;
  Element *p_rows, *ds_rows;
  int64_t row_stride; // elements between rows of both
  Element* ds_depth;

  // P is 2^(scale_log2 * score - lse), dS is P * (dP - delta) * scale, times slope.
  template <class Core, bool Capped, bool Masked> void run() const {
    Vec lse[2], offset[2];
    for (int v = 0; v < 2; ++v) {
      lse[v] = splat(0.0f) - load(lse_log2 + v * vec_lanes);
      offset[v] = load(delta + v * vec_lanes);
    }
    const Vec to_log2 = splat(scale_log2), factor = splat(scale), hidden = splat(minus_infinity);
    for (int64_t r = 0; r < key_chunk; r += 2) {
      Vec p[2][2], ds[2][2];
      for (int i = 0; i < 2; ++i)
        for (int v = 0; v < 2; ++v) {
          const int64_t at = (r + i) * Core::lanes + v * vec_lanes;
          const Vec s = load(scores + at);
          p[i][v] = exp2_approx<Core::exp_degree>(fma(s, to_log2, lse[v]));
          ds[i][v] = p[i][v] * ((load(dp + at) - offset[v]) * factor);
          if constexpr (Capped) ds[i][v] = ds[i][v] * load(slope + at);
          if constexpr (Masked) {
            p[i][v] = zero_where_equal(s, hidden, p[i][v]);
            ds[i][v] = zero_where_equal(s, hidden, ds[i][v]);
          }
        }
      Core::emit_rows_pair(p_rows + r * row_stride, row_stride, p[0], p[1]);
      Core::emit_rows_pair(ds_rows + r * row_stride, row_stride, ds[0], ds[1]);
      if constexpr (!Core::in_place)
        for (int v = 0; v < 2; ++v) Core::emit_depth_pair(ds_depth, r, v, ds[0][v], ds[1][v]);
    }
  }

#if TPK_LEVEL >= TPK_LEVEL_AMX_BF16
  // The same with probabilities rounded to bfloat16 from the start: a third of the instructions less.
  template <bool Capped, bool Masked, bool Checked> void run_fixed() const {
    using Exponential = FixedExponential<Checked>;
    const Exponential low(scale_log2, load(lse_log2)), high(scale_log2, load(lse_log2 + 16));
    const Vec factor = splat(scale), none = splat(0.0f), hidden = splat(minus_infinity);
    const Vec offset[2] = {none - load(delta) * factor, none - load(delta + 16) * factor};
    for (int64_t r = 0; r < key_chunk; r += 2) {
      __m512i ds_row[2];
      for (int i = 0; i < 2; ++i) {
        const int64_t at = (r + i) * 32;
        const Vec s[2] = {load(scores + at), load(scores + at + 16)};
        const __m512i p = Exponential::packed(low, s[0], high, s[1]), zero = _mm512_setzero_si512();
        _mm512_storeu_si512(p_rows + (r + i) * row_stride, p);
        Vec ds[2] = {_mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, p)), _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, p))};
        for (int v = 0; v < 2; ++v) {
          ds[v] = ds[v] * fma(load(dp + at + v * 16), factor, offset[v]);
          if constexpr (Capped) ds[v] = ds[v] * load(slope + at + v * 16);
          if constexpr (Masked) ds[v] = zero_where_equal(s[v], hidden, ds[v]);
        }
        ds_row[i] = (__m512i)_mm512_cvtne2ps_pbh(ds[1], ds[0]);
        _mm512_storeu_si512(ds_rows + (r + i) * row_stride, ds_row[i]);
      }
      _mm512_storeu_si512(ds_depth + r * 32, _mm512_unpacklo_epi16(ds_row[0], ds_row[1]));
      _mm512_storeu_si512(ds_depth + r * 32 + 32, _mm512_unpackhi_epi16(ds_row[0], ds_row[1]));
    }
  }
#endif
};

struct ScoreForm {
  bool capped, masked, checked;
};

template <class Core> void score_gradients(const ScoreGradients<typename Core::Element>& chunk, ScoreForm form) {
  if constexpr (Core::fixed_exponential) {
    if (form.checked) return form.capped ? chunk.template run_fixed<true, true, true>() : chunk.template run_fixed<false, true, true>();
    if (form.masked) return form.capped ? chunk.template run_fixed<true, true, false>() : chunk.template run_fixed<false, true, false>();
    return form.capped ? chunk.template run_fixed<true, false, false>() : chunk.template run_fixed<false, false, false>();
  } else {
    if (form.masked) return form.capped ? chunk.template run<Core, true, true>() : chunk.template run<Core, false, true>();
    return form.capped ? chunk.template run<Core, true, false>() : chunk.template run<Core, false, false>();
  }
}

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
