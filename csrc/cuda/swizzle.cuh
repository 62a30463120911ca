// cuda/swizzle.cuh: tiles of 16-bit elements in shared memory and the fragments that ldmatrix takes from them.
// A tile is rows of `row_bytes` (64, 128 or 256); its 16-byte chunks are exchanged within a row by the row's number, so that eight
// neighbouring rows of one chunk lie in eight different groups of banks: ldmatrix, cp.async and the 32-bit stores of an accumulator all
// run without a conflict. Trap: a tile starts at a multiple of 256 bytes, and the offsets given to Lane::at keep that (rows in eights,
// chunks in twos), since it changes an address by exclusive or.
#pragma once

#include "cuda/device.cuh"

namespace tpk {

template <int row_bytes> struct SwizzledTile {
  static_assert(row_bytes == 64 || row_bytes == 128 || row_bytes == 256);
  static constexpr int row_chunks = row_bytes / 16;

  static constexpr uint32_t exchange(int row) { return row_bytes == 64 ? (row >> 1) & 3 : row & 7; }
  // Byte of a chunk.
  static constexpr uint32_t at(int row, int chunk) { return row * row_bytes + ((chunk ^ exchange(row)) << 4); }

  // One lane's address into a tile.
  struct Lane {
    uint32_t base;
    // `row` further rows, a multiple of 8; `chunk` further chunks, even.
    TPK_DEVICE uint32_t at(int row, int chunk) const { return (base ^ (chunk << 4)) + row * row_bytes; }
  };
  // 16 rows x 2 chunks, rows first. Plain: A of rows m and depth k from [m][k]. Transposed: two B of depth k and columns n from [k][n].
  static TPK_DEVICE Lane rows_first(uint32_t tile, int lane) { return {tile + at(lane & 15, lane >> 4)}; }
  // 16 rows x 2 chunks, chunks first. Plain: two B of columns n and depth k from [n][k]. Transposed: A of rows m and depth k from [k][m].
  static TPK_DEVICE Lane chunks_first(uint32_t tile, int lane) { return {tile + at((lane & 7) + (lane >> 4 << 3), lane >> 3 & 1)}; }
};

TPK_DEVICE uint4 bits_of(float4 x) {
  return make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w));
}
TPK_DEVICE float4 floats_of(uint4 x) {
  return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
}

// Two neighbouring n8 accumulators as the A fragment of the next product, rounded to 16 bits.
template <class Element> TPK_DEVICE void accumulators_to_a(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = ptx::pack2<Element>(left[0], left[1]), a[1] = ptx::pack2<Element>(left[2], left[3]);
  a[2] = ptx::pack2<Element>(right[0], right[1]), a[3] = ptx::pack2<Element>(right[2], right[3]);
}

// Exchanges pairs with the neighbouring lane, so that each lane holds four neighbouring columns of a row: even lanes of the left n8
// accumulator (columns 2t..2t+3), odd lanes of the right one (columns 8 + 2t-2..). `high` takes row g + 8. Its own inverse.
TPK_DEVICE float4 four_columns(const float (&left)[4], const float (&right)[4], bool high, int lane) {
  const int first = high ? 2 : 0;
  const bool odd = lane & 1;
  const float give0 = odd ? left[first] : right[first], give1 = odd ? left[first + 1] : right[first + 1];
  const float take0 = __shfl_xor_sync(all_lanes, give0, 1), take1 = __shfl_xor_sync(all_lanes, give1, 1);
  return odd ? make_float4(take0, take1, right[first], right[first + 1]) : make_float4(left[first], left[first + 1], take0, take1);
}
TPK_DEVICE void from_four_columns(float (&left)[4], float (&right)[4], bool high, int lane, float4 value) {
  const int first = high ? 2 : 0;
  const bool odd = lane & 1;
  const float give0 = odd ? value.x : value.z, give1 = odd ? value.y : value.w;
  const float take0 = __shfl_xor_sync(all_lanes, give0, 1), take1 = __shfl_xor_sync(all_lanes, give1, 1);
  left[first] = odd ? take0 : value.x, left[first + 1] = odd ? take1 : value.y;
  right[first] = odd ? value.z : take0, right[first + 1] = odd ? value.w : take1;
}
// Where a lane's four columns start within the sixteen.
TPK_DEVICE int four_columns_begin(int lane) { return (lane & 1) * 8 + (lane & 2) * 2; }

} // namespace tpk
