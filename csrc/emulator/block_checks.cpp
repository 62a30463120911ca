// emulator/block_checks.cpp: the checks of a block's accesses to memory, and what they find in words.
#include <algorithm>
#include <cstring>

#include "emulator/block.h"

namespace tpk::emulator {
namespace {

constexpr size_t most_findings = 40;

std::string span(uint32_t first, uint32_t last) {
  return first == last ? "thread " + std::to_string(first) : "threads " + std::to_string(first) + "-" + std::to_string(last);
}

std::string bytes_at(uint32_t bytes, uint32_t offset) {
  return std::to_string(bytes) + " bytes at shared offset " + std::to_string(offset);
}

const char* verb(Access access) { return access == Access::read ? "reads " : access == Access::write ? "writes " : "updates atomically "; }

} // namespace

// ---- memory -------------------------------------------------------------------------------------------------------------------

void Block::access(uintptr_t address, uint32_t bytes, Access access, bool aligned, Pc pc) {
  if (address - stacks_begin_ < stacks_bytes_) return;
  if (access != Access::read) self().spin.moved_on();
  const uintptr_t offset = address - shared_begin_;
  if (offset + shared_margin < shared_window + 2 * shared_margin) {
    require_shared(static_cast<uint32_t>(offset), bytes, aligned ? bytes : 1, pc);
    return shared_access(static_cast<uint32_t>(offset), bytes, access, pc);
  }
  if (access == Access::read && address - params_begin_ < params_bytes_) return;
  if (aligned && address % bytes != 0)
    fail("misaligned",
         verb(access) + std::to_string(bytes) + " bytes at " + tensors_->describe(address) + ", which is no multiple of " +
             std::to_string(bytes),
         "access it in smaller pieces, or align what it is part of", pc);
  global_access(address, bytes, access, pc);
}

void Block::require_shared(uint32_t offset, uint32_t bytes, uint32_t alignment, Pc pc) {
  if (offset > shared_bytes_ || bytes > shared_bytes_ - offset) {
    const auto signed_offset = static_cast<int32_t>(offset);
    fail("out of bounds",
         "accesses " + std::to_string(bytes) + " bytes at shared offset " + std::to_string(signed_offset) + "; the block has " +
             std::to_string(shared_bytes_),
         "launch with more shared memory, or check the index", pc);
  }
  if (offset % alignment != 0)
    fail("misaligned", "accesses " + bytes_at(bytes, offset) + ", which is no multiple of " + std::to_string(alignment),
         "align the rows: their stride has to be a multiple of " + std::to_string(alignment) + " bytes", pc);
}

void Block::shared_access(uint32_t offset, uint32_t bytes, Access access, Pc pc, bool log) {
  const Clash clash = shadow.access(access, thread_, clocks.seen(thread_), offset, bytes, pc);
  if (clash.kind != Clash::Kind::none) report_clash(clash, access, offset, bytes, pc);
  if (log) warp().log[lane()].push_back({offset, bytes, pc});
}

extern "C" __attribute__((visibility("hidden"))) const char _end;

void Block::global_access(uintptr_t address, uint32_t bytes, Access access, Pc pc, Scope scope) {
  const Tensors::Touch touch = tensors_->touch(address, bytes, access, index_);
  if (touch.allowed) {
    if (touch.order != nullptr) return watched_access(*touch.order, touch.offset, access, scope, address, bytes, pc);
    if (touch.clash.kind != BlockClash::Kind::none) report_clash(touch.clash, access, address, bytes, pc);
    return;
  }
  const bool write = access != Access::read;
  const bool constant = address >= reinterpret_cast<uintptr_t>(&__ehdr_start) && address < reinterpret_cast<uintptr_t>(&_end);
  if (constant && !write) return;
  const std::string what = std::to_string(bytes) + " bytes at " + tensors_->describe(address);
  if (write && tensors_->read_only(address)) fail("read-only", "writes " + what, "write to an output, or register the tensor as one", pc);
  fail("out of bounds", (write ? "writes " : "reads ") + what, "guard the access by the tensor's sizes", pc);
}

void Block::begin_copy(const AsyncCopy& copy, Pc pc) {
  require_shared(copy.offset, copy.bytes, copy.bytes, pc);
  const auto source = reinterpret_cast<uintptr_t>(copy.global);
  if (copy.read_bytes > 0) {
    if (source % copy.bytes != 0)
      fail("misaligned",
           "copies " + std::to_string(copy.bytes) + " bytes from " + tensors_->describe(source) + ", which is no multiple of that",
           "require strides that are multiples of 16 bytes, or copy in smaller pieces", pc);
    global_access(source, copy.read_bytes, Access::read, pc);
  }
  const Clash clash = shadow.begin_copy(thread_, clocks.seen(thread_), copy.offset, copy.bytes, pc);
  if (clash.kind != Clash::Kind::none) report_clash(clash, Access::write, copy.offset, copy.bytes, pc);
  std::memset(shared_ + copy.offset, poison, copy.bytes);
  warp().log[lane()].push_back({copy.offset, copy.bytes, pc});
  self().copies.push_back(copy);
}

void Block::wait_for_copies(size_t groups_left) {
  std::vector<size_t>& groups = self().copy_groups;
  if (groups.size() <= groups_left) return;
  const auto last = groups.end() - static_cast<ptrdiff_t>(groups_left);
  const size_t end = *(last - 1);
  groups.erase(groups.begin(), last);
  finish_copies(self(), thread_, end, clocks.now(thread_));
}

// The thread's copies before the end-th land, as its writes of that time.
void Block::finish_copies(Thread& thread, uint32_t index, size_t end, int32_t clock) {
  if (end <= thread.copies_done) return;
  const auto begin = thread.copies.begin(), stop = begin + static_cast<ptrdiff_t>(end - thread.copies_done);
  for (auto copy = begin; copy != stop; ++copy) {
    if (copy->read_bytes > 0) std::memcpy(shared_ + copy->offset, copy->global, copy->read_bytes);
    std::memset(shared_ + copy->offset + copy->read_bytes, 0, copy->bytes - copy->read_bytes);
    shadow.end_copy(index, clock, copy->offset, copy->bytes);
  }
  thread.copies.erase(begin, stop);
  thread.copies_done = end;
}

// ---- findings -----------------------------------------------------------------------------------------------------------------

// Counts a finding that was made at the same places before, or that is one too many.
bool Block::known(const char* kind, Pc pc, Pc other_pc) {
  for (Finding& finding : report_->findings)
    if (finding.pc == pc && finding.other_pc == other_pc && std::strcmp(finding.kind, kind) == 0) return ++finding.count, true;
  if (report_->findings.size() < most_findings) return false;
  return ++report_->findings_left_out, true;
}

void Block::fail(const char* kind, std::string what, std::string remedy, Pc pc) {
  report_->findings.push_back({kind, launch_->kernel, index_, span(thread_, thread_), std::move(what), std::move(remedy), pc});
  stopped_ = true;
  // The strings of the callers are gone with the fiber; that leak ends with the test.
  switch_fiber(self().fiber, scheduler_);
  __builtin_unreachable();
}

void Block::report_clash(const Clash& clash, Access access, uint32_t offset, uint32_t bytes, Pc pc) {
  using Kind = Clash::Kind;
  const bool same_warp = clash.other_thread / lanes == thread_ / lanes;
  const char* kind = clash.kind == Kind::race           ? same_warp ? "race in a warp" : "race"
                     : clash.kind == Kind::unwritten    ? "unwritten"
                     : clash.kind == Kind::copy_pending ? "copy pending"
                                                        : "barrier object";
  if (known(kind, pc, clash.other_pc)) return;
  const std::string other = "thread " + std::to_string(clash.other_thread);
  std::string what = verb(access) + bytes_at(bytes, offset), remedy, before;
  switch (clash.kind) {
  case Kind::race:
    what += std::string(", which ") + other + (clash.other_wrote ? " wrote" : " read") + " before, with no barrier that orders the two";
    before = other + (clash.other_wrote ? " wrote" : " read") + " it";
    remedy =
        same_warp ? "__syncwarp() between the two (a shuffle or mma orders no memory)" : "a barrier that both threads pass between the two";
    break;
  case Kind::unwritten:
    what += ", part of which nothing has written";
    remedy = "write it first, or let the copy that fills it cover it (zeros where there is no row)";
    break;
  case Kind::copy_pending:
    what += ", into which a cp.async of " + other + " is still copying";
    before = other + " began the copy";
    remedy = "let the thread that copies wait for the group (cp_async_wait), then pass a barrier";
    break;
  default:
    what += ", which holds an mbarrier that " + other + " made";
    before = other + " made it";
    remedy = "keep data and barriers apart, or invalidate the barrier first";
  }
  report_->findings.push_back(
      {kind, launch_->kernel, index_, span(thread_, thread_), std::move(what), std::move(remedy), pc, clash.other_pc, std::move(before)});
}

void Block::report_copies_left() {
  const size_t left = self().copies.size();
  if (left == 0 || known("copy pending", 0, 0)) return;
  report_->findings.push_back({"copy pending", launch_->kernel, index_, span(thread_, thread_),
                               "ends while " + std::to_string(left) + " of its copies are under way",
                               "wait for all groups before the end: the memory may be another block's by then"});
}

void Block::report_clash(const BlockClash& clash, Access access, uintptr_t address, uint32_t bytes, Pc pc) {
  const bool race = clash.kind == BlockClash::Kind::race;
  const char* kind = race ? "race between blocks" : "unwritten";
  if (known(kind, pc, 0)) return;
  std::string what = verb(access) + std::to_string(bytes) + " bytes at " + tensors_->describe(address);
  if (race)
    what += ", which " + (clash.many ? std::string("other blocks") : "block " + std::to_string(clash.other_block)) +
            (clash.other_wrote ? " wrote" : " read") + " in the same launch";
  else
    what += ", where nothing has been written yet";
  report_->findings.push_back({kind, launch_->kernel, index_, span(thread_, thread_), std::move(what),
                               race ? "let one block own it, add atomically, or read it in the next launch" : "write it first, or clear it",
                               pc});
}

void Block::report_clash(const OrderClash& clash, Access access, uintptr_t address, uint32_t bytes, Pc pc) {
  const Actor& other = clash.other;
  const bool race = clash.kind == OrderClash::Kind::race;
  const char* kind = !race ? "unwritten" : other.block == identity_.block ? "race" : "race between launches";
  if (known(kind, pc, other.pc)) return;
  std::string what = verb(access) + std::to_string(bytes) + " bytes at " + tensors_->describe(address), remedy, before;
  if (!race) {
    what += ", where nothing has been written yet";
    remedy = "write it first, or clear it";
  } else {
    const std::string who = "thread " + std::to_string(other.thread) + " of launch " + std::to_string(other.launch) + " of stream " +
                            std::to_string(other.stream) + ", device " + std::to_string(other.device) + ",";
    const char* did = clash.other_wrote ? " wrote" : " read";
    what += ", which " + who + did + " before, with nothing that orders the two";
    before = who + did + " it";
    remedy = "there: a barrier after the access, then one thread posts with release; here: a fence after the wait, then a barrier; both at "
             "the scope of both devices";
  }
  report_->findings.push_back(
      {kind, launch_->kernel, index_, span(thread_, thread_), std::move(what), std::move(remedy), pc, other.pc, std::move(before)});
}

void Block::report_spin(const std::string& behind) {
  const uint32_t thread = resting_.front();
  const Spin::Word& word = threads_[thread].spin.most_read();
  report_->findings.push_back({"standstill", launch_->kernel, index_, span(thread, thread),
                               "waits for " + tensors_->describe(reinterpret_cast<uintptr_t>(word.at)) + ", which stays " +
                                   std::to_string(word.value) + ": every block that runs waits" + behind,
                               "launch what writes the word before, or on another stream: launches of one stream run one after another",
                               word.pc});
  stopped_ = true;
}

// Every thread's position, neighbours in the same one together.
void Block::report_standstill() {
  const auto position = [&](uint32_t t) {
    const Thread& thread = threads_[t];
    if (thread.exited) return std::string("ended");
    return std::string("at ") + thread.waits + (thread.barrier != 0 ? " " + std::to_string(thread.barrier) : "") + ", " + place(thread.pc);
  };
  std::string positions;
  uint32_t waiting = launch_->threads;
  for (uint32_t first = 0, end = 0; first < launch_->threads; first = end) {
    const std::string here = position(first);
    for (end = first; end < launch_->threads && position(end) == here;) ++end;
    if (!threads_[first].exited) waiting = std::min(waiting, first);
    positions += "\n    " + span(first, end - 1) + ": " + here;
  }
  thread_ = waiting;
  report_->findings.push_back({"missed barrier", launch_->kernel, index_, span(waiting, waiting),
                               std::string("waits at ") + self().waits + " for threads that never come:" + positions,
                               "take the barrier out of the branch, or end no thread before it", self().pc});
  stopped_ = true;
}

} // namespace tpk::emulator
