// include/tpk/scoring.h: how products q.k become exponents. Without a softcap the score stays in units of |scale|, so that the scale
// rides in the exponent's fma: p = 2^(s * multiplier - shift), s = sign * q.k. With one, s = cap * tanh(q.k * cap_scale) is natural.
#pragma once

namespace tpk {

inline constexpr double log2_e = 1.4426950408889634, ln_2 = 0.6931471805599453;

struct Scoring {
  float multiplier = 1; // of s, in base 2; above 0
  float natural = 1;    // of s, in base e
  float sign = 1;       // -1, 0 or 1: the scale's
  float scale = 1, cap = 0, cap_scale = 0;

  static constexpr Scoring of(double scale, double softcap) {
    Scoring scoring;
    scoring.scale = float(scale);
    scoring.multiplier = float(log2_e);
    if (softcap != 0) {
      scoring.cap = float(softcap), scoring.cap_scale = float(scale / softcap);
    } else if (scale == 0) {
      scoring.sign = 0;
    } else {
      const double magnitude = scale < 0 ? -scale : scale;
      scoring.sign = scale < 0 ? -1 : 1, scoring.natural = float(magnitude), scoring.multiplier = float(magnitude * log2_e);
    }
    return scoring;
  }
};

} // namespace tpk
