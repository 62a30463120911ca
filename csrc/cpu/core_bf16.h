// cpu/core_bf16.h: the bf16 core for AVX512-BF16 (vdpbf16ps) and AMX-BF16 (tdpbf16ps): the same packed layouts serve both.
// A is row-major bf16, depth padded to 32. B holds pairs of depth interleaved, [depth / 2][32 lanes][2]: AMX's B tile and vdpbf16ps's
// operand. C is fp32, a panel of 32 lanes. Products are exact, sums fp32. Trap: odd depth is padded with zeros on both sides, never left
// unset.
#pragma once

#include "amx.h"
#include "core_f32.h"
#include "transpose.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

struct CoreBf16 {
  using Element = uint16_t;
  static constexpr int lanes = 32;
  static constexpr int row_unit = 16;
  static constexpr int depth_unit = 32;
  static constexpr int exp_degree = 5;
  static constexpr bool in_place = false;

  struct View {
    const uint16_t* data;
    int64_t stride;

    View rows_from(int64_t row) const { return {data + row * stride, stride}; }
    View depth_from(int64_t depth) const { return {data + depth, stride}; }
  };
  static View rows_view(const uint16_t* data, int64_t stride) { return {data, stride}; }
  static View columns_view(const uint16_t* data, int64_t depth) { return {data, depth}; }

#if TPK_LEVEL >= TPK_LEVEL_AMX_BF16
  using Session = TileSession;

  // 32 x 32 of C: tiles 0-3; A in tiles 4, 5; B in 6, 7.
  template <bool Accumulate, bool TwoRows, bool TwoColumns>
  static TPK_INLINE void tile(float* c, int64_t c_stride, const uint16_t* a, int64_t a_stride, const uint16_t* b, int64_t b_stride,
                              int64_t depth) {
    const int64_t c_bytes = c_stride * 4, a_bytes = a_stride * 2, b_bytes = b_stride * 4;
    if constexpr (Accumulate) {
      tile_load<0>(c, c_bytes);
      if constexpr (TwoColumns) tile_load<1>(c + 16, c_bytes);
      if constexpr (TwoRows) tile_load<2>(c + 16 * c_stride, c_bytes);
      if constexpr (TwoRows && TwoColumns) tile_load<3>(c + 16 * c_stride + 16, c_bytes);
    } else {
      tile_zero<0>();
      if constexpr (TwoColumns) tile_zero<1>();
      if constexpr (TwoRows) tile_zero<2>();
      if constexpr (TwoRows && TwoColumns) tile_zero<3>();
    }
    for (int64_t k = 0; k < depth; k += 32) {
      tile_load<4>(a + k, a_bytes);
      tile_load<6>(b + k * b_stride, b_bytes);
      tile_multiply<0, 4, 6>();
      if constexpr (TwoColumns) {
        tile_load<7>(b + k * b_stride + 32, b_bytes);
        tile_multiply<1, 4, 7>();
      }
      if constexpr (TwoRows) {
        tile_load<5>(a + k + 16 * a_stride, a_bytes);
        tile_multiply<2, 5, 6>();
        if constexpr (TwoColumns) tile_multiply<3, 5, 7>();
      }
    }
    tile_store<0>(c, c_bytes);
    if constexpr (TwoColumns) tile_store<1>(c + 16, c_bytes);
    if constexpr (TwoRows) tile_store<2>(c + 16 * c_stride, c_bytes);
    if constexpr (TwoRows && TwoColumns) tile_store<3>(c + 16 * c_stride + 16, c_bytes);
  }

  template <bool Accumulate, bool TwoColumns>
  static __attribute__((noinline)) void multiply_blocks(float* c, int64_t c_stride, const View& a, const uint16_t* b, int64_t b_stride,
                                                        int64_t rows, int64_t depth) {
    int64_t row = 0;
    for (; row + 32 <= rows; row += 32)
      tile<Accumulate, true, TwoColumns>(c + row * c_stride, c_stride, a.data + row * a.stride, a.stride, b, b_stride, depth);
    if (row < rows)
      tile<Accumulate, false, TwoColumns>(c + row * c_stride, c_stride, a.data + row * a.stride, a.stride, b, b_stride, depth);
  }

  // C starts in the tile registers, so the rescale by alpha is a pass of its own.
  template <Update update>
  static void multiply(float* c, int64_t c_stride, const View& a, const uint16_t* b, int64_t b_stride, int64_t rows, int64_t depth,
                       int64_t used = lanes, const float* alpha = nullptr) {
    if constexpr (update == Update::scale_add) {
      const Vec low = load(alpha), high = load(alpha + 16);
      for (int64_t r = 0; r < rows; ++r) {
        store(c + r * c_stride, load(c + r * c_stride) * low);
        store(c + r * c_stride + 16, load(c + r * c_stride + 16) * high);
      }
    }
    constexpr bool accumulate = update != Update::store;
    if (used > 16)
      multiply_blocks<accumulate, true>(c, c_stride, a, b, b_stride, rows, depth);
    else
      multiply_blocks<accumulate, false>(c, c_stride, a, b, b_stride, rows, depth);
  }
#else
  struct Session {};

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
#endif

  // ---- packing; `count` rows exist, rows up to `padded` become 0 ------------------------------------------------------------------

  // 32 elements from `from` of which `left` exist.
  static TPK_INLINE __m512i load_elements(const void* from, int64_t left) {
    const __mmask32 mask = left >= 32 ? 0xffffffffu : left <= 0 ? 0u : (1u << left) - 1u;
    return _mm512_maskz_loadu_epi16(mask, from);
  }
  // Non-finite elements become 0; `bad` collects where they were.
  static TPK_INLINE __m512i clean(__m512i x, __mmask32& bad) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    const __mmask32 is_bad = _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
    bad |= is_bad;
    return _mm512_maskz_mov_epi16(~is_bad, x);
  }

  static void pack_rows(uint16_t* to, const Rows& from, int64_t first, int64_t count, int64_t padded, int64_t dim) {
    const int64_t width = round_up(dim, depth_unit);
    for (int64_t r = 0; r < count; ++r) {
      const uint16_t* row = reinterpret_cast<const uint16_t*>(from.row(first + r));
      for (int64_t d = 0; d < width; d += 32) _mm512_storeu_si512(to + r * width + d, load_elements(row + d, dim - d));
    }
    std::memset(to + count * width, 0, (padded - count) * width * sizeof(uint16_t));
  }

  // Rows (r, r + 1) of 32 elements -> two vectors of 16 dwords, each a pair (row r, row r + 1) of one element.
  static TPK_INLINE void interleave(__m512i first, __m512i second, __m512i& low, __m512i& high) {
    alignas(64) static constexpr uint16_t low_index[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                           8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i index = _mm512_load_si512(low_index);
    low = _mm512_permutex2var_epi16(first, index, second);
    high = _mm512_permutex2var_epi16(first, _mm512_add_epi16(index, _mm512_set1_epi16(16)), second);
  }

  // The transpose of the rows: to[round_up(dim, 16)][padded]; padded is a multiple of 32.
  static bool pack_columns(uint16_t* to, const Rows& from, int64_t first, int64_t count, int64_t padded, int64_t dim) {
    __mmask32 bad = 0;
    for (int64_t r = 0; r < padded; r += 32)
      for (int64_t d = 0; d < dim; d += 32) {
        __m512i low[16], high[16];
        for (int i = 0; i < 16; ++i) {
          __m512i pair[2];
          for (int j = 0; j < 2; ++j) {
            const int64_t row = r + 2 * i + j;
            pair[j] = row < count ? clean(load_elements(reinterpret_cast<const uint16_t*>(from.row(first + row)) + d, dim - d), bad)
                                  : _mm512_setzero_si512();
          }
          interleave(pair[0], pair[1], low[i], high[i]);
        }
        transpose_16x16(low);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (d + i) * padded + r, low[i]);
        if (d + 16 >= dim) continue;
        transpose_16x16(high);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (d + 16 + i) * padded + r, high[i]);
      }
    return bad != 0;
  }

  // B with rows as lanes, one panel: to[round_up(dim, 32) / 2][32][2], times sign.
  static void pack_lanes(uint16_t* to, const Rows& from, int64_t first, int64_t count, int64_t dim, float sign) {
    const __m512i flip = _mm512_set1_epi16(sign < 0 ? short(0x8000) : short(0)), keep = _mm512_set1_epi16(sign == 0.0f ? 0 : -1);
    for (int64_t d = 0; d < dim; d += 32)
      for (int half = 0; half < 2; ++half) {
        __m512i block[16];
        for (int i = 0; i < 16; ++i) {
          const int64_t row = half * 16 + i;
          block[i] =
              row < count ? load_elements(reinterpret_cast<const uint16_t*>(from.row(first + row)) + d, dim - d) : _mm512_setzero_si512();
          block[i] = _mm512_and_si512(_mm512_xor_si512(block[i], flip), keep);
        }
        transpose_16x16(block);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (d / 2 + i) * 64 + half * 32, block[i]);
      }
  }

  // B with rows as depth: to[round_up(dim, 32) / 32][padded / 2][32][2].
  static bool pack_depth(uint16_t* to, const Rows& from, int64_t first, int64_t count, int64_t padded, int64_t dim) {
    __mmask32 bad = 0;
    for (int64_t d = 0; d < dim; d += 32)
      for (int64_t r = 0; r < padded; r += 2) {
        __m512i pair[2], low, high;
        for (int j = 0; j < 2; ++j)
          pair[j] = r + j < count ? clean(load_elements(reinterpret_cast<const uint16_t*>(from.row(first + r + j)) + d, dim - d), bad)
                                  : _mm512_setzero_si512();
        interleave(pair[0], pair[1], low, high);
        uint16_t* at = to + (d * padded + r * 32);
        _mm512_storeu_si512(at, low);
        _mm512_storeu_si512(at + 32, high);
      }
    return bad != 0;
  }

  // ---- what the softmax writes ------------------------------------------------------------------------------------------------------

  static TPK_INLINE void emit_depth_pair(uint16_t* to, int64_t row, int v, Vec first, Vec second) {
    alignas(64) static constexpr uint16_t index[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    _mm512_storeu_si512(to + row * 32 + v * 32, _mm512_permutexvar_epi16(_mm512_load_si512(index), both));
  }
  static TPK_INLINE void emit_rows_pair(uint16_t* to, int64_t stride, const Vec (&first)[2], const Vec (&second)[2]) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(first[1], first[0]));
    _mm512_storeu_si512(to + stride, (__m512i)_mm512_cvtne2ps_pbh(second[1], second[0]));
  }
};

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
