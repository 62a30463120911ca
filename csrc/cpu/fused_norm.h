// cpu/fused_norm.h: RMSNorm and LayerNorm of rows, with the residual's addition in front (forward) or behind (backward), or that alone.
// Trap: four chains of partial sums, chosen by the column alone; a row's statistics never depend on its neighbours.
#pragma once

#include "fused.h"
#include "fused_elements.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

// Sum of term(column, lanes) over a row's columns, where term returns a vector that is zero beyond its lanes.
template <class Term> TPK_INLINE float sum_columns(int64_t dim, Term&& term) {
  Vec chain[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  int64_t c = 0;
  for (; c + 4 * vec_lanes <= dim; c += 4 * vec_lanes)
    for (int i = 0; i < 4; ++i) chain[i] = chain[i] + term(c + i * vec_lanes, vec_lanes);
  for (int i = 0; c < dim; c += vec_lanes, ++i) chain[i] = chain[i] + term(c, dim - c);
  return sum_lanes((chain[0] + chain[1]) + (chain[2] + chain[3]));
}

// The first `lanes` lanes of v, zero in the rest.
TPK_INLINE Vec keep_lanes(Vec v, int64_t lanes) {
  if (lanes >= vec_lanes) return v;
  float wide[vec_lanes];
  store(wide, v);
  for (int64_t i = lanes; i < vec_lanes; ++i) wide[i] = 0.0f;
  return load(wide);
}

template <class Element> struct Sum {
  static void rows(const Add& p, int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) {
      const Element *x = p.x.row<const Element>(r), *residual = p.residual.row<const Element>(r);
      Element* out = p.out.row<Element>(r);
      each_column(p.dim, [&](int64_t c, int64_t n) { store_some(out + c, load_some(x + c, n) + load_some(residual + c, n), n); });
    }
  }
};

template <class Element> struct Conversion {
  static void narrow(const Convert& p, int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) {
      const float* from = p.wide.row<const float>(r);
      Element* to = p.narrow.row<Element>(r);
      each_column(p.dim, [&](int64_t c, int64_t n) { store_some(to + c, load_some(from + c, n), n); });
    }
  }
  static void widen(const Convert& p, int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) {
      const Element* from = p.narrow.row<const Element>(r);
      float* to = p.wide.row<float>(r);
      each_column(p.dim, [&](int64_t c, int64_t n) { store_some(to + c, load_some(from + c, n), n); });
    }
  }
};

template <class Element> struct Norm {
  static void forward(const NormForward& p, int64_t first, int64_t end) {
    const Element *weight = static_cast<const Element*>(p.weight), *bias = static_cast<const Element*>(p.bias);
    const float per_column = 1.0f / float(p.dim);
    for (int64_t r = first; r < end; ++r) {
      const Element* x = p.x.row<const Element>(r);
      if (p.delta.data != nullptr) {
        const Element* delta = p.delta.row<const Element>(r);
        Element* total = p.total.row<Element>(r);
        each_column(p.dim, [&](int64_t c, int64_t n) { store_some(total + c, load_some(x + c, n) + load_some(delta + c, n), n); });
        x = total;
      }
      float mean = 0.0f, squares;
      if (p.rms) {
        squares = sum_columns(p.dim, [&](int64_t c, int64_t n) {
          const Vec v = load_some(x + c, n);
          return v * v;
        });
      } else {
        mean = sum_columns(p.dim, [&](int64_t c, int64_t n) { return load_some(x + c, n); }) * per_column;
        squares = sum_columns(p.dim, [&](int64_t c, int64_t n) {
          const Vec v = keep_lanes(load_some(x + c, n) - splat(mean), n);
          return v * v;
        });
        p.mean[r] = mean;
      }
      const float rstd = 1.0f / __builtin_sqrtf(squares * per_column + p.eps);
      p.rstd[r] = rstd;
      Element* out = p.out.row<Element>(r);
      const Vec centre = splat(mean), factor = splat(rstd);
      if (p.rms)
        each_column(p.dim, [&](int64_t c, int64_t n) { store_some(out + c, load_some(x + c, n) * factor * load_some(weight + c, n), n); });
      else
        each_column(p.dim, [&](int64_t c, int64_t n) {
          const Vec scaled = (load_some(x + c, n) - centre) * factor;
          const Vec shift = bias == nullptr ? splat(0.0f) : load_some(bias + c, n);
          store_some(out + c, fma(scaled, load_some(weight + c, n), shift), n);
        });
    }
  }

  // With xhat the normed row and g = dout * weight: dx = rstd * (g - mean(g) - xhat * mean(g * xhat)); RMSNorm has no mean(g).
  static void backward(const NormBackward& p, int64_t first, int64_t end, float* sums) {
    const Element* weight = static_cast<const Element*>(p.weight);
    const float per_column = 1.0f / float(p.dim);
    float *dweight = sums, *dbias = sums == nullptr ? nullptr : sums + p.dim;
    if (sums != nullptr) std::memset(sums, 0, 2 * p.dim * sizeof(float));
    for (int64_t r = first; r < end; ++r) {
      const Element *x = p.x.row<const Element>(r), *dout = p.dout.row<const Element>(r);
      const Vec centre = splat(p.rms ? 0.0f : p.mean[r]), factor = splat(p.rstd[r]);
      float along_mean = 0.0f;
      if (!p.rms) along_mean = sum_columns(p.dim, [&](int64_t c, int64_t n) { return load_some(dout + c, n) * load_some(weight + c, n); });
      const float along_row = sum_columns(p.dim, [&](int64_t c, int64_t n) {
        return load_some(dout + c, n) * load_some(weight + c, n) * ((load_some(x + c, n) - centre) * factor);
      });
      const Vec mean_gradient = splat(along_mean * per_column), row_gradient = splat(along_row * per_column);
      const Element* dresidual = p.dresidual.data == nullptr ? nullptr : p.dresidual.row<const Element>(r);
      Element* dx = p.dx.row<Element>(r);
      each_column(p.dim, [&](int64_t c, int64_t n) {
        const Vec upstream = load_some(dout + c, n), normed = (load_some(x + c, n) - centre) * factor;
        const Vec inner = upstream * load_some(weight + c, n) - mean_gradient - normed * row_gradient;
        const Vec beside = dresidual == nullptr ? splat(0.0f) : load_some(dresidual + c, n);
        if (dweight != nullptr) {
          store_some(dweight + c, fma(upstream, normed, load_some(dweight + c, n)), n);
          if (!p.rms) store_some(dbias + c, upstream + load_some(dbias + c, n), n);
        }
        store_some(dx + c, fma(inner, factor, beside), n);
      });
    }
  }
};

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
