// cpu/pack_bf16.h: packing of bf16 rows into the operands of the two bf16 cores, and the conversion of fp32 scores into operands.
// A is rows of bf16 in a layout of the core's own; B holds pairs of depth interleaved, [depth / 2][32 lanes][2], which is AMX's B tile and
// vdpbf16ps's operand. Trap: odd depth is padded with zeros on both sides, never left unset.
#pragma once

#include "rows.h"
#include "tpk/tiling.h"
#include "transpose.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

struct PackBf16 {
  // `count` rows exist, rows up to `padded` become 0. pack_rows and pack_lanes return the largest magnitude, as bits of bfloat16.

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

  static TPK_INLINE __m512i larger(__m512i largest, __m512i x) { return _mm512_max_epu16(largest, _mm512_add_epi16(x, x)); } // no sign
  static TPK_INLINE uint16_t largest_of(__m512i doubled) {
    uint16_t each[32], largest = 0;
    _mm512_storeu_si512(each, doubled);
    for (const uint16_t x : each) largest = x > largest ? x : largest;
    return uint16_t(largest >> 1);
  }

  template <class Layout>
  static uint16_t pack_rows(uint16_t* to, const Rows& from, int64_t first, int64_t count, int64_t padded, int64_t dim) {
    const int64_t width = round_up(dim, 32);
    __m512i largest = _mm512_setzero_si512();
    if (dim == width && count == padded && padded % 32 == 0) {
      for (int64_t r = 0; r < padded; r += 32)
        for (int64_t d = 0; d < width; d += 32) {
          uint16_t* block = Layout::at(to, width, r, d);
          const int64_t stride = Layout::at(block, width, 1, 0) - block;
          for (int64_t i = 0; i < 32; ++i) {
            const __m512i x = _mm512_loadu_si512(from.row(first + r + i) + d * 2);
            largest = larger(largest, x);
            _mm512_storeu_si512(block + i * stride, x);
          }
        }
      return largest_of(largest);
    }
    for (int64_t r = 0; r < padded; ++r) {
      const uint16_t* row = r < count ? reinterpret_cast<const uint16_t*>(from.row(first + r)) : nullptr;
      for (int64_t d = 0; d < width; d += 32) {
        const __m512i x = row == nullptr ? _mm512_setzero_si512() : load_elements(row + d, dim - d);
        largest = larger(largest, x);
        _mm512_storeu_si512(Layout::at(to, width, r, d), x);
      }
    }
    return largest_of(largest);
  }

  // Rows (r, r + 1) of 32 elements -> two vectors of 16 dwords, each a pair (row r, row r + 1) of one element.
  static TPK_INLINE void interleave(__m512i first, __m512i second, __m512i& low, __m512i& high) {
    alignas(64) static constexpr uint16_t low_index[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                           8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i index = _mm512_load_si512(low_index);
    low = _mm512_permutex2var_epi16(first, index, second);
    high = _mm512_permutex2var_epi16(first, _mm512_add_epi16(index, _mm512_set1_epi16(16)), second);
  }

  // A from the transpose of the rows: its rows are the elements (up to round_up(dim, Layout::row_unit)), its depth is `padded`, a multiple
  // of 32. Non-finite elements become 0; true if there were any.
  template <class Layout>
  static bool pack_columns(uint16_t* to, const Rows& from, int64_t first, int64_t count, int64_t padded, int64_t dim) {
    __mmask32 bad = 0;
    for (int64_t r = 0; r < padded; r += 32)
      for (int64_t d = 0; d < dim; d += 32) {
        if (r + 32 <= count && d + 32 <= dim && pack_finite_columns<Layout>(to, from, first, r, padded, d)) continue;
        __m512i low[16], high[16];
        for (int i = 0; i < 16; ++i) {
          __m512i pair[2];
          for (int j = 0; j < 2; ++j) {
            const int64_t row = r + 2 * i + j;
            pair[j] = row < count ? clean(load_elements(reinterpret_cast<const uint16_t*>(from.row(first + row)) + d, dim - d), bad)
                                  : _mm512_setzero_si512();
          }
          low[i] = _mm512_unpacklo_epi16(pair[0], pair[1]);
          high[i] = _mm512_unpackhi_epi16(pair[0], pair[1]);
        }
        store_columns<Layout>(to, padded, r, d, low, high, round_up(dim, Layout::row_unit) - d);
      }
    return bad != 0;
  }

  // A whole block of 32 x 32, which most are; false if it holds something that is not finite.
  template <class Layout>
  static TPK_INLINE bool pack_finite_columns(uint16_t* to, const Rows& from, int64_t first, int64_t r, int64_t padded, int64_t d) {
    __m512i low[16], high[16], largest = _mm512_setzero_si512();
    for (int i = 0; i < 16; ++i) {
      const __m512i a = _mm512_loadu_si512(from.row(first + r + 2 * i) + d * 2),
                    b = _mm512_loadu_si512(from.row(first + r + 2 * i + 1) + d * 2);
      largest = _mm512_max_epu16(largest, _mm512_max_epu16(_mm512_add_epi16(a, a), _mm512_add_epi16(b, b))); // twice: without the sign
      low[i] = _mm512_unpacklo_epi16(a, b);
      high[i] = _mm512_unpackhi_epi16(a, b);
    }
    if (_mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(short(0xff00))) != 0) return false;
    store_columns<Layout>(to, padded, r, d, low, high, 32);
    return true;
  }

  // Dword i of `low` is element (i / 4) * 8 + i % 4 of 32 rows' pairs, dword i of `high` the fourth after it.
  template <class Layout>
  static TPK_INLINE void store_columns(uint16_t* to, int64_t padded, int64_t r, int64_t d, __m512i (&low)[16], __m512i (&high)[16],
                                       int64_t rows_left) {
    transpose_16x16(low);
    transpose_16x16(high);
    for (int i = 0; i < 16; ++i) {
      const int element = i / 4 * 8 + i % 4;
      if (element >= rows_left) break;
      _mm512_storeu_si512(Layout::at(to, padded, d + element, r), low[i]);
      _mm512_storeu_si512(Layout::at(to, padded, d + element + 4, r), high[i]);
    }
  }

  // B with rows as lanes, one panel: to[round_up(dim, 32) / 2][32][2], times sign.
  static uint16_t pack_lanes(uint16_t* to, const Rows& from, int64_t first, int64_t count, int64_t dim, float sign) {
    __m512i largest = _mm512_setzero_si512();
    const __m512i flip = _mm512_set1_epi16(sign < 0 ? short(0x8000) : short(0)), keep = _mm512_set1_epi16(sign == 0.0f ? 0 : -1);
    for (int64_t d = 0; d < dim; d += 32)
      for (int half = 0; half < 2; ++half) {
        __m512i block[16];
        for (int i = 0; i < 16; ++i) {
          const int64_t row = half * 16 + i;
          block[i] =
              row < count ? load_elements(reinterpret_cast<const uint16_t*>(from.row(first + row)) + d, dim - d) : _mm512_setzero_si512();
          block[i] = _mm512_and_si512(_mm512_xor_si512(block[i], flip), keep);
          largest = larger(largest, block[i]);
        }
        transpose_16x16(block);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (d / 2 + i) * 64 + half * 32, block[i]);
      }
    return largest_of(largest);
  }

  // B with rows as depth: to[round_up(dim, 32) / 32][padded / 2][32][2].
  template <Order order = in_order>
  static bool pack_depth(uint16_t* to, const Rows& from, int64_t first, int64_t count, int64_t padded, int64_t dim) {
    __mmask32 bad = 0;
    for (int64_t d = 0; d < dim; d += 32)
      for (int64_t r = 0; r < padded; r += 2) {
        __m512i pair[2], low, high;
        for (int j = 0; j < 2; ++j) {
          const int64_t row = order(r + j);
          pair[j] = row < count ? clean(load_elements(reinterpret_cast<const uint16_t*>(from.row(first + row)) + d, dim - d), bad)
                                : _mm512_setzero_si512();
        }
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
  static TPK_INLINE void store_depth_pair(uint16_t* to, int64_t row, int v, __m512i pairs) {
    _mm512_storeu_si512(to + row * 32 + v * 32, pairs);
  }
  static TPK_INLINE void emit_rows_pair(uint16_t* to, int64_t stride, const Vec (&first)[2], const Vec (&second)[2]) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(first[1], first[0]));
    _mm512_storeu_si512(to + stride, (__m512i)_mm512_cvtne2ps_pbh(second[1], second[0]));
  }
};

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
