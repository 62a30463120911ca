// emulator/ordering.cpp: words that order what blocks of several launches do: loads and stores meant for others, fences, atomics, the
// clock. Each of them is a place where other blocks may go on first. The host, and other host threads, may use the same words.
#include <atomic>
#include <chrono>

#include "emulator/block.h"
#include "emulator/session.h"
#include "emulator/shim.h"

namespace tpk::emulator {

// ---- of a block ---------------------------------------------------------------------------------------------------------------

void Block::strong_access(const void* word, Access access, Scope scope, Pc pc) {
  rest();
  const auto address = reinterpret_cast<uintptr_t>(word);
  if (address % 4 != 0)
    fail("misaligned", "orders by 4 bytes at " + tensors_->describe(address) + ", which is no multiple of 4", "align the word", pc);
  if (access != Access::read) self().spin.moved_on();
  global_access(address, 4, access, pc, scope);
}

void Block::watched_access(OrderWatch& watch, uint64_t offset, Access access, Scope scope, uintptr_t address, uint32_t bytes, Pc pc) {
  const int32_t* seen = clocks.seen(thread_);
  const Actor actor{identity_.stream, identity_.launch, identity_.block, thread_, identity_.device, clocks.now(thread_), pc};
  const OrderClash clash = watch.access(access, scope, actor, offset, bytes, [&](const Actor& earlier) {
    if (earlier.block == identity_.block) return earlier.clock <= seen[earlier.thread];
    return self().known != nullptr && self().known->covers(earlier);
  });
  if (clash.kind != OrderClash::Kind::none) report_clash(clash, access, address, bytes, pc);
}

Known Block::tell() {
  auto all = self().known == nullptr ? std::make_shared<Knowledge>() : std::make_shared<Knowledge>(*self().known);
  all->join({identity_.stream, identity_.launch, identity_.block}, clocks.seen(thread_), launch_->threads);
  ClockRow published; // what the thread does from here on is another interval
  clocks.release(thread_, published);
  return all;
}

Known Block::known_at_the_end() const {
  Known all;
  for (uint32_t t = 0; t < launch_->threads; ++t) all = joined(all, threads_[t].known);
  return all;
}

template <class Threads> void Block::share_knowledge(const Threads& threads) {
  Known all;
  for (const uint32_t t : threads) all = joined(all, threads_[t].known);
  for (const uint32_t t : threads) threads_[t].known = all;
}
template void Block::share_knowledge(const std::vector<uint32_t>&);

// ---- instructions -------------------------------------------------------------------------------------------------------------

namespace {

std::atomic_ref<uint32_t> at(const uint32_t* word) { return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(word)); }

// What the word's last store, and the atomics since, let this thread know.
Known published_by(const void* word, Scope scope) {
  Known all;
  const auto& published = session().published;
  if (const auto found = published.find(word); found != published.end())
    for (const Publication& publication : found->second)
      if (publication.reaches(current_block->identity().device, scope)) all = joined(all, publication.known);
  return all;
}

void observe(const void* word, Scope scope) {
  Thread& thread = current_block->self();
  thread.observed = joined(thread.observed, published_by(word, scope));
}

// A fence within the device says nothing to other devices, whatever the scope of the store behind it.
void fence(Scope scope) {
  Thread& thread = current_block->self();
  current_block->learn(thread.observed);
  thread.fenced_near = current_block->tell();
  if (scope == Scope::system) thread.fenced = thread.fenced_near;
}

// After a fence, or at once with release.
void publish(const void* word, Scope scope, bool release) {
  if (release) fence(scope);
  const Thread& thread = current_block->self();
  const uint32_t device = current_block->identity().device;
  std::vector<Publication>& published = session().published[word];
  const auto tell = [&](Scope reach, const Known& known) {
    if (known == nullptr) return;
    for (Publication& earlier : published)
      if (earlier.device == device && earlier.scope == reach) return void(earlier.known = joined(earlier.known, known));
    published.push_back({device, reach, known});
  };
  tell(Scope::device, thread.fenced_near);
  if (scope == Scope::system) tell(scope, thread.fenced);
}

} // namespace

uint32_t load_word(const uint32_t* word, bool system, Pc pc) {
  const Scope scope = system ? Scope::system : Scope::device;
  current_block->strong_access(word, Access::read, scope, pc);
  observe(word, scope);
  const uint32_t value = at(word).load(std::memory_order_acquire);
  current_block->self().spin.read(word, value, pc);
  return value;
}
uint32_t load_relaxed(const uint32_t* word, bool system) { return load_word(word, system, TPK_EMULATOR_PC); }

void store_word(uint32_t* word, uint32_t value, bool release, bool system) {
  const Scope scope = system ? Scope::system : Scope::device;
  current_block->strong_access(word, Access::write, scope, TPK_EMULATOR_PC);
  session().published.erase(word);
  publish(word, scope, release);
  at(word).store(value, std::memory_order_release);
}
void fence_acq_rel() { fence(Scope::system); }

uint32_t atomic_add(uint32_t* word, uint32_t value, bool acquire_release) {
  current_block->strong_access(word, Access::atomic, Scope::device, TPK_EMULATOR_PC);
  observe(word, Scope::device);
  publish(word, Scope::device, acquire_release);
  return at(word).fetch_add(value, std::memory_order_acq_rel);
}
uint32_t atomic_exchange(uint32_t* word, uint32_t value) {
  current_block->strong_access(word, Access::atomic, Scope::device, TPK_EMULATOR_PC);
  observe(word, Scope::device);
  return at(word).exchange(value, std::memory_order_acq_rel);
}

uint64_t global_timer() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
}
void nanosleep() { current_block->rest(); }

} // namespace tpk::emulator
