// emulator/block.cpp: the scheduler of a block's threads, and their meetings.
#include "emulator/block.h"

#include <bit>
#include <cstring>
#include <new>
#include <sys/mman.h>

namespace tpk::emulator {

thread_local constinit Block* current_block = nullptr;

Block::Block()
    : stacks_(std::make_unique<Stacks>(max_threads)), threads_(std::make_unique<Thread[]>(max_threads)),
      warps_(std::make_unique<Warp[]>(max_threads / lanes)) {
  void* memory = mmap(nullptr, 2 * shared_margin + shared_window, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  shared_mapping_ = static_cast<unsigned char*>(memory);
  shared_ = shared_mapping_ + shared_margin;
  if (mprotect(shared_, max_shared_bytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  stacks_begin_ = stacks_->memory(), stacks_bytes_ = stacks_->bytes();
  shared_begin_ = reinterpret_cast<uintptr_t>(shared_);
}

Block::~Block() { munmap(shared_mapping_, 2 * shared_margin + shared_window); }

void Block::begin(const Launch& launch, uint32_t index, bool backwards, Tensors& tensors, Report& report, const Identity& identity) {
  launch_ = &launch, index_ = index, backwards_ = backwards, tensors_ = &tensors, report_ = &report;
  identity_ = identity;
  resting_.clear();
  params_begin_ = reinterpret_cast<uintptr_t>(launch.params), params_bytes_ = launch.params_bytes;
  shared_bytes_ = launch.shared_bytes;
  std::memset(shared_, poison, shared_bytes_);
  shadow.reset(shared_bytes_);
  clocks.reset(launch.threads);
  banks.reset();
  operations_.clear();
  mbarriers_.clear();
  for (BarrierState& barrier : barriers_) barrier = BarrierState{};
  for (uint32_t w = 0; w < launch.threads / lanes; ++w) {
    warps_[w].waiting = 0;
    for (auto& log : warps_[w].log) log.clear();
    runnable_[w] = ~0u;
  }
  runnable_warps_ = static_cast<uint32_t>((uint64_t{1} << launch.threads / lanes) - 1);
  num_exited_ = 0, stopped_ = false;
  for (uint32_t t = 0; t < launch.threads; ++t) {
    Thread& thread = threads_[t];
    thread.exited = false, thread.waits = nullptr, thread.pc = 0, thread.barrier = 0;
    thread.spin = {};
    thread.copies.clear(), thread.copy_groups.clear(), thread.copies_done = 0;
    thread.known = identity.known, thread.observed = thread.fenced_near = thread.fenced = nullptr;
    prepare_fiber(thread.fiber, stacks_->begin(t), stacks_->end(t), &Block::thread_main);
  }
  thread_ = backwards ? launch.threads - 1 : 0;
}

bool Block::go_on() {
  for (const uint32_t t : resting_) wake(t);
  resting_.clear();
  current_block = this;
  switch_fiber(scheduler_, next());
  current_block = nullptr;
  return resting_.empty() || stopped_;
}

void Block::end() {
  if (!stopped_ && num_exited_ < launch_->threads) report_standstill();
  for (uint32_t w = 0; w < launch_->threads / lanes; ++w) settle_banks(warps_[w]);
  for (const auto& [pc, counts] : banks.counts()) report_->banks[pc] += counts;
  for (const auto& [operation, times] : operations_) report_->operations[operation] += times;
}

// ---- scheduling ---------------------------------------------------------------------------------------------------------------

void Block::thread_main() {
  Block& block = *current_block;
  block.launch_->body(block.launch_->params);
  block.report_copies_left();
  block.self().exited = true;
  ++block.num_exited_;
  block.suspend();
}

// The running thread stops until it is runnable again.
void Block::suspend() {
  const uint32_t warp = thread_ / lanes;
  runnable_[warp] &= ~(1u << thread_ % lanes);
  if (runnable_[warp] == 0) runnable_warps_ &= ~(1u << warp);
  Fiber& from = self().fiber;
  switch_fiber(from, next());
}

// The thread that goes on now, one of the running thread's warp if there is one; the scheduler when there is none.
Fiber& Block::next() {
  uint32_t warp = thread_ / lanes;
  if (runnable_[warp] == 0) {
    if (runnable_warps_ == 0) return scheduler_;
    warp = static_cast<uint32_t>(backwards_ ? 31 - std::countl_zero(runnable_warps_) : std::countr_zero(runnable_warps_));
  }
  const int lane = backwards_ ? 31 - std::countl_zero(runnable_[warp]) : std::countr_zero(runnable_[warp]);
  thread_ = warp * lanes + static_cast<uint32_t>(lane);
  return self().fiber;
}

void Block::rest() {
  resting_.push_back(thread_);
  wait("a rest", 0);
}

void Block::wake(uint32_t thread) {
  runnable_[thread / lanes] |= 1u << thread % lanes;
  runnable_warps_ |= 1u << thread / lanes;
}

void Block::wait(const char* what, Pc pc) {
  self().waits = what, self().pc = pc;
  suspend();
}

// ---- meetings -----------------------------------------------------------------------------------------------------------------

bool Block::arrive_at_warp(const char* what, uint32_t mask, Pc pc) {
  Warp& meeting = warp();
  const uint32_t own = lane();
  if ((mask >> own & 1) == 0)
    fail("divergence", std::string("executes ") + what + " with a mask of lanes that leaves itself out",
         "name every lane that executes it in the mask", pc);
  meeting.what[own] = what, meeting.mask[own] = mask, meeting.pc[own] = pc;
  meeting.waiting |= 1u << own;
  if ((meeting.waiting & mask) != mask) {
    self().waits = what, self().pc = pc;
    return false;
  }
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const auto other = static_cast<uint32_t>(std::countr_zero(rest));
    if (meeting.what[other] == what && meeting.mask[other] == mask && meeting.pc[other] == pc) continue;
    // A compiler may copy one source line to two places; two lines are two instructions.
    if (meeting.what[other] == what && meeting.mask[other] == mask && place(meeting.pc[other]) == place(pc)) continue;
    fail("divergence",
         std::string("executes ") + what + " while lane " + std::to_string(other) + " of its warp executes " + meeting.what[other] + " (" +
             place(meeting.pc[other]) + ")",
         "let all lanes of a warp reach the same instruction with the same mask", pc);
  }
  if (mask == ~0u) settle_banks(meeting);
  return true;
}

void Block::leave_warp(uint32_t mask) {
  warp().waiting &= ~mask;
  runnable_[thread_ / lanes] |= mask;
  // This thread's warp is among the runnable ones: it runs.
}

void Block::sync_warp(uint32_t mask, Pc pc) {
  meet("__syncwarp", mask, pc, [&](Warp&) {
    const uint32_t first = thread_ / lanes * lanes;
    warp_clock_.assign(launch_->threads, 0);
    for (uint32_t i = 0; i < lanes; ++i)
      if (mask >> i & 1) clocks.release(first + i, warp_clock_);
    std::vector<uint32_t> present;
    for (uint32_t i = 0; i < lanes; ++i)
      if (mask >> i & 1) clocks.acquire(first + i, warp_clock_), present.push_back(first + i);
    share_knowledge(present);
  });
}

void Block::barrier(uint32_t id, uint32_t expected, bool wait, const char* what, Pc pc) {
  if (id >= max_barriers) fail("bad barrier", std::string("uses ") + what + " " + std::to_string(id), "barriers are 0 to 15", pc);
  if (expected % lanes != 0 || expected > launch_->threads)
    fail("bad barrier", std::string("expects ") + std::to_string(expected) + " threads at " + what + " " + std::to_string(id),
         "expect a multiple of 32 threads, at most those of the block (" + std::to_string(launch_->threads) + ")", pc);
  BarrierState& state = barriers_[id];
  if (state.arrived == 0) state.expected = expected;
  if (state.expected != expected)
    fail("bad barrier",
         std::string("expects ") + std::to_string(expected) + " threads at " + what + " " + std::to_string(id) + ", where others expect " +
             std::to_string(state.expected),
         "give one barrier one number of threads at a time", pc);
  clocks.release(thread_, state.published);
  if (wait) state.waiting.push_back(thread_);
  if (++state.arrived < expected) {
    self().barrier = id;
    if (wait) this->wait(what, pc);
    return;
  }
  count(what);
  std::array<uint32_t, max_threads / lanes> present{};
  for (const uint32_t t : state.waiting) {
    clocks.acquire(t, state.published);
    if (t != thread_) wake(t);
    if (++present[t / lanes] == lanes) settle_banks(warps_[t / lanes]);
  }
  share_knowledge(state.waiting);
  state.arrived = 0;
  state.waiting.clear();
  state.published.clear();
}

void Block::settle_banks(Warp& warp) { banks.settle(warp.log); }

} // namespace tpk::emulator
