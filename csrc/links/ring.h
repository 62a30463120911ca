// links/ring.h: hands slices from one process to another over shared memory. Single producer, single consumer.
//
// The memory, in parts that each end alone writes, so that no cache line has two writers:
//   Header | sender's End | receiver's End | Posts of each slot (sender) | Credit of each slot (receiver) | slots
// A slot holds one slice, in tiles of rows. An epoch counts the uses of a slot, from the header's first epoch, and wraps: no word
// is ever set back. Use number n of a slot:
//   sender    wait for credit == n - 1;  claim = n;  per tile, in order: write it, then epoch[tile] = n (release)
//   receiver  per tile, in order: wait for epoch[tile] == n (acquire), read it in place;  at last credit = n (release)
// Which slot a slice uses is the plan's business. The claim tells a receiver that reads in place whether somebody wrote beneath it.
//
// Sleep and wake need sequential consistency: a waiter announces itself and looks again, a poster posts and looks for a waiter, and
// with release and acquire alone both may miss each other. The trap: after a wait that failed, nothing may be written or posted.
#pragma once

#include <poll.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "links/futex.h"

namespace tpk::links {

constexpr uint64_t kLine = 128, kPage = 4096; // two 64-byte lines: the prefetcher fetches pairs

constexpr uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

/// `a` at or after `b`, as counters that wrap.
constexpr bool reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

struct Geometry {
  uint32_t slots = 0, tiles = 0; // tiles of a slot
  uint64_t slot_bytes = 0, tile_bytes = 0;
  constexpr bool operator==(const Geometry&) const = default;
};

struct alignas(kLine) Header {
  static constexpr uint64_t kMagic = 0x6b6e696c2d6b7074; // "tpk-link"
  static constexpr uint32_t kVersion = 1;
  uint64_t magic = kMagic;
  uint32_t version = kVersion, generation = 0, first_epoch = 0;
  Geometry geometry;
  constexpr bool operator==(const Header&) const = default;
};

struct alignas(kLine) End {
  Word waiting{0}; // 1 + index of the word this end sleeps on; 0: awake
  Word closed{0};
  Word beat{0}; // counts up while the process is scheduled at all
};

/// Byte offsets of the parts.
struct Layout {
  uint64_t ends = sizeof(Header), posts, credits, slots, posts_stride, slot_stride, bytes;
  constexpr explicit Layout(const Geometry& g) {
    posts_stride = round_up((1 + g.tiles) * sizeof(Word), kLine);
    slot_stride = round_up(g.slot_bytes, kPage);
    posts = ends + 2 * sizeof(End);
    credits = posts + g.slots * posts_stride;
    slots = round_up(credits + g.slots * kLine, kPage);
    bytes = slots + g.slots * slot_stride;
  }
};

/// Refuses a segment that is no ring of this geometry and generation.
inline void check(const Header& found, const Geometry& geometry, uint32_t generation) {
  const Header wanted{.generation = generation, .first_epoch = found.first_epoch, .geometry = geometry};
  if (found == wanted) return;
  if (found.magic != wanted.magic) throw std::invalid_argument("the segment does not begin with a link's header");
  const auto words = [](const Header& h) {
    return "version " + std::to_string(h.version) + ", generation " + std::to_string(h.generation) + ", " +
           std::to_string(h.geometry.slots) + " slots of " + std::to_string(h.geometry.slot_bytes) + " bytes in tiles of " +
           std::to_string(h.geometry.tile_bytes);
  };
  throw std::invalid_argument("the segment has " + words(found) + ", but this end expects " + words(wanted));
}

enum class Role { sender, receiver };
enum class Outcome { reached, waiting, closed, gone, silent, late };

/// How long a wait may last. `sockets` (or -1) become readable or hang up when the peer's process ends.
struct Patience {
  std::chrono::nanoseconds spin{0}, slice{50'000'000}, silence{10'000'000'000}, timeout{1'800'000'000'000};
  int socket = -1, pidfd = -1;
};

/// One wait, of which `Ring::wait` does a slice at a time. Only time in slices counts: an end that was frozen along with its peer
/// must not find the peer late.
struct Wait {
  uint32_t slot = 0, tile = 0, wanted = 0, seen = 0, beat = 0;
  std::chrono::nanoseconds waited{0}, silent{0};
  bool spun = false;
};

/// Memory orders of what publishes data. A test weakens them to see that its tools notice.
struct Orders {
  static constexpr auto post = std::memory_order_seq_cst, credit = std::memory_order_seq_cst;
};

template <class Order = Orders> class Ring {
 public:
  /// Formats `memory`, of at least Layout(geometry).bytes zeroed bytes.
  static void format(std::byte* memory, const Geometry& geometry, uint32_t generation, uint32_t first_epoch) {
    const Layout at(geometry);
    new (memory + at.ends) End[2];
    for (uint32_t slot = 0; slot < geometry.slots; ++slot) {
      for (uint32_t word = 0; word <= geometry.tiles; ++word)
        new (memory + at.posts + slot * at.posts_stride + word * sizeof(Word)) Word(first_epoch);
      new (memory + at.credits + slot * kLine) Word(first_epoch);
    }
    new (memory) Header{.generation = generation, .first_epoch = first_epoch, .geometry = geometry};
  }

  Ring(std::byte* memory, Role role, const Patience& patience)
      : memory_(memory), header_(*reinterpret_cast<const Header*>(memory)), at_(header_.geometry), role_(role), patience_(patience),
        uses_(header_.geometry.slots, header_.first_epoch), seen_beat_(peer().beat.load(std::memory_order_relaxed)) {}

  const Geometry& geometry() const { return header_.geometry; }
  std::byte* slot(uint32_t slot) const { return memory_ + at_.slots + slot * at_.slot_stride; }
  uint32_t tiles_of(uint64_t bytes) const {
    return static_cast<uint32_t>(std::max<uint64_t>(1, (bytes + geometry().tile_bytes - 1) / geometry().tile_bytes));
  }

  // ---- sender: for each use wait for the credit, claim, write and post the tiles in order

  Wait for_credit(uint32_t slot) const { return {.slot = slot, .wanted = uses_[slot]}; }

  void claim(uint32_t slot) {
    ++uses_[slot];
    claimed(slot).exchange(uses_[slot], std::memory_order_seq_cst);                // before any byte of the slot
    if (patience_.spin.count() > 0) wake(slot * geometry().tiles, epoch(slot, 0)); // waking up takes as long as writing some tiles
  }

  /// Posts tiles [first, end), all before `first` having been posted. The receiver waits for the lowest tile it lacks, so that one goes
  /// last: it then finds the others there, and the line moves to its core once.
  void post(uint32_t slot, uint32_t first, uint32_t end) {
    for (uint32_t tile = end; tile-- > first + 1;) epoch(slot, tile).store(uses_[slot], std::memory_order_release);
    epoch(slot, first).store(uses_[slot], Order::post);
    wake(slot * geometry().tiles + first, epoch(slot, first));
  }

  // ---- receiver: for each use wait for the tiles, read, release

  /// The use that begins now; its tiles are waited for one by one with `for_tile`.
  void begin_use(uint32_t slot) { ++uses_[slot]; }

  Wait for_tile(uint32_t slot, uint32_t tile) const { return {.slot = slot, .tile = tile, .wanted = uses_[slot]}; }

  /// Whether the slot still holds what this use took: it is held, and nobody has begun to write the next.
  bool holds(uint32_t slot) const {
    return claimed(slot).load(std::memory_order_seq_cst) == uses_[slot] && credit(slot).load(std::memory_order_relaxed) + 1 == uses_[slot];
  }

  void release(uint32_t slot) {
    credit(slot).store(uses_[slot], Order::credit);
    wake(slot, credit(slot));
  }

  // ---- both

  bool ready(const Wait& wait) const { return reached(word_of(wait).load(std::memory_order_acquire), wait.wanted); }

  /// Waits for at most one slice: `waiting` means come again (after a look at signals), anything after it that the peer will not come.
  Outcome wait(Wait& wait) {
    const Word& word = word_of(wait);
    if (!wait.spun && spin(word, wait.wanted)) return Outcome::reached;
    wait.spun = true;
    const auto began = Clock::now();
    mine().waiting.store(1 + index_of(wait), std::memory_order_seq_cst);
    wait.seen = word.load(std::memory_order_seq_cst);
    auto outcome = Outcome::reached;
    if (!reached(wait.seen, wait.wanted)) {
      outcome = trouble(wait);
      if (outcome == Outcome::waiting) futex_wait(word, wait.seen, patience_.slice);
    }
    mine().waiting.store(0, std::memory_order_relaxed);
    const auto slept = std::min<std::chrono::nanoseconds>(Clock::now() - began, 2 * patience_.slice);
    wait.waited += slept, wait.silent += slept;
    // What came before the peer went is still good.
    wait.seen = word.load(std::memory_order_acquire);
    if (reached(wait.seen, wait.wanted)) return Outcome::reached;
    if (role_ == Role::receiver && claimed(wait.slot).load(std::memory_order_relaxed) == wait.wanted)
      wait.spun = false; // it is being written
    return outcome;
  }

  /// Tells the peer that nothing more will come from here, and ends this end's sleep, if another thread of it waits.
  void close() {
    mine().closed.store(1, std::memory_order_seq_cst);
    for (const Role role : {Role::sender, Role::receiver}) {
      const uint32_t asleep = end(role).waiting.load(std::memory_order_seq_cst);
      if (asleep == 0) continue;
      const uint32_t index = asleep - 1, tiles = geometry().tiles;
      futex_wake(role == Role::sender ? credit(index) : epoch(index / tiles, index % tiles));
    }
  }

  Word& beat() { return mine().beat; }
  uint32_t peer_beat() const { return peer().beat.load(std::memory_order_relaxed); }
  /// Whether the peer's process has ended, without having closed the link.
  bool peer_gone() const {
    pollfd gone[2] = {{patience_.socket, POLLIN, 0}, {patience_.pidfd, POLLIN, 0}}; // poll passes over -1; nobody sends on the socket
    return peer().closed.load(std::memory_order_seq_cst) == 0 && poll(gone, 2, 0) > 0;
  }

 private:
  End& end(Role role) const { return reinterpret_cast<End*>(memory_ + at_.ends)[static_cast<int>(role)]; }
  End& mine() const { return end(role_); }
  End& peer() const { return end(role_ == Role::sender ? Role::receiver : Role::sender); }
  Word& claimed(uint32_t slot) const { return *reinterpret_cast<Word*>(memory_ + at_.posts + slot * at_.posts_stride); }
  Word& epoch(uint32_t slot, uint32_t tile) const { return (&claimed(slot))[1 + tile]; }
  Word& credit(uint32_t slot) const { return *reinterpret_cast<Word*>(memory_ + at_.credits + slot * kLine); }

  // A sender only ever waits for credits, a receiver for epochs.
  Word& word_of(const Wait& wait) const { return role_ == Role::sender ? credit(wait.slot) : epoch(wait.slot, wait.tile); }
  uint32_t index_of(const Wait& wait) const { return role_ == Role::sender ? wait.slot : wait.slot * geometry().tiles + wait.tile; }

  void wake(uint32_t index, const Word& word) const {
    if (peer().waiting.load(std::memory_order_seq_cst) == 1 + index) futex_wake(word);
  }

  bool spin(const Word& word, uint32_t wanted) const {
    if (patience_.spin.count() == 0) return false;
    const auto until = Clock::now() + patience_.spin;
    do {
      for (int turn = 0; turn < 32; ++turn) {
        if (reached(word.load(std::memory_order_acquire), wanted)) return true;
        pause();
      }
    } while (Clock::now() < until);
    return false;
  }

  Outcome trouble(Wait& wait) {
    if (peer().closed.load(std::memory_order_seq_cst) != 0) return Outcome::closed;
    if (peer_gone()) return Outcome::gone;
    const uint32_t beat = peer_beat();
    if (beat != seen_beat_) seen_beat_ = beat, wait.silent = {};
    if (wait.silent >= patience_.silence) return Outcome::silent;
    return wait.waited >= patience_.timeout ? Outcome::late : Outcome::waiting;
  }

  std::byte* memory_;
  const Header header_; // a copy: what the geometry says must not change under the feet
  const Layout at_;
  const Role role_;
  const Patience patience_;
  std::vector<uint32_t> uses_; // of each slot, by this end
  uint32_t seen_beat_;
};

} // namespace tpk::links
