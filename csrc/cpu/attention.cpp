// cpu/attention.cpp: cuts a call into tasks and runs them on the pool.
// Forward: (batch, KV head, run of query tokens), the runs that see most keys first. Backward: heads go in waves of one a thread, so that
// the packed query side of a wave stays small; inside a wave (key tile, head) tasks are claimed key tile ascending, as cpu/backward.h
// needs.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "cpu_features.h"
#include "thread_pool.h"
#include "tpk/tiling.h"

namespace tpk::cpu {

namespace {

// Bytes of output state a forward task may keep: half of a small L2.
constexpr int64_t forward_state_bytes = 512 * 1024;
// Fewer rows than this do not pay for packing a key tile once more.
constexpr int64_t least_forward_rows = 128;

int64_t forward_task_tokens(const AttentionShape& shape, int64_t threads) {
  const int64_t group = shape.group(), heads = shape.batch * shape.kv_heads;
  const int64_t state_rows = std::max<int64_t>(least_forward_rows, forward_state_bytes / (4 * shape.value_head_dim) / 128 * 128);
  int64_t tokens = std::max<int64_t>(1, state_rows / group);
  // Enough tasks for the threads to even out: four a thread, unless a task would fall under the least.
  const int64_t runs_wanted = threads == 1 ? 1 : (4 * threads + heads - 1) / heads;
  const int64_t even = (shape.tokens + runs_wanted - 1) / runs_wanted;
  tokens = std::min(tokens, std::max(even, (least_forward_rows + group - 1) / group));
  const int64_t unit = 32 / std::min<int64_t>(group, 32); // whole panels
  return std::min(round_up(tokens, std::max<int64_t>(unit, 1)), shape.tokens);
}

} // namespace

void attention_forward(const ForwardParams& params, int64_t num_threads) {
  const AttentionShape& shape = params.shape;
  const int64_t heads = shape.batch * shape.kv_heads;
  if (heads == 0 || shape.tokens == 0) return;
  const Kernels& kernels = kernels_of(chosen_isa_level(), shape.dtype);
  const int64_t tokens = forward_task_tokens(shape, num_threads), runs = (shape.tokens + tokens - 1) / tokens;
  ThreadPool::Lease lease(std::min(num_threads, heads * runs));
  const int64_t bytes = kernels.forward_bytes(params, tokens);
  std::vector<std::byte*> memory;
  for (int64_t worker = 0; worker < lease.threads(); ++worker) memory.push_back(lease.memory(worker, bytes));
  lease.run(heads * runs, [&](int64_t worker, int64_t task) {
    const int64_t run = runs - 1 - task / heads, head = task % heads;
    kernels.forward(params, {head / shape.kv_heads, head % shape.kv_heads}, run * tokens, std::min((run + 1) * tokens, shape.tokens),
                    memory[worker]);
  });
}

void attention_backward(const BackwardParams& params, int64_t num_threads) {
  const AttentionShape& shape = params.shape;
  const int64_t heads = shape.batch * shape.kv_heads;
  if (heads == 0 || shape.tokens == 0) return;
  const Kernels& kernels = kernels_of(chosen_isa_level(), shape.dtype);
  const int64_t unit = backward_query_tokens(shape.group());
  const int64_t query_tiles = floor_div(params.mask.start + shape.tokens - 1, unit) - floor_div(params.mask.start, unit) + 1;
  const int64_t key_tiles = (shape.keys + backward_key_tile - 1) / backward_key_tile;
  ThreadPool::Lease lease(std::min(num_threads, heads * std::max(query_tiles, key_tiles)));
  const int64_t wave = std::min(heads, lease.threads());
  const int64_t head_bytes = round_up(kernels.backward_head_bytes(params), 4096), thread_bytes = kernels.backward_thread_bytes(params);
  std::byte* shared = lease.shared_memory(wave * head_bytes);
  std::vector<std::byte*> memory;
  for (int64_t worker = 0; worker < lease.threads(); ++worker) memory.push_back(lease.memory(worker, thread_bytes));
  std::vector<double> sink_sums(params.dsinks == nullptr ? 0 : shape.query_heads, 0.0);

  for (int64_t first = 0; first < heads; first += wave) {
    const int64_t count = std::min(wave, heads - first);
    const auto head_of = [&](int64_t slot) { return HeadIndex{(first + slot) / shape.kv_heads, (first + slot) % shape.kv_heads}; };
    lease.run(count * query_tiles, [&](int64_t, int64_t task) {
      kernels.backward_prepare(params, head_of(task % count), task / count, shared + task % count * head_bytes);
    });
    lease.run(count * key_tiles, [&](int64_t worker, int64_t task) {
      kernels.backward_keys(params, head_of(task % count), task / count, shared + task % count * head_bytes, memory[worker]);
    });
    lease.run(count * query_tiles, [&](int64_t, int64_t task) {
      kernels.backward_finish(params, head_of(task % count), task / count, shared + task % count * head_bytes);
    });
    if (params.dsinks != nullptr)
      for (int64_t slot = 0; slot < count; ++slot)
        kernels.backward_sinks(params, head_of(slot), shared + slot * head_bytes, sink_sums.data());
  }
  for (size_t h = 0; h < sink_sums.size(); ++h) params.dsinks[h] += float(sink_sums[h]);
}

} // namespace tpk::cpu
