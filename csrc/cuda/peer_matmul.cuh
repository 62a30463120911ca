// cuda/peer_matmul.cuh: matrix products at the two ends of a hand-off: one that puts its result tile by tile, one that starts on tiles that
// came (protocol: peer_protocol.cuh).                                                                                       (kernels)
// out [rows, n] = a [rows, k] @ b, where b is [k, n], transposed a weight [n, k]. A block makes one row tile's share of `columns` columns.
// Blocks go through the columns of one row tile first: otherwise all row tiles end at the end, and nothing overlaps. fp32 sums, of 16-bit
// elements on tensor cores, of fp32 by fma with k ascending. The product is rounded before the residual is added, as by two kernels.
// Trap: the slot is read by cp.async, which belongs to the generic proxy; a TMA load after a wait would need a proxy fence.
#pragma once

#include "cuda/peer_protocol.cuh"
#include "cuda/row_chunk.cuh"

namespace tpk {

// Shared memory is `stages` of (a, b), then the block's word. The result is staged where the stages were: `columns` are 256 bytes.
template <class Element_, bool transposed_> struct ProductTile;

// 16 bits: 32 x 64 of the result a warp, whose 64 sums leave room for two blocks' registers on a multiprocessor, as their shared memory
// does on sm_80. 64 of k are a line of 128 bytes.
template <class Element_, bool transposed_>
  requires(sizeof(Element_) == 2)
struct ProductTile<Element_, transposed_> {
  using Element = Element_;
  static constexpr bool transposed = transposed_;
  static constexpr int rows = peer_tile_rows, columns = 128, depth = 64, stages = 3, threads = 128, blocks = 2;
  static constexpr int b_at = rows * depth * 2, stage_bytes = b_at + columns * depth * 2, answer_at = stages * stage_bytes;
  static constexpr int shared_bytes = answer_at + 16;
  static_assert(2 * (shared_bytes + 1024) <= 164 * 1024);
  using A = SwizzledTile<depth * 2>;
  using B = SwizzledTile<transposed ? depth * 2 : columns * 2>;
  static constexpr int b_rows = transposed ? columns : depth;

  float sum[2][8][4] = {};

  TPK_DEVICE static uint32_t a_chunk(int row, int chunk) { return A::at(row, chunk); }
  TPK_DEVICE static uint32_t b_chunk(int row, int chunk) { return B::at(row, chunk); }

  TPK_DEVICE void multiply(uint32_t stage) {
    const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads, row = warp / 2 * 32, column = warp % 2 * 64;
    const auto a = A::rows_first(stage, lane);
    const auto b = transposed ? typename B::Lane(B::chunks_first(stage + b_at, lane)) : typename B::Lane(B::rows_first(stage + b_at, lane));
#pragma unroll
    for (int step = 0; step < depth / 16; ++step) {
      uint32_t left[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) ptx::ldmatrix_x4(left[m], a.at(row + m * 16, step * 2));
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        uint32_t right[4];
        if constexpr (transposed)
          ptx::ldmatrix_x4(right, b.at(column + j * 8, step * 2));
        else
          ptx::ldmatrix_x4_trans(right, b.at(step * 16, column / 8 + j));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          ptx::mma_m16n8k16<Element>(sum[m][j], left[m], right[0], right[1]);
          ptx::mma_m16n8k16<Element>(sum[m][j + 1], left[m], right[2], right[3]);
        }
      }
    }
  }

  using Staged = SwizzledTile<columns * 2>;
  TPK_DEVICE void stage(uint32_t staged) const {
    const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads, row = warp / 2 * 32 + lane / 4, chunk = warp % 2 * 8;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          ptx::store_shared_4(staged + Staged::at(row + m * 16 + half * 8, chunk + j) + lane % 4 * 4,
                              ptx::pack2<Element>(sum[m][j][half * 2], sum[m][j][half * 2 + 1]));
  }
};

// fp32: 4 x 4 of the result a thread.
template <bool transposed_> struct ProductTile<float, transposed_> {
  using Element = float;
  static constexpr bool transposed = transposed_;
  static constexpr int rows = peer_tile_rows, columns = 64, depth = 16, stages = 3, threads = 256, blocks = 2;
  static constexpr int b_at = rows * depth * 4, stage_bytes = b_at + columns * depth * 4, answer_at = stages * stage_bytes;
  static constexpr int b_rows = transposed ? columns : depth, shared_bytes = answer_at + 16;
  static_assert(rows * columns * 4 <= answer_at);
  using A = SwizzledTile<depth * 4>;

  float sum[4][4] = {};

  TPK_DEVICE static uint32_t a_chunk(int row, int chunk) { return A::at(row, chunk); }
  TPK_DEVICE static uint32_t b_chunk(int row, int chunk) {
    if constexpr (transposed) return A::at(row, chunk);
    return row * columns * 4 + chunk * 16;
  }

  TPK_DEVICE void multiply(uint32_t stage) {
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16; // columns column + 16 j
#pragma unroll
    for (int step = 0; step < depth; step += 4) {
      RowChunk<float> left[4], right[4]; // right: of a weight, k; else 4 rows of one column each
#pragma unroll
      for (int i = 0; i < 4; ++i) left[i].take(ptx::load_shared_16(stage + a_chunk(row + i, step / 4)));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (transposed) {
          right[j].take(ptx::load_shared_16(stage + b_at + b_chunk(column + 16 * j, step / 4)));
        } else {
          const auto* b = reinterpret_cast<const float*>(shared_memory() + (stage - ptx::shared_address(shared_memory())) + b_at);
#pragma unroll
          for (int e = 0; e < 4; ++e) right[j].value[e] = b[(step + e) * columns + column + 16 * j];
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(left[i].value[e], right[j].value[e], sum[i][j]);
    }
  }

  using Staged = SwizzledTile<columns * 4>;
  TPK_DEVICE void stage(uint32_t staged) const {
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        ptx::store_shared_4(staged + Staged::at(row + i, column / 4 + 4 * j) + column % 4 * 4, __float_as_uint(sum[i][j]));
  }
};

struct PeerMatmulTask {
  PeerSlot slot;
  PeerMatmul call;

  constexpr int64_t tiles() const { return (call.rows + peer_tile_rows - 1) / peer_tile_rows; }
  constexpr int column_tiles(int columns) const { return int((call.n + columns - 1) / columns); }
};

// One block's part of a product.
template <class Tile> struct ProductBlock {
  using Element = typename Tile::Element;
  static constexpr int width = 16 / sizeof(Element);

  const PeerMatmul& call;
  const int first_row, first_column;
  const uint32_t shared = ptx::shared_address(shared_memory());

  TPK_DEVICE ProductBlock(const PeerMatmul& c, uint32_t row_tile, uint32_t column_tile)
      : call(c), first_row(row_tile * Tile::rows), first_column(column_tile * Tile::columns) {}

  // Copies rows [0, tile_rows) x 16-byte chunks [0, row_chunks) whose first element is `from`; zeros from row `rows` or chunk `chunks` on.
  template <int tile_rows, int row_chunks, class At>
  TPK_DEVICE static void load(const Element* from, int64_t stride, int64_t rows, int64_t chunks, const At& at) {
    constexpr int rows_at_once = Tile::threads / row_chunks;
    static_assert(tile_rows % rows_at_once == 0);
    const int thread = ptx::afresh(threadIdx.x), chunk = thread % row_chunks;
#pragma unroll
    for (int i = 0; i < tile_rows / rows_at_once; ++i) {
      const int row = i * rows_at_once + thread / row_chunks;
      const bool valid = row < rows && chunk < chunks;
      ptx::cp_async_16(at(row, chunk), valid ? from + row * stride + chunk * width : from, valid);
    }
  }

  TPK_DEVICE void load_stage(int step) const {
    const uint32_t stage = shared + step % Tile::stages * Tile::stage_bytes;
    const int64_t k = int64_t(step) * Tile::depth;
    const auto* a = static_cast<const Element*>(call.a) + first_row * call.k + k;
    const auto* b = static_cast<const Element*>(call.b) + (Tile::transposed ? first_column * call.k + k : k * call.n + first_column);
    const int64_t k_left = call.k - k, columns_left = call.n - first_column;
    load<Tile::rows, Tile::depth / width>(a, call.k, call.rows - first_row, k_left / width,
                                          [&](int row, int chunk) { return stage + Tile::a_chunk(row, chunk); });
    load<Tile::b_rows, (Tile::transposed ? Tile::depth : Tile::columns) / width>(
        b, Tile::transposed ? call.k : call.n, Tile::transposed ? columns_left : k_left, (Tile::transposed ? k_left : columns_left) / width,
        [&](int row, int chunk) { return stage + Tile::b_at + Tile::b_chunk(row, chunk); });
  }

  TPK_DEVICE void run() const {
    Tile tile;
    const int steps = int((call.k + Tile::depth - 1) / Tile::depth);
#pragma unroll
    for (int step = 0; step < Tile::stages - 1; ++step) {
      if (step < steps) load_stage(step);
      ptx::cp_async_commit();
    }
    for (int step = 0; step < steps; ++step) {
      ptx::cp_async_wait<Tile::stages - 2>();
      __syncthreads(); // the stage has arrived for all, and nobody reads the one before any more: fill that
      if (step + Tile::stages - 1 < steps) load_stage(step + Tile::stages - 1);
      ptx::cp_async_commit();
      tile.multiply(shared + step % Tile::stages * Tile::stage_bytes);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    tile.stage(shared);
    __syncthreads();
    write();
  }

 private:
  // From the staged tile, a row of 256 bytes by 16 threads side by side; the residual of four rows is under way at once.
  TPK_DEVICE void write() const {
    constexpr int rows_at_once = Tile::threads / 16, batch = 4;
    static_assert(Tile::rows % (rows_at_once * batch) == 0);
    const auto* residual = static_cast<const Element*>(call.residual);
    auto* out = static_cast<Element*>(call.out);
    const int chunk = threadIdx.x % 16, column = first_column + chunk * width;
    if (column >= call.n) return;
    for (int first = threadIdx.x / 16; first < Tile::rows; first += rows_at_once * batch) {
      RowChunk<Element> beside[batch];
      const auto each = [&](const auto& f) { // f(i, row of the tile, element)
#pragma unroll
        for (int i = 0; i < batch; ++i)
          if (const int row = first + i * rows_at_once; first_row + row < call.rows) f(i, row, (first_row + row) * call.n + column);
      };
      if (residual != nullptr) each([&](int i, int, int64_t at) { beside[i].load(residual + at, 0); });
      each([&](int i, int row, int64_t at) {
        RowChunk<Element> value;
        value.take(ptx::load_shared_16(shared + Tile::Staged::at(row, chunk)));
        if (residual != nullptr) value.add(beside[i]);
        value.store(out + at, 0);
      });
    }
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::threads, Tile::blocks) matmul_add_put(const __grid_constant__ PeerMatmulTask task) {
  const bool handed_on = task.slot.flags != nullptr;
  if (handed_on && !block_follows(Tile::answer_at, [&] { return !stopped(task.slot); })) return;
  const auto column_tiles = uint32_t(task.column_tiles(Tile::columns));
  const uint32_t row_tile = blockIdx.x / column_tiles;
  ProductBlock<Tile>(task.call, row_tile, blockIdx.x - row_tile * column_tiles).run();
  if (handed_on) post_tile(task.slot, row_tile, column_tiles);
}

template <class Tile>
__global__ void __launch_bounds__(Tile::threads, Tile::blocks) wait_matmul(const __grid_constant__ PeerMatmulTask task) {
  const auto column_tiles = uint32_t(task.column_tiles(Tile::columns));
  const uint32_t row_tile = blockIdx.x / column_tiles;
  if (task.slot.flags != nullptr && !tile_came(task.slot, row_tile, Tile::answer_at)) return;
  ProductBlock<Tile>(task.call, row_tile, blockIdx.x - row_tile * column_tiles).run();
}

} // namespace tpk
