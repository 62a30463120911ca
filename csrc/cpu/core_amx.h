// cpu/core_amx.h: the bf16 core of AMX: tdpbf16ps on 32 x 32 blocks of C in four tile registers.
// A is stored tile by tile, [32 rows][32 depth] = two tiles of 1 KiB in the order they are used, so that tile loads stream from L2; B is
// [depth / 2][32 lanes][2]. C starts in the tile registers from what it was, so sums run over the whole depth in ascending order wherever
// they are interrupted. Trap: rows are padded to 32 and depth to 32.
#pragma once

#include "amx.h"
#include "core_f32.h"
#include "fixed_exponential.h"
#include "pack_bf16.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

struct CoreAmx : PackBf16 {
  using Element = uint16_t;
  static constexpr int lanes = 32;
  static constexpr int row_unit = 32;
  static constexpr int depth_unit = 32;
  static constexpr int exp_degree = 3;
  static constexpr bool lagging = true;
  static constexpr bool fixed_exponential = true;
  static uint16_t element_limit(double scale, double softcap, int64_t depth) { return fixed_element_limit(scale, softcap, depth); }
  static constexpr int64_t softmax_keys = 64;  // keys of one panel between scores and softmax (forward): both stay in L1
  static constexpr int64_t gradient_keys = 32; // keys of one panel between scores and elementwise work (backward)
  static constexpr bool in_place = false;
  static constexpr int64_t block = 32 * 32;

  struct Layout {
    static constexpr int row_unit = 32;
    static TPK_INLINE uint16_t* at(uint16_t* to, int64_t width, int64_t row, int64_t depth) {
      return to + (row / 32 * (width / 32) + depth / 32) * block + row % 32 * 32 + depth % 32;
    }
  };
  static uint16_t* rows_block(uint16_t* to, int64_t width, int64_t row, int64_t depth) { return Layout::at(to, width, row, depth); }
  static int64_t rows_block_stride(int64_t) { return 32; }

  struct View {
    const uint16_t* data;
    int64_t row_blocks_stride; // elements between blocks of 32 rows

    View rows_from(int64_t row) const { return {data + row / 32 * row_blocks_stride, row_blocks_stride}; }
    View depth_from(int64_t depth) const { return {data + depth / 32 * block, row_blocks_stride}; }
  };
  static View rows_view(const uint16_t* data, int64_t width) { return {data, width * 32}; }
  static View columns_view(const uint16_t* data, int64_t depth) { return {data, depth * 32}; }

  using Session = TileSession;

  // What packus leaves of two vectors of rows, and unpack of two rows of 32.
  static constexpr int64_t probability_order(int64_t place) {
    return place % 32 / 8 * 4 + place % 4 + (place % 8 < 4 ? 0 : 16) + place / 32 * 32;
  }
  static constexpr int64_t gradient_order(int64_t lane) { return lane % 16 / 4 * 8 + lane % 4 + lane / 16 * 4; }

  static uint16_t pack_rows(uint16_t* to, const Rows& from, int64_t first, int64_t count, int64_t padded, int64_t dim) {
    return PackBf16::pack_rows<Layout>(to, from, first, count, padded, dim);
  }
  static bool pack_columns(uint16_t* to, const Rows& from, int64_t first, int64_t count, int64_t padded, int64_t dim) {
    return PackBf16::pack_columns<Layout>(to, from, first, count, padded, dim);
  }

  // 32 of depth: A in tiles 4, 5; B in 6, 7; C in 0-3. b_bytes: from one pair of depth to the next.
  template <bool TwoColumns> static TPK_INLINE void step(const uint16_t* a, const uint16_t* b, int64_t b_bytes) {
    tile_load<4>(a, 64);
    tile_load<6>(b, b_bytes);
    tile_multiply<0, 4, 6>();
    if constexpr (TwoColumns) {
      tile_load<7>(b + 32, b_bytes);
      tile_multiply<1, 4, 7>();
    }
    tile_load<5>(a + 512, 64);
    tile_multiply<2, 5, 6>();
    if constexpr (TwoColumns) tile_multiply<3, 5, 7>();
  }
  template <bool TwoColumns> static TPK_INLINE void load_c(const float* c, int64_t c_stride) {
    tile_load<0>(c, c_stride * 4);
    tile_load<2>(c + 16 * c_stride, c_stride * 4);
    if constexpr (TwoColumns) {
      tile_load<1>(c + 16, c_stride * 4);
      tile_load<3>(c + 16 * c_stride + 16, c_stride * 4);
    }
  }
  template <bool TwoColumns> static TPK_INLINE void store_c(float* c, int64_t c_stride) {
    tile_store<0>(c, c_stride * 4);
    tile_store<2>(c + 16 * c_stride, c_stride * 4);
    if constexpr (TwoColumns) {
      tile_store<1>(c + 16, c_stride * 4);
      tile_store<3>(c + 16 * c_stride + 16, c_stride * 4);
    }
  }
  static TPK_INLINE void zero_c() {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
  }

  template <bool Accumulate, bool TwoColumns>
  static __attribute__((noinline)) void multiply_blocks(float* c, int64_t c_stride, const View& a, const uint16_t* b, int64_t b_stride,
                                                        int64_t rows, int64_t depth) {
    for (int64_t row = 0; row < rows; row += 32, c += 32 * c_stride) {
      if constexpr (Accumulate)
        load_c<TwoColumns>(c, c_stride);
      else
        zero_c();
      const uint16_t* from = a.data + row / 32 * a.row_blocks_stride;
      for (int64_t k = 0; k < depth; k += 32, from += block) step<TwoColumns>(from, b + k * b_stride, b_stride * 4);
      store_c<TwoColumns>(c, c_stride);
    }
  }

  // Depth 64, C from zero: all of B stays in tiles 4-7, A streams through 2 and 3.
  static __attribute__((noinline)) void multiply_short(float* c, int64_t c_stride, const View& a, const uint16_t* b, int64_t b_stride,
                                                       int64_t rows) {
    const int64_t c_bytes = c_stride * 4, b_bytes = b_stride * 4;
    tile_load<4>(b, b_bytes);
    tile_load<5>(b + 32, b_bytes);
    tile_load<6>(b + 32 * b_stride, b_bytes);
    tile_load<7>(b + 32 * b_stride + 32, b_bytes);
    for (int64_t row = 0; row < rows; row += 16, c += 16 * c_stride) {
      const uint16_t* from = a.data + row / 32 * a.row_blocks_stride + row % 32 * 32;
      tile_zero<0>();
      tile_zero<1>();
      tile_load<2>(from, 64);
      tile_multiply<0, 2, 4>();
      tile_multiply<1, 2, 5>();
      tile_load<3>(from + block, 64);
      tile_multiply<0, 3, 6>();
      tile_multiply<1, 3, 7>();
      tile_store<0>(c, c_bytes);
      tile_store<1>(c + 16, c_bytes);
    }
  }

  // The rescale by alpha is a pass of its own.
  template <Update update>
  static void multiply(float* c, int64_t c_stride, const View& a, const uint16_t* b, int64_t b_stride, int64_t rows, int64_t depth,
                       int64_t used = lanes, const float* alpha = nullptr) {
    if constexpr (update == Update::scale_add) rescale(c, rows, alpha);
    constexpr bool accumulate = update != Update::store;
    if (!accumulate && depth == 64 && used > 16 && rows > 32) return multiply_short(c, c_stride, a, b, b_stride, rows);
    if (used > 16)
      multiply_blocks<accumulate, true>(c, c_stride, a, b, b_stride, rows, depth);
    else
      multiply_blocks<accumulate, false>(c, c_stride, a, b, b_stride, rows, depth);
  }

  static void rescale(float* c, int64_t rows, const float* alpha) {
    const Vec low = load(alpha), high = load(alpha + 16);
    for (int64_t r = 0; r < rows; ++r) {
      store(c + r * lanes, load(c + r * lanes) * low);
      store(c + r * lanes + 16, load(c + r * lanes + 16) * high);
    }
  }
};

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
