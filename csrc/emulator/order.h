// emulator/order.h: which accesses to memory that launches share are ordered, also across blocks, launches and devices. A thread knows what
// other threads have done up to some moment; a release leaves its knowledge with a word, an acquire of that word takes it over, at a scope
// that includes both. Of two accesses to one place, one of them a write, the later one must know the earlier one.
// Trap: knowledge is of what ran, in the order in which it ran here; an unlucky order may show more.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "emulator/clocks.h"
#include "emulator/shadow.h"

namespace tpk::emulator {

// Who did something, and when: launch counts from 1 in its stream, block is unique, clock is the thread's.
struct Actor {
  uint32_t stream = 0, launch = 0, block = 0, thread = 0, device = 0;
  int32_t clock = 0;
  Pc pc = 0;
};

// Launches that are over, and of blocks still at work what is known of their threads.
class Knowledge {
 public:
  bool covers(const Actor& actor) const {
    if (actor.stream < over_.size() && actor.launch <= over_[actor.stream]) return true;
    const auto part = parts_.find(actor.block);
    return part != parts_.end() && part->second.clocks[actor.thread] >= actor.clock;
  }
  void launch_is_over(uint32_t stream, uint32_t launch) {
    if (over_.size() <= stream) over_.resize(stream + 1);
    over_[stream] = std::max(over_[stream], launch);
    std::erase_if(parts_, [&](const auto& part) { return part.second.stream == stream && part.second.launch <= launch; });
  }
  void join(const Actor& actor, const int32_t* clocks, uint32_t threads) {
    join_part(actor.block, {actor.stream, actor.launch, ClockRow(clocks, clocks + threads)});
  }
  void join(const Knowledge& other) {
    for (uint32_t stream = 0; stream < other.over_.size(); ++stream) launch_is_over(stream, other.over_[stream]);
    for (const auto& [block, part] : other.parts_) join_part(block, part);
  }

 private:
  struct Part {
    uint32_t stream, launch;
    ClockRow clocks;
  };

  void join_part(uint32_t block, const Part& part) {
    if (part.stream < over_.size() && part.launch <= over_[part.stream]) return;
    const auto [known, is_new] = parts_.try_emplace(block, part);
    if (is_new) return;
    for (size_t i = 0; i < part.clocks.size(); ++i) known->second.clocks[i] = std::max(known->second.clocks[i], part.clocks[i]);
  }

  std::vector<uint32_t> over_; // of each stream, its last launch that is over
  std::map<uint32_t, Part> parts_;
};

using Known = std::shared_ptr<const Knowledge>; // null: nothing

inline Known joined(const Known& a, const Known& b) {
  if (a == b || b == nullptr) return a;
  if (a == nullptr) return b;
  auto both = std::make_shared<Knowledge>(*a);
  both->join(*b);
  return both;
}

// How far an access is meant: plain ones are meant for nobody else.
enum class Scope : uint8_t { plain, device, system };

// What left its knowledge with a word.
struct Publication {
  uint32_t device;
  Scope scope;
  Known known;

  // Both sides name a scope that includes the other.
  bool reaches(uint32_t other_device, Scope other_scope) const {
    return device == other_device || (scope == Scope::system && other_scope == Scope::system);
  }
};

struct OrderClash {
  enum class Kind : uint8_t { none, unwritten, race } kind = Kind::none;
  Actor other{};
  bool other_wrote = false;
};

// The accesses to one tensor since each place was last written, kept for every two bytes. One host thread at a time.
class OrderWatch {
 public:
  static constexpr uint64_t cell_bytes = 2;

  // fresh: what is there is garbage until it is written.
  OrderWatch(uint64_t bytes, bool fresh) : cells_((bytes + cell_bytes - 1) / cell_bytes) {
    for (Cell& cell : cells_) cell.written = !fresh;
  }

  // knows(actor): whether the accessing thread knows what that one did.
  template <class Knows> OrderClash access(Access access, Scope scope, const Actor& actor, uint64_t offset, uint64_t bytes, Knows&& knows) {
    OrderClash first;
    const auto clashes = [&](const Event& earlier) { return !strong(earlier, scope, actor) && !knows(earlier.actor); };
    for (uint64_t i = offset / cell_bytes; i < (offset + bytes + cell_bytes - 1) / cell_bytes; ++i) {
      Cell& cell = cells_[i];
      OrderClash clash;
      if (!cell.written && access != Access::write) clash = {OrderClash::Kind::unwritten};
      if (cell.write.actor.block != 0 && clashes(cell.write)) clash = {OrderClash::Kind::race, cell.write.actor, true};
      if (access != Access::write)
        std::erase_if(cell.reads, [&](const Event& read) { return knows(read.actor); }); // this one stands for it
      if (access != Access::read) {
        for (const Event& read : cell.reads)
          if (clash.kind == OrderClash::Kind::none && clashes(read)) clash = {OrderClash::Kind::race, read.actor, false};
        cell.reads.clear();
        cell.write = {actor, scope};
        cell.written = true;
      } else {
        cell.reads.push_back({actor, scope});
      }
      if (first.kind == OrderClash::Kind::none) first = clash;
    }
    return first;
  }

 private:
  struct Event {
    Actor actor{};
    Scope scope = Scope::plain;
  };
  struct Cell {
    Event write;
    std::vector<Event> reads;
    bool written = true;
  };

  // Both are meant for each other, so they are ordered whoever comes first.
  static bool strong(const Event& earlier, Scope scope, const Actor& actor) {
    if (earlier.scope == Scope::plain || scope == Scope::plain) return false;
    return Publication{earlier.actor.device, earlier.scope, nullptr}.reaches(actor.device, scope);
  }

  std::vector<Cell> cells_;
};

} // namespace tpk::emulator
