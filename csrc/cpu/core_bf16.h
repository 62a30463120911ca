// cpu/core_bf16.h: the bf16 core of AVX512-BF16: vdpbf16ps on 8 rows x 32 lanes. Products are exact, sums fp32 in registers from zero.
// A is row-major, depth padded to 32; B and the rest of the layouts are those of pack_bf16.h.
#pragma once

#include "core_f32.h"
#include "pack_bf16.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

struct CoreBf16 : PackBf16 {
  using Element = uint16_t;
  static constexpr int lanes = 32;
  static constexpr int row_unit = 16;
  static constexpr int depth_unit = 32;
  static constexpr int exp_degree = 3;
  static constexpr bool lagging = true;
  static constexpr bool fixed_exponential = false;
  static uint16_t element_limit(double, double, int64_t) { return 0xffff; } // none: the exponential takes every score
  static constexpr int64_t softmax_keys = 256;                              // keys of one panel between scores and softmax (forward)
  static constexpr int64_t gradient_keys = 32; // keys of one panel between scores and elementwise work (backward)
  static constexpr bool in_place = false;

  struct Layout {
    static constexpr int row_unit = 16;
    static TPK_INLINE uint16_t* at(uint16_t* to, int64_t width, int64_t row, int64_t depth) { return to + row * width + depth; }
  };
  // Where the block of A that starts at (row, depth) lies and how far apart its rows are.
  static uint16_t* rows_block(uint16_t* to, int64_t width, int64_t row, int64_t depth) { return Layout::at(to, width, row, depth); }
  static int64_t rows_block_stride(int64_t width) { return width; }

  struct View {
    const uint16_t* data;
    int64_t stride;

    View rows_from(int64_t row) const { return {data + row * stride, stride}; }
    View depth_from(int64_t depth) const { return {data + depth, stride}; }
  };
  static View rows_view(const uint16_t* data, int64_t stride) { return {data, stride}; }
  static View columns_view(const uint16_t* data, int64_t depth) { return {data, depth}; }

  struct Session {};

  static constexpr Order probability_order = in_order, gradient_order = in_order;

  static uint16_t pack_rows(uint16_t* to, const Rows& from, int64_t first, int64_t count, int64_t padded, int64_t dim) {
    return PackBf16::pack_rows<Layout>(to, from, first, count, padded, dim);
  }
  static bool pack_columns(uint16_t* to, const Rows& from, int64_t first, int64_t count, int64_t padded, int64_t dim) {
    return PackBf16::pack_columns<Layout>(to, from, first, count, padded, dim);
  }

  template <int Rows, int Vectors, Update update>
  static TPK_INLINE void tile(float* c, int64_t c_stride, const uint16_t* a, int64_t a_stride, const uint16_t* b, int64_t b_stride,
                              int64_t depth, const float* alpha) {
    Vec acc[Rows][Vectors];
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) acc[r][v] = splat(0.0f);
    const uint16_t* row[Rows];
    for (int r = 0; r < Rows; ++r) row[r] = a + r * a_stride;
    for (int64_t k = 0; k < depth; k += 2) {
      __m512i bv[Vectors];
      for (int v = 0; v < Vectors; ++v) {
        bv[v] = _mm512_loadu_si512(b + v * 32);
        asm("" : "+v"(bv[v]));
      }
      for (int r = 0; r < Rows; ++r) {
        int32_t pair;
        std::memcpy(&pair, row[r] + k, 4);
        const __m512bh av = (__m512bh)_mm512_set1_epi32(pair);
        for (int v = 0; v < Vectors; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], av, (__m512bh)bv[v]);
      }
      b += 2 * b_stride;
    }
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) {
        float* to = c + r * c_stride + v * 16;
        if constexpr (update == Update::store) store(to, acc[r][v]);
        if constexpr (update == Update::add) store(to, load(to) + acc[r][v]);
        if constexpr (update == Update::scale_add) store(to, fma(load(to), load(alpha + v * 16), acc[r][v]));
      }
  }

  template <Update update, int Vectors>
  static __attribute__((noinline)) void multiply_blocks(float* c, int64_t c_stride, const View& a, const uint16_t* b, int64_t b_stride,
                                                        int64_t rows, int64_t depth, const float* alpha) {
    for (int64_t row = 0; row < rows; row += 8)
      tile<8, Vectors, update>(c + row * c_stride, c_stride, a.data + row * a.stride, a.stride, b, b_stride, depth, alpha);
  }

  template <Update update>
  static void multiply(float* c, int64_t c_stride, const View& a, const uint16_t* b, int64_t b_stride, int64_t rows, int64_t depth,
                       int64_t used = lanes, const float* alpha = nullptr) {
    if (used > 16)
      multiply_blocks<update, 2>(c, c_stride, a, b, b_stride, rows, depth, alpha);
    else
      multiply_blocks<update, 1>(c, c_stride, a, b, b_stride, rows, depth, alpha);
  }
};

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
