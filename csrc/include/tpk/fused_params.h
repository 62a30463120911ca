// include/tpk/fused_params.h: plain parameters of the fused row-wise ops. A tensor is `rows` rows of contiguous elements in the storage
// type, rows `stride` elements apart; statistics and gradients of weights are fp32.
#pragma once

#include <cstdint>

#include "tpk/attention_params.h"

namespace tpk {

struct RowsView { // null data: no such tensor
  void* data = nullptr;
  int64_t stride = 0;

  template <class Element> constexpr Element* row(int64_t index) const { return static_cast<Element*>(data) + index * stride; }
};

// out = norm(x + delta) * weight + bias; total = x + delta, rounded to the storage type before it is normed.
struct NormForward {
  int64_t rows = 0, dim = 0;
  bool rms = true;
  float eps = 0.0f;
  RowsView x, delta, total, out; // delta and total may be null
  const void *weight = nullptr, *bias = nullptr;
  float *mean = nullptr, *rstd = nullptr; // [rows]; mean is null for RMSNorm
};

// dx = gradient of the norm's input + dresidual; dweight and dbias [dim] are fp32 and added to.
struct NormBackward {
  int64_t rows = 0, dim = 0;
  bool rms = true;
  RowsView dout, x, dresidual, dx; // dresidual may be null
  const void* weight = nullptr;
  const float *mean = nullptr, *rstd = nullptr;
  float *dweight = nullptr, *dbias = nullptr; // may be null
};

} // namespace tpk
