// cpu/kernels.h: the kernels of one ISA level for one storage type, as plain function pointers. Each level fills a table in level.cpp.
// A forward task is a run of query tokens of one (batch, KV head); the backward of one (batch, KV head) is prepare (each query tile), keys
// (each key tile), finish (each query tile), with one shared block of memory a head and one private block a thread.
#pragma once

#include <atomic>
#include <cstddef>

#include "tpk/attention_params.h"

namespace tpk::cpu {

struct HeadIndex {
  int64_t batch, kv_head;
};

struct Kernels {
  int64_t (*forward_bytes)(const ForwardParams&, int64_t tokens);
  void (*forward)(const ForwardParams&, HeadIndex, int64_t first_token, int64_t end_token, std::byte* memory);

  int64_t (*backward_head_bytes)(const BackwardParams&);
  int64_t (*backward_thread_bytes)(const BackwardParams&);
  void (*backward_prepare)(const BackwardParams&, HeadIndex, int64_t query_tile, std::byte* head_memory);
  void (*backward_keys)(const BackwardParams&, HeadIndex, int64_t key_tile, std::byte* head_memory, std::byte* thread_memory);
  void (*backward_finish)(const BackwardParams&, HeadIndex, int64_t query_tile, std::byte* head_memory);
  // Adds the head's sink gradients to sums[Hq], query tiles in order.
  void (*backward_sinks)(const BackwardParams&, HeadIndex, std::byte* head_memory, double* sums);
};

// One turn of a spin loop; gives the core away once in a while.
void relax_or_yield(int64_t spins);

// null where this build or this architecture lacks the level.
const Kernels* kernels_baseline(DType);
const Kernels* kernels_avx2(DType);
const Kernels* kernels_avx512(DType);
const Kernels* kernels_avx512_bf16(DType); // bfloat16 only; the rest is avx512's
const Kernels* kernels_amx_bf16(DType);

} // namespace tpk::cpu
