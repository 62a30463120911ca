// bindings/attention_arguments.h: Python's arguments of an attention call as parameter structs.
// A tensor is (address, batch stride, token stride, head stride), strides in elements; address 0 is none.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "bindings/addresses.h"
#include "tpk/attention_params.h"

namespace tpk::bindings {

using Tensor = std::array<int64_t, 4>;
using Sizes = std::array<int64_t, 7>;     // batch, tokens, keys, query heads, KV heads, head_dim, value head_dim
using MaskSizes = std::array<int64_t, 6>; // start, causal, window left, window right, document starts address, their batch stride

inline TensorView view(const Tensor& t) { return {pointer<void>(t[0]), t[1], t[2], t[3]}; }

// who: the backend, for messages.
inline AttentionShape shape_of(const char* who, int dtype, const Sizes& n) {
  const DType code = dtype_of(who, dtype);
  if (n[3] <= 0 || n[4] <= 0 || n[3] % n[4] != 0)
    throw std::invalid_argument(std::string(who) + ": " + std::to_string(n[3]) + " query heads do not divide over " + std::to_string(n[4]) +
                                " KV heads");
  if (n[0] < 0 || n[1] < 0 || n[2] < 0)
    throw std::invalid_argument(std::string(who) + ": sizes " + std::to_string(n[0]) + ", " + std::to_string(n[1]) + ", " +
                                std::to_string(n[2]) + " must not be negative");
  return {code, n[0], n[1], n[2], n[3], n[4], n[5], n[6]};
}

inline MaskIntervals mask_of(const MaskSizes& m, int64_t keys) {
  return {m[1] != 0, m[2], m[3], pointer<const int32_t>(m[4]), m[5], m[0], keys};
}

} // namespace tpk::bindings
