// cuda/row_chunk.cuh: 16 bytes of a row as fp32 values, rounded to nearest on the way back.
#pragma once

#include "cuda/swizzle.cuh"

namespace tpk {

template <class Element> struct RowChunk {
  static constexpr int width = 16 / sizeof(Element);
  float value[width];

  TPK_DEVICE void take(uint4 bits) {
    if constexpr (width == 4) {
      const float4 four = floats_of(bits);
      value[0] = four.x, value[1] = four.y, value[2] = four.z, value[3] = four.w;
    } else {
      const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = ptx::unpack2<Element>(pairs[i]);
        value[2 * i] = pair.x, value[2 * i + 1] = pair.y;
      }
    }
  }
  TPK_DEVICE uint4 bits() const {
    if constexpr (width == 4)
      return bits_of(make_float4(value[0], value[1], value[2], value[3]));
    else
      return make_uint4(ptx::pack2<Element>(value[0], value[1]), ptx::pack2<Element>(value[2], value[3]),
                        ptx::pack2<Element>(value[4], value[5]), ptx::pack2<Element>(value[6], value[7]));
  }
  TPK_DEVICE void load(const Element* row, int64_t chunk) { take(ptx::load_global_16(row + chunk * width)); }
  TPK_DEVICE void store(Element* row, int64_t chunk) const { ptx::store_global_16(row + chunk * width, bits()); }
  // To the storage type and back.
  TPK_DEVICE void round() { take(bits()); }
  TPK_DEVICE void add(const RowChunk& other) {
#pragma unroll
    for (int i = 0; i < width; ++i) value[i] += other.value[i];
  }
};

} // namespace tpk
