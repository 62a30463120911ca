// emulator/mbarriers.cpp: mbarrier objects: phases that threads arrive at and wait for, also with asynchronous copies.
// A phase completes when its arrivals and, with expect_tx, its bytes are all there; the next begins at once with the same count. A wait for
// parity p returns when the phase of parity p has completed, so a fresh barrier lets parity 1 pass. Arriving releases, waiting acquires.
// Copies that a thread ties to a barrier (cp.async.mbarrier.arrive.noinc) end when somebody waits for it, not before.
#include <algorithm>
#include <utility>

#include "emulator/block.h"
#include "emulator/shim.h"

namespace tpk::emulator {

Mbarrier& Block::mbarrier(uint32_t offset, const char* what, Pc pc) {
  require_shared(offset, 8, 8, pc);
  const Clash clash = shadow.use_barrier(clocks.seen(thread_), offset);
  if (clash.kind == Clash::Kind::race) report_clash(clash, Access::atomic, offset, 8, pc);
  const auto found = std::find_if(mbarriers_.begin(), mbarriers_.end(), [&](const Mbarrier& m) { return m.offset == offset; });
  if (found == mbarriers_.end() || clash.kind == Clash::Kind::unwritten)
    fail("bad barrier", std::string(what) + " at shared offset " + std::to_string(offset) + ", where no mbarrier was made",
         "mbarrier_init by one thread, then a barrier of the block", pc);
  return *found;
}

void Block::complete_if_done(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.completed = std::exchange(barrier.published, {});
  barrier.pending = barrier.count;
  ++barrier.phase;
  for (const uint32_t t : barrier.waiting) wake(t);
  barrier.waiting.clear();
}

// The copies tied to the barrier arrive.
void Block::land_copies(Mbarrier& barrier) {
  for (const Mbarrier::Tied& tied : std::exchange(barrier.tied, {})) {
    finish_copies(threads_[tied.thread], tied.thread, tied.copies_end, tied.clock);
    clocks.acquire_into(barrier.published, tied.published);
    --barrier.pending;
  }
  complete_if_done(barrier);
}

void mbarrier_init(uint32_t shared, uint32_t count) {
  Block& block = *current_block;
  const Pc pc = TPK_EMULATOR_PC;
  block.require_shared(shared, 8, 8, pc);
  if (count == 0) block.fail("bad barrier", "makes an mbarrier for no arrivals", "count at least one", pc);
  block.make_mbarrier(shared, count, pc);
}
void mbarrier_invalidate(uint32_t shared) { current_block->drop_mbarrier(shared, TPK_EMULATOR_PC); }
void mbarrier_arrive(uint32_t shared) { current_block->arrive(shared, 0, TPK_EMULATOR_PC); }
void mbarrier_arrive_expect(uint32_t shared, uint32_t bytes) { current_block->arrive(shared, bytes, TPK_EMULATOR_PC); }
void mbarrier_wait(uint32_t shared, uint32_t parity) { current_block->wait_for_phase(shared, parity, TPK_EMULATOR_PC); }
void cp_async_mbarrier_arrive(uint32_t shared) { current_block->tie_copies(shared, TPK_EMULATOR_PC); }

void Block::make_mbarrier(uint32_t offset, uint32_t count, Pc pc) {
  const Clash clash = shadow.make_barrier(thread_, clocks.seen(thread_), offset, pc);
  if (clash.kind != Clash::Kind::none) report_clash(clash, Access::write, offset, 8, pc);
  std::erase_if(mbarriers_, [&](const Mbarrier& m) { return m.offset == offset; });
  mbarriers_.push_back({offset, count, count});
}

void Block::drop_mbarrier(uint32_t offset, Pc pc) {
  mbarrier(offset, "invalidates an mbarrier", pc);
  std::erase_if(mbarriers_, [&](const Mbarrier& m) { return m.offset == offset; });
  shadow.drop_barrier(offset);
}

void Block::arrive(uint32_t offset, uint32_t bytes, Pc pc) {
  Mbarrier& barrier = mbarrier(offset, "arrives", pc);
  if (barrier.pending == 0)
    fail("bad barrier", "arrives at an mbarrier at shared offset " + std::to_string(offset) + " that expects nobody more in this phase",
         "make it with the number of threads that arrive", pc);
  barrier.bytes += bytes;
  clocks.release(thread_, barrier.published);
  --barrier.pending;
  count("mbarrier arrive");
  complete_if_done(barrier);
}

void Block::wait_for_phase(uint32_t offset, uint32_t parity, Pc pc) {
  while (true) {
    Mbarrier& barrier = mbarrier(offset, "waits for an mbarrier", pc);
    if (barrier.phase % 2 == (parity & 1)) land_copies(barrier);
    if (barrier.phase % 2 != (parity & 1)) return clocks.acquire(thread_, barrier.completed);
    barrier.waiting.push_back(thread_);
    wait("an mbarrier", pc);
  }
}

void Block::tie_copies(uint32_t offset, Pc pc) {
  Mbarrier& barrier = mbarrier(offset, "ties copies to an mbarrier", pc);
  Mbarrier::Tied tied{thread_, self().copies_begun(), clocks.now(thread_), {}};
  clocks.release(thread_, tied.published);
  barrier.tied.push_back(std::move(tied));
  if (!barrier.waiting.empty()) land_copies(barrier);
}

} // namespace tpk::emulator
