// emulator/test_kernels.cpp: small kernels that test the emulator: one for each family of instructions, and mistakes of every kind,
// planted. Their oracles are in tests/tpkernels/cuda. Compiled like the real kernels. Sizes and tensors are positional; each kernel says
// what they are.
#include "emulator/test_kernels.h"

#include <stdexcept>
#include <utility>

#include "cuda/device.cuh"
#include "emulator/session.h"

namespace tpk::emulator {
namespace {

template <class T> T* tensor(const TestTask& task, int i) { return static_cast<T*>(task.tensors[i]); }
int size(const TestTask& task, int i) { return static_cast<int>(task.sizes[i]); }
unsigned global_thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

// ---- values and memory ----------------------------------------------------------------------------------------------------------

// out[i] = in[i + shift] for i < n.  tensors: in, out (int32). sizes: n, shift.
void copy(TestTask task) {
  const int i = static_cast<int>(global_thread());
  if (i < size(task, 0)) tensor<int32_t>(task, 1)[i] = tensor<const int32_t>(task, 0)[i + size(task, 1)];
}

// The same, 16 bytes a thread.
void copy_16(TestTask task) {
  const int i = static_cast<int>(global_thread());
  if (i < size(task, 0))
    ptx::store_global_16(tensor<uint4>(task, 1) + i, ptx::load_global_16(tensor<int32_t>(task, 0) + i * 4 + size(task, 1)));
}

// out[i] = sum of in[i], atomically into out[i % n].  tensors: in, out (float). sizes: n.
void add(TestTask task) {
  ptx::red_add(tensor<float>(task, 1) + global_thread() % size(task, 0), tensor<const float>(task, 0)[global_thread()]);
}

// Rounds pairs: tensors: in (float), bf16, fp16 (two 16-bit values each), back (float: from bf16, from fp16).
void formats(TestTask task) {
  const unsigned i = 2 * global_thread();
  const float low = tensor<const float>(task, 0)[i], high = tensor<const float>(task, 0)[i + 1];
  const uint32_t b = ptx::pack2<bf16>(low, high), h = ptx::pack2<fp16>(low, high);
  tensor<uint32_t>(task, 1)[i / 2] = b;
  tensor<uint32_t>(task, 2)[i / 2] = h;
  const float2 from_b = ptx::unpack2<bf16>(b), from_h = ptx::unpack2<fp16>(h);
  float* back = tensor<float>(task, 3) + 2 * i;
  back[0] = from_b.x, back[1] = from_b.y, back[2] = from_h.x, back[3] = from_h.y;
}

// ---- warps ----------------------------------------------------------------------------------------------------------------------

// out[thread][0..6]: value of lane l + 5, l ^ 3, l - 2, l + 4 (clamped), votes for odd lanes, any, all.  tensors: in, out (int32).
void shuffles(TestTask task) {
  const int lane = threadIdx.x % 32;
  const int32_t value = tensor<const int32_t>(task, 0)[threadIdx.x];
  int32_t* out = tensor<int32_t>(task, 1) + threadIdx.x * 7;
  out[0] = __shfl_sync(all_lanes, value, lane + 5);
  out[1] = __shfl_xor_sync(all_lanes, value, 3);
  out[2] = __shfl_up_sync(all_lanes, value, 2);
  out[3] = __shfl_down_sync(all_lanes, value, 4);
  out[4] = static_cast<int32_t>(__ballot_sync(all_lanes, lane % 2));
  out[5] = __any_sync(all_lanes, lane == 7);
  out[6] = __all_sync(all_lanes, lane < 31);
}

// Two halves of a warp shuffle on their own, one of them twice as often.  tensors: in, out (int32).
void half_warps(TestTask task) {
  const bool upper = threadIdx.x % 32 >= 16;
  int32_t value = tensor<const int32_t>(task, 0)[threadIdx.x];
  for (int i = 0; i < (upper ? 4 : 2); ++i) value += __shfl_xor_sync(upper ? 0xffff0000u : 0x0000ffffu, value, 1);
  tensor<int32_t>(task, 1)[threadIdx.x] = value;
}

// d = a b + c from registers of each lane.  tensors: a [32][4], b [32][2], c [32][4] (float), out [32][4].
template <class Element> void mma(TestTask task) {
  const unsigned lane = threadIdx.x;
  uint32_t a[4];
  float d[4];
  for (int i = 0; i < 4; ++i) a[i] = tensor<const uint32_t>(task, 0)[lane * 4 + i], d[i] = tensor<const float>(task, 2)[lane * 4 + i];
  ptx::mma_m16n8k16<Element>(d, a, tensor<const uint32_t>(task, 1)[lane * 2], tensor<const uint32_t>(task, 1)[lane * 2 + 1]);
  for (int i = 0; i < 4; ++i) tensor<float>(task, 3)[lane * 4 + i] = d[i];
}

// Fills shared memory with `in`, then one ldmatrix.  tensors: in (uint16, n elements), addresses [32], out [32][4]. sizes: n, matrices,
// transposed.
void ldmatrix_test(TestTask task) {
  auto* shared = reinterpret_cast<uint16_t*>(shared_memory());
  for (int i = static_cast<int>(threadIdx.x); i < size(task, 0); i += 32) shared[i] = tensor<const uint16_t>(task, 0)[i];
  __syncthreads();
  const Quad out = ldmatrix(tensor<const uint32_t>(task, 1)[threadIdx.x], static_cast<uint32_t>(size(task, 1)), size(task, 2) != 0);
  for (int i = 0; i < size(task, 1); ++i) tensor<uint32_t>(task, 2)[threadIdx.x * 4 + i] = out.r[i];
}

// One stmatrix of in [32][4], then shared memory as far as it was written.  tensors: in, addresses [32], out (uint16). sizes: n, matrices,
// transposed.
void stmatrix_test(TestTask task) {
  const auto* in = tensor<const uint32_t>(task, 0) + threadIdx.x * 4;
  stmatrix(tensor<const uint32_t>(task, 1)[threadIdx.x], {in[0], in[1], in[2], in[3]}, static_cast<uint32_t>(size(task, 1)),
           size(task, 2) != 0);
  __syncthreads();
  const auto* shared = reinterpret_cast<const uint16_t*>(shared_memory());
  for (int i = static_cast<int>(threadIdx.x); i < size(task, 0); i += 32) tensor<uint16_t>(task, 2)[i] = shared[i];
}

// ---- shared memory and barriers -------------------------------------------------------------------------------------------------

enum class Reverse {
  sound,
  no_barrier,
  only_warp_barrier,
  half_arrives,
  early_return,
  unwritten,
  beyond_the_end,
  misaligned,
  write_after_read
};

// out = in reversed within the block, through shared memory; every mistake that may be made on the way.  tensors: in, out (int32).
template <Reverse mistake> void reverse(TestTask task) {
  auto* shared = reinterpret_cast<int32_t*>(shared_memory());
  const unsigned t = threadIdx.x, n = blockDim.x;
  const int32_t value = tensor<const int32_t>(task, 0)[global_thread()];
  if (mistake == Reverse::beyond_the_end)
    shared[t + 1] = value;
  else if (mistake == Reverse::misaligned)
    *reinterpret_cast<int32_t*>(shared_memory() + t * 4 + (t == 9 ? 2 : 0)) = value;
  else if (mistake != Reverse::unwritten || t != 5)
    shared[t] = value;
  if (mistake == Reverse::early_return && t >= n - 32) return;
  if (mistake == Reverse::only_warp_barrier) {
    __syncwarp();
  } else if (mistake == Reverse::half_arrives) {
    if (t < n / 2) __syncthreads();
  } else if (mistake != Reverse::no_barrier) {
    __syncthreads();
  }
  const int32_t reversed = shared[n - 1 - t];
  if (mistake == Reverse::write_after_read) shared[t] = 0;
  tensor<int32_t>(task, 1)[global_thread()] = reversed;
}

// Warps exchange by shared memory within each pair of them, over a named barrier a pair.  tensors: in, out (int32). sizes: threads of a
// barrier.
void named_barriers(TestTask task) {
  auto* shared = reinterpret_cast<int32_t*>(shared_memory());
  const unsigned t = threadIdx.x;
  for (int round = 0; round < 3; ++round) {
    shared[t] = tensor<const int32_t>(task, 0)[t] + round;
    ptx::barrier_sync(1 + static_cast<int>(t) / 64, size(task, 0));
    const int32_t other = shared[t ^ 32];
    ptx::barrier_sync(1 + static_cast<int>(t) / 64, size(task, 0));
    tensor<int32_t>(task, 1)[t * 3 + round] = other;
  }
}

// Lanes go two ways and meet two different instructions.  tensors: out (int32).
void diverging(TestTask task) {
  int32_t value = 1;
  if (threadIdx.x % 32 < 16)
    value = __shfl_xor_sync(all_lanes, value, 1);
  else
    value = static_cast<int32_t>(__ballot_sync(all_lanes, value));
  tensor<int32_t>(task, 0)[threadIdx.x] = value;
}

// shared[t * stride] in words of 4, 8 or 16 bytes, written and, after a barrier that keeps the compiler from remembering it, read. tensors:
// out (int32). sizes: bytes, stride in bytes.
void strided(TestTask task) {
  const uint32_t at = threadIdx.x * static_cast<uint32_t>(size(task, 1));
  int32_t sum = 0;
  if (size(task, 0) == 16) {
    ptx::store_shared_16(at, make_uint4(1, 2, 3, threadIdx.x));
    __syncwarp();
    sum = static_cast<int32_t>(ptx::load_shared_16(at).w);
  } else if (size(task, 0) == 8) {
    auto* shared = reinterpret_cast<int64_t*>(shared_memory() + at);
    *shared = threadIdx.x;
    __syncwarp();
    sum = static_cast<int32_t>(*shared);
  } else {
    auto* shared = reinterpret_cast<int32_t*>(shared_memory() + at);
    *shared = static_cast<int32_t>(threadIdx.x);
    __syncwarp();
    sum = *shared;
  }
  tensor<int32_t>(task, 0)[threadIdx.x] = sum;
}

// ---- asynchronous copies --------------------------------------------------------------------------------------------------------

enum class Copying { sound, no_wait, waits_for_too_few, no_barrier, overwritten, refilled_while_read, never_waited_for };

// out = in of the neighbour, in two stages of 16 bytes a thread; valid rows only, zeros after.  tensors: in, out (int32). sizes: valid
// threads.
template <Copying mistake> void async_copy(TestTask task) {
  const uint32_t t = threadIdx.x, n = blockDim.x;
  const bool valid = static_cast<int>(t) < size(task, 0);
  for (uint32_t stage = 0; stage < 2; ++stage) {
    ptx::cp_async_16((stage * n + t) * 16, tensor<const int32_t>(task, 0) + (stage * n + t) * 4, valid);
    ptx::cp_async_commit();
  }
  if (mistake == Copying::no_barrier) __syncthreads(); // one that comes before the wait
  for (uint32_t stage = 0; stage < 2; ++stage) {
    if (mistake == Copying::overwritten) ptx::store_shared_16((stage * n + t) * 16, make_uint4(0, 0, 0, 0));
    if (mistake == Copying::waits_for_too_few || (mistake != Copying::no_wait && stage == 0))
      ptx::cp_async_wait<1>();
    else if (mistake != Copying::no_wait)
      ptx::cp_async_wait<0>();
    if (mistake != Copying::no_barrier) __syncthreads();
    const uint4 value = ptx::load_shared_16((stage * n + (t + 1) % n) * 16);
    ptx::store_global_16(tensor<int32_t>(task, 1) + (stage * n + t) * 4, value);
    if (mistake == Copying::never_waited_for && stage == 1) ptx::cp_async_16(t * 16, tensor<const int32_t>(task, 0) + t * 4, valid);
    if (mistake == Copying::refilled_while_read && stage == 0) ptx::cp_async_16(t * 16, tensor<const int32_t>(task, 0) + t * 4, valid);
  }
}

// ---- mbarriers ------------------------------------------------------------------------------------------------------------------

enum class Phases { sound, one_arrives_less, no_barrier_after_init, wrong_parity, tied_copies, untied_copies };

// Warp 0 fills a slot of shared memory, the other warps read it, three rounds: one mbarrier says full, one free. 16 bytes a thread.
// tensors: in [3, 32, 4], out [3, threads - 32, 4] (int32).
template <Phases mistake> void mbarrier_ring(TestTask task) {
  constexpr uint32_t full = 0, free = 8, slot = 16;
  const uint32_t t = threadIdx.x, readers = blockDim.x - 32;
  if (t == 0) {
    mbarrier_init(full, 32);
    mbarrier_init(free, readers);
  }
  if (mistake != Phases::no_barrier_after_init) __syncthreads();
  for (uint32_t round = 0; round < 3; ++round) {
    if (t < 32) {
      mbarrier_wait(free, (round % 2) ^ 1);
      const int32_t* source = tensor<const int32_t>(task, 0) + (round * 32 + t) * 4;
      if (mistake == Phases::tied_copies || mistake == Phases::untied_copies) {
        ptx::cp_async_16(slot + t * 16, source, true);
        if (mistake == Phases::tied_copies)
          cp_async_mbarrier_arrive(full);
        else
          mbarrier_arrive(full);
      } else {
        ptx::store_shared_16(slot + t * 16, ptx::load_global_16(source));
        if (mistake != Phases::one_arrives_less || t != 7) mbarrier_arrive(full);
      }
    } else {
      mbarrier_wait(full, mistake == Phases::wrong_parity ? (round + 1) % 2 : round % 2);
      const uint4 value = ptx::load_shared_16(slot + (31 - t % 32) * 16);
      mbarrier_arrive(free);
      ptx::store_global_16(tensor<int32_t>(task, 1) + (round * readers + t - 32) * 4, value);
    }
  }
}

constexpr TestKernel kernels[] = {
    {"copy", copy},
    {"copy_16", copy_16},
    {"add", add},
    {"formats", formats},
    {"shuffles", shuffles},
    {"half_warps", half_warps},
    {"mma_bf16", mma<bf16>},
    {"mma_fp16", mma<fp16>},
    {"ldmatrix", ldmatrix_test},
    {"stmatrix", stmatrix_test},
    {"reverse", reverse<Reverse::sound>},
    {"reverse_no_barrier", reverse<Reverse::no_barrier>},
    {"reverse_only_warp_barrier", reverse<Reverse::only_warp_barrier>},
    {"reverse_half_arrives", reverse<Reverse::half_arrives>},
    {"reverse_early_return", reverse<Reverse::early_return>},
    {"reverse_unwritten", reverse<Reverse::unwritten>},
    {"reverse_beyond_the_end", reverse<Reverse::beyond_the_end>},
    {"reverse_misaligned", reverse<Reverse::misaligned>},
    {"reverse_write_after_read", reverse<Reverse::write_after_read>},
    {"named_barriers", named_barriers},
    {"diverging", diverging},
    {"strided", strided},
    {"async_copy", async_copy<Copying::sound>},
    {"async_copy_no_wait", async_copy<Copying::no_wait>},
    {"async_copy_waits_for_too_few", async_copy<Copying::waits_for_too_few>},
    {"async_copy_no_barrier", async_copy<Copying::no_barrier>},
    {"async_copy_overwritten", async_copy<Copying::overwritten>},
    {"async_copy_refilled_while_read", async_copy<Copying::refilled_while_read>},
    {"async_copy_never_waited_for", async_copy<Copying::never_waited_for>},
    {"mbarrier_ring", mbarrier_ring<Phases::sound>},
    {"mbarrier_ring_one_arrives_less", mbarrier_ring<Phases::one_arrives_less>},
    {"mbarrier_ring_no_barrier_after_init", mbarrier_ring<Phases::no_barrier_after_init>},
    {"mbarrier_ring_wrong_parity", mbarrier_ring<Phases::wrong_parity>},
    {"mbarrier_ring_tied_copies", mbarrier_ring<Phases::tied_copies>},
    {"mbarrier_ring_untied_copies", mbarrier_ring<Phases::untied_copies>},
};

} // namespace

void run_test_kernel(const std::string& name, int64_t grid, int threads, int64_t shared_bytes, const TestTask& task,
                     const cuda::Place& place) {
  for (const std::span<const TestKernel> table : {std::span<const TestKernel>(kernels), fragment_kernels(), order_kernels()})
    for (const TestKernel& entry : table)
      if (name == entry.name) return EmulatorLauncher{place}.run(entry.kernel, entry.name, grid, threads, shared_bytes, task);
  throw std::invalid_argument("emulator: there is no test kernel " + name);
}

} // namespace tpk::emulator
