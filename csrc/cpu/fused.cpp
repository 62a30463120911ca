// cpu/fused.cpp: picks the ISA level and cuts rows into tasks for the pool. The cut is the same for any number of threads, because the sums
// over rows are added block by block.
#include "fused.h"

#include <algorithm>

#include "cpu_features.h"
#include "thread_pool.h"

namespace tpk::cpu {

namespace {

constexpr int64_t block_rows = 32;
// Fewer elements than this are done before a second thread has woken.
constexpr int64_t least_elements_a_thread = 1 << 15;

const FusedKernels& fused_kernels_of(IsaLevel level, DType dtype) {
#if defined(__x86_64__)
  switch (level) {
  case IsaLevel::amx_bf16:
  case IsaLevel::avx512_bf16:
    return *fused_kernels_avx512_bf16(dtype);
  case IsaLevel::avx512:
    return *fused_kernels_avx512(dtype);
  case IsaLevel::avx2:
    return *fused_kernels_avx2(dtype);
  case IsaLevel::baseline:
    break;
  }
#else
  (void)level;
#endif
  return *fused_kernels_baseline(dtype);
}

const FusedKernels& kernels_for(DType dtype) { return fused_kernels_of(chosen_isa_level(), dtype); }

int64_t blocks_of(int64_t rows) { return (rows + block_rows - 1) / block_rows; }

int64_t threads_for(int64_t rows, int64_t dim, int64_t num_threads) {
  return std::max<int64_t>(1, std::min({num_threads, blocks_of(rows), rows * dim / least_elements_a_thread}));
}

template <class Params>
void run_rows(void (*kernel)(const Params&, int64_t, int64_t), const Params& params, int64_t rows, int64_t dim, int64_t num_threads) {
  const int64_t threads = threads_for(rows, dim, num_threads);
  if (threads == 1) return kernel(params, 0, rows);
  ThreadPool::Lease lease(threads);
  lease.run(blocks_of(rows), [&](int64_t, int64_t block) { kernel(params, block * block_rows, std::min((block + 1) * block_rows, rows)); });
}

} // namespace

void norm_forward(const NormForward& p, DType dtype, int64_t num_threads) {
  run_rows(kernels_for(dtype).norm_forward, p, p.rows, p.dim, num_threads);
}

void norm_backward(const NormBackward& p, DType dtype, int64_t num_threads) {
  if (p.rows == 0) return;
  const auto kernel = kernels_for(dtype).norm_backward;
  const int64_t blocks = blocks_of(p.rows);
  ThreadPool::Lease lease(threads_for(p.rows, p.dim, num_threads));
  const bool summed = p.dweight != nullptr || p.dbias != nullptr;
  float* sums = summed ? reinterpret_cast<float*>(lease.shared_memory(blocks * 2 * p.dim * int64_t(sizeof(float)))) : nullptr;
  lease.run(blocks, [&](int64_t, int64_t block) {
    kernel(p, block * block_rows, std::min((block + 1) * block_rows, p.rows), summed ? sums + block * 2 * p.dim : nullptr);
  });
  const auto add = [&](float* to, const float* from) {
    if (to == nullptr) return;
    for (int64_t c = 0; c < p.dim; ++c) { // a call's own sum first, so that what stood there is rounded once
      float sum = 0.0f;
      for (int64_t block = 0; block < blocks; ++block) sum += from[block * 2 * p.dim + c];
      to[c] += sum;
    }
  };
  if (summed) {
    add(p.dweight, sums);
    add(p.dbias, sums + p.dim);
  }
}

void rotary(const Rotary& p, DType dtype, int64_t num_threads) {
  run_rows(kernels_for(dtype).rotary, p, p.rows, p.heads * p.head_dim, num_threads);
}

void gated_forward(const GatedForward& p, DType dtype, int64_t num_threads) {
  run_rows(kernels_for(dtype).gated_forward, p, p.rows, p.dim, num_threads);
}

void gated_backward(const GatedBackward& p, DType dtype, int64_t num_threads) {
  run_rows(kernels_for(dtype).gated_backward, p, p.rows, p.dim, num_threads);
}

void add(const Add& p, DType dtype, int64_t num_threads) { run_rows(kernels_for(dtype).add, p, p.rows, p.dim, num_threads); }

void narrow(const Convert& p, DType dtype, int64_t num_threads) { run_rows(kernels_for(dtype).narrow, p, p.rows, p.dim, num_threads); }

void widen(const Convert& p, DType dtype, int64_t num_threads) { run_rows(kernels_for(dtype).widen, p, p.rows, p.dim, num_threads); }

} // namespace tpk::cpu
