// cuda/peer_protocol.cuh: the words by which a slice's rows are handed to the next GPU tile by tile.                         (kernels)
// A slot is rows in the receiver's memory, a tile is 64 of them. An epoch counts the uses of a slot and wraps: it is compared by difference
// and never set back. Use n of a slot:
//   sender    take_credit: wait for credit == n - 1, claim = n;  add_put or matmul_add_put: each tile, then its flag = n
//   receiver  begin_use: wait for the first tiles;  wait_norm or wait_matmul: tile by tile;  end_use: credit = n
// n itself lies in device memory (`uses`) and is counted up by take_credit and begin_use, so that a CUDA graph replays.
//
// Ordering. Post: all threads store, barrier, one thread stores the word with release at .sys. Wait: one thread spins by relaxed loads at
// .sys, then one fence, barrier, and only then loads of the slot, never through .nc. The spin itself does not acquire: that would drop the
// L1 cache at every turn. Only plain stores cross the link, no atomics, so PCIe will do.
// A wait that fails reports once, into words that the host sees, and stops this end: every later kernel leaves without a store, a flag or a
// credit. Nothing traps, so the context stays alive. Trap: another block may stop this end at any time, so one thread looks and the block
// follows it; threads that looked for themselves would part ways before a barrier.
#pragma once

#include "cuda/device.cuh"
#include "tpk/peer_params.h"

namespace tpk {

TPK_DEVICE bool reached(uint32_t got, uint32_t want) { return int32_t(got - want) >= 0; }

TPK_DEVICE bool stopped(const PeerSlot& slot) { return ptx::load_relaxed_gpu(slot.control + PeerControl::stopped) != 0; }

// Stops this end; the first to fail says why. One thread.
TPK_DEVICE void report(const PeerSlot& slot, PeerWho who, uint32_t tile, uint32_t want, uint32_t got) {
  ptx::exchange_relaxed_gpu(slot.control + PeerControl::stopped, 1);
  if (ptx::exchange_relaxed_gpu(slot.control + PeerControl::reporter, 1) != 0) return;
  uint32_t* text = slot.words + PeerWords::report;
  text[1] = slot.control[PeerControl::direction], text[2] = slot.index, text[3] = tile, text[4] = want, text[5] = got;
  text[6] = slot.control[PeerControl::generation];
  ptx::store_release_sys(text, uint32_t(who));
}

// Whether *word reached `want`; it ends as well when the budget is used up, another wait failed, or the host says. One thread.
TPK_DEVICE bool wait(const PeerSlot& slot, const uint32_t* word, uint32_t want, PeerWho who, uint32_t tile) {
  constexpr uint32_t look = 128; // turns between two looks, over PCIe, at why not to wait any longer
  uint32_t got = ptx::load_relaxed_sys(word);
  if (!reached(got, want)) {
    const uint64_t began = ptx::global_timer();
    for (uint32_t turn = 1; !reached(got, want); ++turn) {
      if (turn % look == 0 && (int64_t(ptx::global_timer() - began) > slot.budget_ns || stopped(slot) ||
                               ptx::load_relaxed_sys(slot.words + PeerWords::abort) != 0)) {
        report(slot, who, tile, want, got);
        return false;
      }
      ptx::nanosleep(64);
      got = ptx::load_relaxed_sys(word);
    }
  }
  ptx::fence_acq_rel_sys();
  return true;
}

// The answer of thread 0 for the whole block, which may then read what that thread acquired. `shared`: a word that nothing else uses.
template <class Ask> TPK_DEVICE bool block_follows(uint32_t shared, const Ask& ask) {
  auto* answer = reinterpret_cast<uint32_t*>(shared_memory() + shared);
  if (threadIdx.x == 0) *answer = ask();
  __syncthreads();
  return *answer != 0;
}

// Whether the block's row tile is there, and this end goes on.
TPK_DEVICE bool tile_came(const PeerSlot& slot, uint32_t tile, uint32_t shared) {
  return block_follows(shared, [&] { return !stopped(slot) && wait(slot, slot.flags + tile, *slot.uses, PeerWho::receiver, tile); });
}

// After all stores of the block: the last of the `blocks` of a row tile posts its flag. Its release covers the others' stores, which it
// acquired through `arrived`. That counter is this GPU's own, so its last user may set it back: the next use is a later kernel of the same
// stream.
TPK_DEVICE void post_tile(const PeerSlot& slot, uint32_t tile, uint32_t blocks) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (blocks > 1) {
    if (ptx::add_acq_rel_gpu(slot.arrived + tile, 1) != blocks - 1) return;
    ptx::exchange_relaxed_gpu(slot.arrived + tile, 0);
  }
  ptx::store_release_sys(slot.flags + tile, *slot.uses);
}

// ---- of one thread: credits and uses --------------------------------------------------------------------------------------------

struct PeerUse {
  PeerSlot slot;
  int32_t tiles = 0;    // begin_use
  bool release = false; // end_use
};

// Sender, before the work whose result goes into the slot, so that no multiprocessor is held while it waits.
__global__ void peer_take_credit(const __grid_constant__ PeerUse use) {
  const PeerSlot& slot = use.slot;
  if (threadIdx.x != 0 || stopped(slot)) return;
  const uint32_t used = *slot.uses;
  if (!wait(slot, slot.credit, used, PeerWho::sender, 0)) return;
  *slot.uses = used + 1;
  ptx::store_release_sys(slot.claim, used + 1);
}

// Receiver: a new use begins, and its first tiles are there. With one tile it is the gate before a kernel that waits for the others itself;
// with all of them any kernel may follow.
__global__ void peer_begin_use(const __grid_constant__ PeerUse use) {
  const PeerSlot& slot = use.slot;
  if (threadIdx.x != 0 || stopped(slot)) return;
  const uint32_t want = *slot.uses + 1;
  for (int tile = 0; tile < use.tiles; ++tile)
    if (!wait(slot, slot.flags + tile, want, PeerWho::receiver, tile)) return;
  *slot.uses = want;
}

// Receiver: report unless the slot still holds this use; with `release` it may then be written again.
__global__ void peer_end_use(const __grid_constant__ PeerUse use) {
  const PeerSlot& slot = use.slot;
  if (threadIdx.x != 0 || stopped(slot)) return;
  const uint32_t want = *slot.uses, got = ptx::load_relaxed_sys(slot.claim);
  ptx::fence_acq_rel_sys();
  if (got != want) return report(slot, PeerWho::holder, 0, want, got);
  if (use.release) ptx::store_release_sys(slot.credit, want);
}

} // namespace tpk
