// cuda/query_rows.cuh: rows of a query tile, their memory, and the key tiles that they see.
// The rows of one KV head are packed: row r is token r / group of head kv_head * group + r % group, so that a short slice of a model
// with grouped heads still fills a tile; positions never decrease with r. Shared by every kernel that owns query rows.
#pragma once

#include "cuda/swizzle.cuh"
#include "tpk/attention_params.h"

namespace tpk {

// Key interval of a row, 32 bits: a launcher refuses more than 2^30 keys.
struct alignas(8) RowInterval {
  int32_t lo, hi;
  TPK_DEVICE bool sees(int key) const { return key >= lo && key < hi; }
};

struct RowPlace {
  int token, head; // head of all query heads
  TPK_DEVICE static RowPlace of(int row, int group, int kv_head) {
    const uint32_t token = uint32_t(row) / uint32_t(group);
    return {int(token), kv_head * group + int(uint32_t(row) - token * group)};
  }
};

template <class Element> TPK_DEVICE Element* address_of(const TensorView& view, int batch, int token, int head) {
  return static_cast<Element*>(view.data) + (batch * view.batch_stride + token * view.token_stride + head * view.head_stride);
}

// Asynchronous copies of rows [first, first + rows) of a packed tensor into a swizzled tile; rows outside [begin, end) become zeros.
template <class Element, int dim, int rows, int threads>
TPK_DEVICE void load_packed_rows(uint32_t tile, const TensorView& view, int batch, int kv_head, int group, int first, int begin, int end) {
  using Shape = SwizzledTile<dim * 2>;
  constexpr int rows_at_once = threads / Shape::row_chunks;
  static_assert(rows % rows_at_once == 0);
  const uint32_t thread = ptx::afresh(threadIdx.x);
  const int chunk = thread % Shape::row_chunks;
#pragma unroll 4
  for (int i = 0; i < rows / rows_at_once; ++i) {
    const int row = i * rows_at_once + int(thread / Shape::row_chunks);
    const bool valid = first + row >= begin && first + row < end;
    const RowPlace place = RowPlace::of(valid ? first + row : 0, group, kv_head);
    ptx::cp_async_16(tile + Shape::at(row, chunk), address_of<Element>(view, batch, place.token, place.head) + chunk * 8, valid);
  }
}

// The same for keys [first, first + rows) of one head; keys from `end` on become zeros. `source` is key 0 of the head.
template <class Element, int dim, int rows, int threads>
TPK_DEVICE void load_keys(uint32_t tile, const Element* source, int64_t key_stride, int first, int end) {
  using Shape = SwizzledTile<dim * 2>;
  constexpr int rows_at_once = threads / Shape::row_chunks;
  static_assert(rows % rows_at_once == 0 && rows_at_once % 8 == 0); // so that every row of a thread exchanges chunks alike
  const uint32_t thread = ptx::afresh(threadIdx.x);
  const int row = thread / Shape::row_chunks, chunk = thread % Shape::row_chunks;
  const Element* from = source + (first + row) * key_stride + chunk * 8;
#pragma unroll
  for (int i = 0; i < rows / rows_at_once; ++i) {
    const int r = row + i * rows_at_once;
    ptx::cp_async_16(tile + Shape::at(r, chunk), from, first + r < end);
    from += rows_at_once * key_stride;
  }
}

// 16-byte stores of a warp's rows [warp_row, warp_row + rows) of a swizzled tile to the packed tensor whose row first_row is the tile's 0.
template <class Element, int dim, int rows>
TPK_DEVICE void store_staged_rows(uint32_t tile, const TensorView& view, int batch, int kv_head, int group, int first_row, int warp_row,
                                  int rows_end, int lane) {
  using Shape = SwizzledTile<dim * 2>;
  constexpr int rows_at_once = warp_threads / Shape::row_chunks;
#pragma unroll 4
  for (int i = 0; i < rows / rows_at_once; ++i) {
    const int within = warp_row + i * rows_at_once + lane / Shape::row_chunks, chunk = lane % Shape::row_chunks;
    if (first_row + within >= rows_end) continue;
    const RowPlace at = RowPlace::of(first_row + within, group, kv_head);
    ptx::store_global_16(address_of<Element>(view, batch, at.token, at.head) + chunk * 8,
                         ptx::load_shared_16(tile + Shape::at(within, chunk)));
  }
}

// Key tiles that a tile of query rows walks, ascending: absolute tiles, so that sums are cut at the same keys for every slicing.
struct KeyTiles {
  int begin, end;           // tiles of which some row sees some key
  int full_begin, full_end; // keys that every row sees
  int size;

  // first, last: intervals of the first and of the last row.
  TPK_DEVICE static KeyTiles of(RowInterval first, RowInterval last, int size) {
    const int begin = first.lo / size, end = (last.hi + size - 1) / size;
    return {begin, end > begin ? end : begin, last.lo, first.hi, size};
  }
  // The split-th of `splits` even shares.
  TPK_DEVICE void take_share(int split, int splits) {
    const int share = (end - begin + splits - 1) / splits, last = end;
    begin = begin + split * share < last ? begin + split * share : last;
    end = begin + share < last ? begin + share : last;
  }
  TPK_DEVICE bool full(int tile) const { return tile * size >= full_begin && (tile + 1) * size <= full_end; }
};

// The interval of a packed row; a row past the last sees nothing.
TPK_DEVICE RowInterval interval_of(const MaskIntervals& mask, int batch, int row, int rows_end, int group) {
  if (row >= rows_end) return {0, 0};
  const KeyInterval interval = mask.of(batch, uint32_t(row) / uint32_t(group));
  return {int32_t(interval.lo), int32_t(interval.hi)};
}

} // namespace tpk
