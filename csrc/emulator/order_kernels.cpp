// emulator/order_kernels.cpp: one block hands rows on to one of another device, which copies them out: soundly, and with every mistake that
// may be made on the way. Their oracle is in tests/tpkernels/cuda/test_emulator_order.py. Sizes and tensors are positional.
#include "cuda/device.cuh"
#include "emulator/test_kernels.h"

namespace tpk::emulator {
namespace {

enum class HandOff {
  sound,
  no_barrier,       // before the post
  relaxed_post,     // no release
  early_post,       // before the data
  post_of_the_next, // epoch, one too high
  near_post,        // at .gpu
  no_credit,        // not waited for
  no_fence,         // after the wait
  near_wait,        // at .gpu
  no_barrier_after, // the wait
  early_credit,     // before the data are read
  wait_for_the_last // epoch, one too low
};

// words: flag, credit, 32 words apart.
TPK_DEVICE void wait(uint32_t* word, uint32_t want, bool fence, bool near) {
  while (int32_t((near ? ptx::load_relaxed_gpu(word) : ptx::load_relaxed_sys(word)) - want) < 0) ptx::nanosleep(20);
  if (fence) ptx::fence_acq_rel_sys();
}

// slot[i] = 100 use + i, use after use.  tensors: slot, words (int32). sizes: uses, first epoch.
template <HandOff mistake> void hand_on(TestTask task) {
  auto* slot = static_cast<int32_t*>(task.tensors[0]);
  auto* words = static_cast<uint32_t*>(task.tensors[1]);
  for (int use = 0; use < task.sizes[0]; ++use) {
    const uint32_t epoch = uint32_t(task.sizes[1]) + uint32_t(use) + 1;
    const auto post = [&] {
      if (mistake != HandOff::no_barrier) __syncthreads();
      if (threadIdx.x != 0) return;
      store_word(words, epoch + (mistake == HandOff::post_of_the_next), mistake != HandOff::relaxed_post, mistake != HandOff::near_post);
    };
    if (mistake != HandOff::no_credit && threadIdx.x == 0) wait(words + 32, epoch - 1, true, false);
    __syncthreads();
    if (mistake == HandOff::early_post) post();
    slot[threadIdx.x] = 100 * use + int32_t(threadIdx.x);
    if (mistake != HandOff::early_post) post();
  }
}

// out[use][i] = slot[i ^ 1].  tensors: slot, words, out (int32). sizes: uses, first epoch.
template <HandOff mistake> void take_over(TestTask task) {
  const auto* slot = static_cast<const int32_t*>(task.tensors[0]);
  auto* words = static_cast<uint32_t*>(task.tensors[1]);
  for (int use = 0; use < task.sizes[0]; ++use) {
    const uint32_t epoch = uint32_t(task.sizes[1]) + uint32_t(use) + 1;
    if (threadIdx.x == 0)
      wait(words, epoch - (mistake == HandOff::wait_for_the_last), mistake != HandOff::no_fence, mistake == HandOff::near_wait);
    if (mistake != HandOff::no_barrier_after) __syncthreads();
    if (mistake == HandOff::early_credit && threadIdx.x == 0) ptx::store_release_sys(words + 32, epoch);
    static_cast<int32_t*>(task.tensors[2])[use * blockDim.x + threadIdx.x] = slot[threadIdx.x ^ 1];
    __syncthreads();
    if (mistake != HandOff::early_credit && threadIdx.x == 0) ptx::store_release_sys(words + 32, epoch);
  }
}

constexpr TestKernel kernels[] = {
    {"hand_on", hand_on<HandOff::sound>},
    {"hand_on_no_barrier", hand_on<HandOff::no_barrier>},
    {"hand_on_relaxed_post", hand_on<HandOff::relaxed_post>},
    {"hand_on_early_post", hand_on<HandOff::early_post>},
    {"hand_on_post_of_the_next", hand_on<HandOff::post_of_the_next>},
    {"hand_on_near_post", hand_on<HandOff::near_post>},
    {"hand_on_no_credit", hand_on<HandOff::no_credit>},
    {"take_over", take_over<HandOff::sound>},
    {"take_over_no_fence", take_over<HandOff::no_fence>},
    {"take_over_near_wait", take_over<HandOff::near_wait>},
    {"take_over_no_barrier_after", take_over<HandOff::no_barrier_after>},
    {"take_over_early_credit", take_over<HandOff::early_credit>},
    {"take_over_wait_for_the_last", take_over<HandOff::wait_for_the_last>},
};

} // namespace

std::span<const TestKernel> order_kernels() { return kernels; }

} // namespace tpk::emulator
