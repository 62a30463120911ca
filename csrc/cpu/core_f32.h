// cpu/core_f32.h: the fp32 core: packed operand layouts and the micro-kernel C[rows x lanes] (+)= A[rows x depth] B[depth x lanes].
// Lanes are query rows (or head-dim elements of dk, dv): a panel is `lanes` = two vectors wide. A is broadcast, B is loaded, C stays in
// registers for the whole depth and always starts from zero: adding a finished block to the running sum keeps fp32 error small.
// Trap: each element is one FMA chain in ascending depth whatever the shape of the register tile; slice invariance rests on it.
#pragma once

#include "exponential.h"
#include "rows.h"
#include "tpk/tiling.h"

namespace tpk::cpu::TPK_NAMESPACE {
namespace {

enum class Update { store, add, scale_add }; // C = X; C += X; C = C * alpha[lane] + X

struct CoreF32 {
  using Element = float;
  static constexpr int lanes = 2 * vec_lanes;
  static constexpr int row_unit = 8;   // rows of A come in blocks of 8
  static constexpr int depth_unit = 1; // depth needs no padding
  static constexpr int exp_degree = 6;
  static constexpr bool lagging = false;
  static constexpr bool fixed_exponential = false;
  static uint16_t element_limit(double, double, int64_t) { return 0xffff; } // none: the exponential takes every score
  static constexpr int64_t softmax_keys = 256;                              // keys of one panel between scores and softmax (forward)
  static constexpr int64_t gradient_keys = 32; // keys of one panel between scores and elementwise work (backward)
  static constexpr bool in_place = true;       // probabilities overwrite the scores; dS serves as A and as B

  // Rows form: row-major, depth contiguous. Columns form: blocks of 8 rows, [depth][8]: a transpose that costs a plain copy.
  struct View {
    const float* data;
    int64_t block_stride, row_stride;
    bool columns;

    View rows_from(int64_t row) const { return {data + row / row_unit * block_stride, block_stride, row_stride, columns}; }
    View depth_from(int64_t depth) const { return {data + depth * (columns ? row_unit : 1), block_stride, row_stride, columns}; }
  };
  static View rows_view(const float* data, int64_t stride) { return {data, row_unit * stride, stride, false}; }
  static View columns_view(const float* data, int64_t depth) { return {data, row_unit * depth, 1, true}; }

  // Where the block of A (rows form) that starts at (row, depth) lies and how far apart its rows are.
  static float* rows_block(float* to, int64_t width, int64_t row, int64_t depth) { return to + row * width + depth; }
  static int64_t rows_block_stride(int64_t width) { return width; }

  struct Session {}; // nothing to set up a task for

  template <int Rows, int Vectors, bool Columns, Update update>
  static TPK_INLINE void tile(float* c, int64_t c_stride, const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                              const float* alpha) {
    Vec acc[Rows][Vectors];
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) acc[r][v] = splat(0.0f);
    const float* row[Rows];
    for (int r = 0; r < Rows; ++r) row[r] = a + r * a_stride;
    int64_t k = 0;
#if TPK_LEVEL == TPK_LEVEL_BASELINE
    // Without FMA every product is rounded too; summing four of them first keeps the error near that of the other levels.
    for (; k + 4 <= depth; k += 4, b += 4 * b_stride)
      for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) {
          Vec product[4];
          for (int i = 0; i < 4; ++i)
            product[i] = splat(Columns ? a[(k + i) * row_unit + r] : row[r][k + i]) * load(b + i * b_stride + v * vec_lanes);
          acc[r][v] = acc[r][v] + ((product[0] + product[1]) + (product[2] + product[3]));
        }
#endif
    for (; k < depth; ++k, b += b_stride) {
      Vec bv[Vectors];
      for (int v = 0; v < Vectors; ++v) {
        bv[v] = load(b + v * vec_lanes);
        pin(bv[v]);
      }
      for (int r = 0; r < Rows; ++r) {
        const Vec av = splat(Columns ? a[k * row_unit + r] : row[r][k]);
        for (int v = 0; v < Vectors; ++v) acc[r][v] = fma(av, bv[v], acc[r][v]);
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) {
        float* to = c + r * c_stride + v * vec_lanes;
        if constexpr (update == Update::store) store(to, acc[r][v]);
        if constexpr (update == Update::add) store(to, load(to) + acc[r][v]);
        if constexpr (update == Update::scale_add) store(to, fma(load(to), load(alpha + v * vec_lanes), acc[r][v]));
      }
  }

  template <Update update, bool Columns, int Vectors>
  static __attribute__((noinline)) void multiply_blocks(float* c, int64_t c_stride, const View& a, const float* b, int64_t b_stride,
                                                        int64_t rows, int64_t depth, const float* alpha) {
    constexpr int step = TPK_LEVEL >= TPK_LEVEL_AVX512 ? 8 : 4;
    for (int64_t block = 0; block * row_unit < rows; ++block)
      for (int part = 0; part < row_unit; part += step)
        tile<step, Vectors, Columns, update>(c + (block * row_unit + part) * c_stride, c_stride,
                                             a.data + block * a.block_stride + part * (Columns ? 1 : a.row_stride), a.row_stride, b,
                                             b_stride, depth, alpha);
  }

  // One panel of C; `used` lanes of it matter (a panel of at most one vector skips the second).
  template <Update update>
  static void multiply(float* c, int64_t c_stride, const View& a, const float* b, int64_t b_stride, int64_t rows, int64_t depth,
                       int64_t used = lanes, const float* alpha = nullptr) {
    if (a.columns) {
      if (used > vec_lanes) return multiply_blocks<update, true, 2>(c, c_stride, a, b, b_stride, rows, depth, alpha);
      return multiply_blocks<update, true, 1>(c, c_stride, a, b, b_stride, rows, depth, alpha);
    }
    if (used > vec_lanes) return multiply_blocks<update, false, 2>(c, c_stride, a, b, b_stride, rows, depth, alpha);
    return multiply_blocks<update, false, 1>(c, c_stride, a, b, b_stride, rows, depth, alpha);
  }

  // ---- packing; `count` rows exist, rows up to `padded` become 0 ------------------------------------------------------------------

  // A, rows form: to[padded][round_up(dim, depth_unit)]. Returns the largest magnitude where exponentials ask for it; here they do not.
  static uint16_t pack_rows(float* to, const Rows& from, int64_t first, int64_t count, int64_t padded, int64_t dim) {
    for (int64_t r = 0; r < count; ++r) load_row(to + r * dim, from.row(first + r), dim, from.dtype);
    std::memset(to + count * dim, 0, (padded - count) * dim * sizeof(float));
    return 0;
  }
  // A, columns form: the transpose of the rows, to[round_up(dim, 8) / 8][padded][8]. Non-finite elements become 0; true if any.
  static bool pack_columns(float* to, const Rows& from, int64_t first, int64_t count, int64_t padded, int64_t dim) {
    float row[round_up(256, row_unit)] = {};
    bool bad = false;
    const int64_t blocks = round_up(dim, row_unit) / row_unit;
    for (int64_t r = 0; r < padded; ++r) {
      if (r < count) {
        load_row(row, from.row(first + r), dim, from.dtype);
        bad |= clean_row(row, dim);
      } else if (r == count) {
        std::memset(row, 0, sizeof row);
      }
      for (int64_t b = 0; b < blocks; ++b) std::memcpy(to + (b * padded + r) * row_unit, row + b * row_unit, row_unit * sizeof(float));
    }
    return bad;
  }
  // B with rows as lanes, one panel: to[dim][lanes], times sign (-1, 0 or 1). Returns what pack_rows does.
  static uint16_t pack_lanes(float* to, const Rows& from, int64_t first, int64_t count, int64_t dim, float sign) {
    float row[256];
    for (int64_t r = 0; r < lanes; ++r) {
      if (r < count)
        load_row(row, from.row(first + r), dim, from.dtype);
      else if (r == count)
        std::memset(row, 0, sizeof row);
      for (int64_t d = 0; d < dim; ++d) to[d * lanes + r] = sign == 0.0f ? 0.0f : sign * row[d];
    }
    return 0;
  }
  // B with rows as depth: to[round_up(dim, lanes) / lanes][padded][lanes]. Non-finite elements become 0; true if any.
  template <Order = in_order>
  static bool pack_depth(float* to, const Rows& from, int64_t first, int64_t count, int64_t padded, int64_t dim) {
    float row[round_up(256, lanes)] = {};
    bool bad = false;
    const int64_t panels = round_up(dim, lanes) / lanes;
    for (int64_t r = 0; r < padded; ++r) {
      if (r < count) {
        load_row(row, from.row(first + r), dim, from.dtype);
        bad |= clean_row(row, dim);
      } else if (r == count) {
        std::memset(row, 0, sizeof row);
      }
      for (int64_t p = 0; p < panels; ++p) std::memcpy(to + (p * padded + r) * lanes, row + p * lanes, lanes * sizeof(float));
    }
    return bad;
  }

  // Where score_gradients puts things: the query row at a place of P's depth, and in a lane of dS as B.
  static constexpr Order probability_order = in_order, gradient_order = in_order;

  // ---- what the softmax writes ------------------------------------------------------------------------------------------------------

  // Probabilities of key rows (row, row + 1), lanes of vector v, as B of P V (depth = keys), one panel [keys][lanes].
  static TPK_INLINE void emit_depth_pair(float* to, int64_t row, int v, Vec first, Vec second) {
    store(to + row * lanes + v * vec_lanes, first);
    store(to + (row + 1) * lanes + v * vec_lanes, second);
  }
  // Two key rows, both vectors, as A (rows form with the given stride).
  static TPK_INLINE void emit_rows_pair(float* to, int64_t stride, const Vec (&first)[2], const Vec (&second)[2]) {
    for (int v = 0; v < 2; ++v) {
      store(to + v * vec_lanes, first[v]);
      store(to + stride + v * vec_lanes, second[v]);
    }
  }
};

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
