// emulator/block.h: one block of a launch as it runs: its threads as fibers, their meetings, its shared memory and what is known of it.
// Threads run one after another, each until it has to wait; a warp goes on as long as one of its lanes can, so that its stacks stay in the
// cache. Who waits for whom is kept in bit masks. Several blocks may be at work on one host thread: one that rests lets others go on.
// Trap: everything here is called from a fiber, between two instructions of device code.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "emulator/banks.h"
#include "emulator/clocks.h"
#include "emulator/fiber.h"
#include "emulator/order.h"
#include "emulator/report.h"
#include "emulator/shadow.h"
#include "emulator/tensors.h"

namespace tpk::emulator {

inline constexpr uint32_t lanes = 32, max_threads = 1024, max_barriers = 16, max_shared_bytes = 227 << 10;
inline constexpr uint64_t most_turns = 8192; // of a wait, after which it may be one for ever
// Shared memory lies in the middle of a mapping without access, so that stray pointers near it are known for what they are.
inline constexpr size_t shared_margin = 1 << 20, shared_window = 1 << 20;
inline constexpr unsigned char poison = 0xff; // NaN in every format

// Parameters of a launch. body(params) runs one thread of the kernel. Launches of one stream of a device run one after another.
struct Launch {
  std::string kernel;
  uint32_t grid = 0, threads = 0, shared_bytes = 0;
  void (*body)(const void* params) = nullptr;
  const void* params = nullptr;
  size_t params_bytes = 0;
  uint32_t device = 0;
  uint64_t stream = 0;
};

// A block among those of all launches, and what was known when its launch began.
struct Identity {
  uint32_t stream = 0, launch = 0, block = 0, device = 0;
  Known known;
};

struct AsyncCopy {
  uint32_t offset = 0;
  const char* global = nullptr;
  uint32_t bytes = 0, read_bytes = 0;
};

// Words meant for others that a thread reads again and again, as one that waits does.
class Spin {
 public:
  struct Word {
    const uint32_t* at = nullptr;
    uint32_t value = 0, times = 0;
    Pc pc = 0;
  };

  void read(const uint32_t* at, uint32_t value, Pc pc) {
    if (turns_ == 0) words_ = {};
    Word* word = words_.data();
    while (word->at != at && word->at != nullptr && word != &words_.back()) ++word; // the last place is for whatever has none
    if (word->at != at || word->value != value) *word = {at, value, 0, pc}, turns_ = 0;
    ++word->times, ++turns_;
  }
  void moved_on() { turns_ = 0; }

  // Reads since anything was new.
  uint64_t turns() const { return turns_; }
  const Word& most_read() const {
    return *std::max_element(words_.begin(), words_.end(), [](const Word& a, const Word& b) { return a.times < b.times; });
  }

 private:
  std::array<Word, 4> words_{};
  uint64_t turns_ = 0;
};

struct Thread {
  Fiber fiber;
  const char* waits = nullptr; // for what; null: runs
  Pc pc = 0;                   // where it waits
  uint32_t barrier = 0;        // which barrier, if it is one
  bool exited = false;
  // Copies under way, in order, and where the committed groups end; both count from the thread's first copy.
  std::vector<AsyncCopy> copies;
  std::vector<size_t> copy_groups;
  size_t copies_done = 0;
  // Of other blocks: what the thread knows, what it may know after a fence, and what its last fence lets others know, that of its own
  // device (near) and any.
  Known known, observed, fenced_near, fenced;
  Spin spin;

  size_t copies_begun() const { return copies_done + copies.size(); }
};

// An mbarrier object in shared memory; its state is kept here, not there.
struct Mbarrier {
  // Copies of a thread that arrive in its place when they have landed.
  struct Tied {
    uint32_t thread;
    size_t copies_end;
    int32_t clock;
    ClockRow published;
  };

  uint32_t offset = 0, count = 0, pending = 0, phase = 0;
  uint64_t bytes = 0; // that the phase still expects from bulk copies
  ClockRow published{}, completed{};
  std::vector<uint32_t> waiting{};
  std::vector<Tied> tied{};
};

// What a lane brings to a warp-wide instruction and takes from it.
union Operands {
  uint32_t bits[16];
  float floats[16];
  uint64_t wide[8];
};

struct Warp {
  uint32_t waiting = 0;                // lanes at a warp-wide instruction
  std::array<const char*, lanes> what; // its name
  std::array<uint32_t, lanes> mask;    // its lanes
  std::array<Pc, lanes> pc;
  std::array<Operands, lanes> in, out;
  std::array<std::vector<LaneAccess>, lanes> log;
};

class Block {
 public:
  Block();
  ~Block();

  // Runs the block to its end, or to a finding that nothing can follow.
  void run(const Launch& launch, uint32_t index, bool backwards, Tensors& tensors, Report& report) {
    begin(launch, index, backwards, tensors, report, {});
    while (!go_on()) {
    }
    end();
  }
  bool stopped() const { return stopped_; } // by such a finding
  // The same in steps: go_on() returns true at the end, false when every thread that can go on would rather let other blocks do so.
  void begin(const Launch& launch, uint32_t index, bool backwards, Tensors& tensors, Report& report, const Identity& identity);
  bool go_on();
  void end();
  // Every thread that could go on only reads words that do not change.
  bool spins() const {
    return !resting_.empty() &&
           std::all_of(resting_.begin(), resting_.end(), [&](uint32_t t) { return threads_[t].spin.turns() > most_turns; });
  }
  void report_spin(const std::string& behind);

  // ---- the running thread ----
  uint32_t thread() const { return thread_; }
  uint32_t lane() const { return thread_ % lanes; }
  Warp& warp() { return warps_[thread_ / lanes]; }
  Thread& self() { return threads_[thread_]; }
  const Launch& launch() const { return *launch_; }
  uint32_t index() const { return index_; }
  void rest(); // lets others go on

  // ---- memory ----
  unsigned char* shared() const { return shared_; }
  // A plain access of device code to any address.
  void access(uintptr_t address, uint32_t bytes, Access access, bool aligned, Pc pc);
  void shared_access(uint32_t offset, uint32_t bytes, Access access, Pc pc, bool log = true);
  void global_access(uintptr_t address, uint32_t bytes, Access access, Pc pc, Scope scope = Scope::plain);
  void require_shared(uint32_t offset, uint32_t bytes, uint32_t alignment, Pc pc);
  // An access to a word that is meant for others, so never torn, at a scope.
  void strong_access(const void* word, Access access, Scope scope, Pc pc);
  void begin_copy(const AsyncCopy& copy, Pc pc);
  void commit_copies() { self().copy_groups.push_back(self().copies_begun()); }
  void wait_for_copies(size_t groups_left);
  void wait_for_all_copies() { finish_copies(self(), thread_, self().copies_begun(), clocks.now(thread_)); }

  // ---- meetings ----
  // The lanes of `mask` meet; the last one calls combine(warp), with what each brought in warp.in, and each then finds its part in
  // warp.out.
  template <class Combine> void meet(const char* what, uint32_t mask, Pc pc, Combine&& combine) {
    if (arrive_at_warp(what, mask, pc)) {
      combine(warp());
      leave_warp(mask);
    } else {
      suspend();
    }
  }
  void sync_warp(uint32_t mask, Pc pc);
  void barrier(uint32_t id, uint32_t expected, bool wait, const char* what, Pc pc);
  void make_mbarrier(uint32_t offset, uint32_t count, Pc pc);
  void drop_mbarrier(uint32_t offset, Pc pc);
  void arrive(uint32_t offset, uint32_t bytes, Pc pc); // bytes: that bulk copies will bring
  void wait_for_phase(uint32_t offset, uint32_t parity, Pc pc);
  void tie_copies(uint32_t offset, Pc pc);
  // Waits until wake() is called for this thread; `what` tells a person for what.
  void wait(const char* what, Pc pc);
  void wake(uint32_t thread);

  // ---- order among blocks (order.h) ----
  const Identity& identity() const { return identity_; }
  Known tell(); // what the thread knows of all blocks, its own included, from here on
  void learn(const Known& known) { self().known = joined(self().known, known); }
  Known known_at_the_end() const; // by any thread, of other blocks

  Clocks clocks;
  Shadow shadow;
  Banks banks;

  // ---- findings ----
  // The run goes on after a clash, but not after this:
  [[noreturn]] void fail(const char* kind, std::string what, std::string remedy, Pc pc);
  void count(const char* operation, uint64_t times = 1) { operations_[operation] += times; }

 private:
  struct BarrierState {
    uint32_t arrived = 0, expected = 0;
    std::vector<uint32_t> waiting;
    ClockRow published;
  };

  static void thread_main();
  bool arrive_at_warp(const char* what, uint32_t mask, Pc pc);
  void leave_warp(uint32_t mask);
  void suspend();
  Fiber& next();
  template <class Threads> void share_knowledge(const Threads& threads);
  void settle_banks(Warp& warp);
  void report_standstill();
  void report_clash(const Clash& clash, Access access, uint32_t offset, uint32_t bytes, Pc pc);
  void report_clash(const BlockClash& clash, Access access, uintptr_t address, uint32_t bytes, Pc pc);
  void report_clash(const OrderClash& clash, Access access, uintptr_t address, uint32_t bytes, Pc pc);
  void watched_access(OrderWatch& watch, uint64_t offset, Access access, Scope scope, uintptr_t address, uint32_t bytes, Pc pc);
  void finish_copies(Thread& thread, uint32_t index, size_t end, int32_t clock);
  Mbarrier& mbarrier(uint32_t offset, const char* what, Pc pc);
  void complete_if_done(Mbarrier& barrier);
  void land_copies(Mbarrier& barrier);
  void report_copies_left();
  bool known(const char* kind, Pc pc, Pc other_pc);

  // Read by every access: kept together.
  uintptr_t stacks_begin_ = 0, stacks_bytes_ = 0, shared_begin_ = 0, params_begin_ = 0, params_bytes_ = 0;
  unsigned char* shared_ = nullptr;
  uint32_t shared_bytes_ = 0, thread_ = 0;
  Tensors* tensors_ = nullptr;

  std::array<uint32_t, max_threads / lanes> runnable_{}; // lanes of each warp
  uint32_t runnable_warps_ = 0;
  bool backwards_ = false, stopped_ = false;
  const Launch* launch_ = nullptr;
  uint32_t index_ = 0, num_exited_ = 0;
  Identity identity_;
  std::vector<uint32_t> resting_;

  std::unique_ptr<Stacks> stacks_;
  std::unique_ptr<Thread[]> threads_;
  std::unique_ptr<Warp[]> warps_;
  std::array<BarrierState, max_barriers> barriers_;
  std::vector<Mbarrier> mbarriers_;
  ClockRow warp_clock_;
  Fiber scheduler_;
  Report* report_ = nullptr;
  std::map<const char*, uint64_t> operations_;
  unsigned char* shared_mapping_ = nullptr;
};

// The block that this host thread runs; null outside of a launch.
extern thread_local constinit Block* current_block __attribute__((tls_model("initial-exec")));

// The instruction of device code that called the function this stands in.
#define TPK_EMULATOR_PC ::tpk::emulator::to_pc(__builtin_return_address(0))

} // namespace tpk::emulator
