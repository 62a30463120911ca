// emulator/fragment_kernels.cpp: the index maths of cuda/swizzle.cuh by itself, one warp at a time: addresses of a tile, products of tiles
// in every layout that the kernels use, exchanges between lanes. Its oracle is tests/tpkernels/cuda/test_fragments.py.
#include "cuda/swizzle.cuh"
#include "emulator/session.h"
#include "emulator/test_kernels.h"

namespace tpk::emulator {
namespace {

template <class T> T* tensor(const TestTask& task, int i) { return static_cast<T*>(task.tensors[i]); }

// tensors: chunks [rows, row chunks], lanes [2 (rows first, chunks first), rows / 8, row chunks / 2, 32] (int32). sizes: rows.
template <int row_bytes> void addresses(TestTask task) {
  using Shape = SwizzledTile<row_bytes>;
  const int lane = static_cast<int>(threadIdx.x), rows = static_cast<int>(task.sizes[0]);
  auto* lanes_out = tensor<int32_t>(task, 1);
  for (int row = lane; row < rows; row += 32)
    for (int chunk = 0; chunk < Shape::row_chunks; ++chunk)
      tensor<int32_t>(task, 0)[row * Shape::row_chunks + chunk] = static_cast<int32_t>(Shape::at(row, chunk));
  for (const auto& from : {Shape::rows_first(0, lane), Shape::chunks_first(0, lane)})
    for (int row = 0; row < rows; row += 8)
      for (int chunk = 0; chunk < Shape::row_chunks; chunk += 2, lanes_out += 32)
        lanes_out[lane] = static_cast<int32_t>(from.at(row, chunk));
}

// out [16, 16] = a b over 64 elements of depth.  tensors: a [16, 64] or, transposed, [64, 64] of which columns 0-15 count; b [16, 64], or
// transposed [64, 64] likewise; out (float).
template <class Element, bool a_transposed, bool b_transposed> void product(TestTask task) {
  using Shape = SwizzledTile<128>;
  const int lane = static_cast<int>(threadIdx.x);
  const uint32_t a_tile = 0, b_tile = 64 * 128;
  for (int operand = 0; operand < 2; ++operand) {
    const int rows = (operand == 0 ? a_transposed : b_transposed) ? 64 : 16;
    for (int i = lane; i < rows * 8; i += 32)
      ptx::store_shared_16((operand == 0 ? a_tile : b_tile) + Shape::at(i / 8, i % 8),
                           ptx::load_global_16(tensor<uint16_t>(task, operand) + i * 8));
  }
  __syncwarp();
  float d[2][4] = {};
  for (int depth = 0; depth < 4; ++depth) {
    uint32_t a[4], b[4];
    if (a_transposed)
      ptx::ldmatrix_x4_trans(a, Shape::chunks_first(a_tile, lane).at(depth * 16, 0));
    else
      ptx::ldmatrix_x4(a, Shape::rows_first(a_tile, lane).at(0, depth * 2));
    if (b_transposed)
      ptx::ldmatrix_x4_trans(b, Shape::rows_first(b_tile, lane).at(depth * 16, 0));
    else
      ptx::ldmatrix_x4(b, Shape::chunks_first(b_tile, lane).at(0, depth * 2));
    ptx::mma_m16n8k16<Element>(d[0], a, b[0], b[1]);
    ptx::mma_m16n8k16<Element>(d[1], a, b[2], b[3]);
  }
  for (int j = 0; j < 2; ++j)
    for (int e = 0; e < 4; ++e) tensor<float>(task, 2)[(lane / 4 + e / 2 * 8) * 16 + j * 8 + lane % 4 * 2 + e % 2] = d[j][e];
}

// A [16, 16] matrix as two accumulators.  tensors: in, by_rows (in, through four_columns), back (in, through both ways) (float), a [32, 4].
template <class Element> void exchanges(TestTask task) {
  const int lane = static_cast<int>(threadIdx.x);
  const auto place = [&](int j, int e) { return (lane / 4 + e / 2 * 8) * 16 + j * 8 + lane % 4 * 2 + e % 2; };
  float left[4], right[4], left_back[4], right_back[4];
  for (int e = 0; e < 4; ++e) left[e] = tensor<const float>(task, 0)[place(0, e)], right[e] = tensor<const float>(task, 0)[place(1, e)];
  for (int half = 0; half < 2; ++half) {
    const float4 four = four_columns(left, right, half == 1, lane);
    ptx::store_global_16(tensor<float>(task, 1) + (lane / 4 + half * 8) * 16 + four_columns_begin(lane), bits_of(four));
    from_four_columns(left_back, right_back, half == 1, lane, four);
  }
  for (int e = 0; e < 4; ++e) tensor<float>(task, 2)[place(0, e)] = left_back[e], tensor<float>(task, 2)[place(1, e)] = right_back[e];
  uint32_t a[4];
  accumulators_to_a<Element>(a, left, right);
  for (int i = 0; i < 4; ++i) tensor<uint32_t>(task, 3)[lane * 4 + i] = a[i];
}

constexpr TestKernel kernels[] = {
    {"addresses_64", addresses<64>},
    {"addresses_128", addresses<128>},
    {"addresses_256", addresses<256>},
    {"product_bf16", product<bf16, false, false>},
    {"product_bf16_a", product<bf16, true, false>},
    {"product_bf16_b", product<bf16, false, true>},
    {"product_bf16_ab", product<bf16, true, true>},
    {"product_fp16", product<fp16, false, false>},
    {"product_fp16_a", product<fp16, true, false>},
    {"product_fp16_b", product<fp16, false, true>},
    {"product_fp16_ab", product<fp16, true, true>},
    {"exchanges_bf16", exchanges<bf16>},
    {"exchanges_fp16", exchanges<fp16>},
};

} // namespace

std::span<const TestKernel> fragment_kernels() { return kernels; }

} // namespace tpk::emulator
