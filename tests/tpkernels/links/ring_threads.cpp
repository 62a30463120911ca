// ring_threads.cpp: the ring between two threads, for ThreadSanitizer, which cannot see across processes, or between two processes.
//   ring_threads ORDERS USES SLOTS TILES FIRST_EPOCH SEED SPIN_US MILLIONTHS_OF_SLEEP threads|processes
// Slots are used in a random order and released out of order, as a plan of resident slots does. Every word of a slice is checked.
// ORDERS "sound" are the real ones; "post" and "credit" publish with a relaxed store, which the sanitizer must report.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include "links/ring.h"

using namespace tpk::links;

namespace {

struct RelaxedPost : Orders {
  static constexpr auto post = std::memory_order_relaxed;
};
struct RelaxedCredit : Orders {
  static constexpr auto credit = std::memory_order_relaxed;
};

struct Sleeper {
  std::mt19937 random;
  uint32_t millionths;
  void maybe() {
    if (random() % 1'000'000 >= millionths) return;
    if (random() % 2)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 100));
  }
};

[[noreturn]] void fail(const char* what, uint32_t use, uint32_t got) {
  std::printf("%s: use %u, got %u\n", what, use, got);
  std::_Exit(2);
}

template <class TestRing> void wait(TestRing& ring, Wait wait, uint32_t use) {
  if (ring.ready(wait)) return;
  Outcome outcome;
  while ((outcome = ring.wait(wait)) == Outcome::waiting) {
  }
  if (outcome != Outcome::reached) fail("wait failed", use, static_cast<uint32_t>(outcome));
}

uint32_t word(uint32_t use, uint32_t index) { return use * 2654435761u + index; }

template <class TestRing> void run(char** arguments) {
  const auto argument = [&](int index) { return static_cast<uint32_t>(std::strtoul(arguments[index], nullptr, 10)); };
  const uint32_t uses = argument(1), slots = argument(2), tiles = argument(3), first = argument(4), seed = argument(5);
  const Geometry geometry{slots, tiles, tiles * 64, 64};
  const uint64_t bytes = Layout(geometry).bytes;
  auto* const memory = static_cast<std::byte*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  TestRing::format(memory, geometry, 1, first);
  std::mt19937 random(seed);
  std::vector<uint32_t> slot_of(uses), words_of(uses);
  for (uint32_t use = 0; use < uses; ++use) slot_of[use] = random() % slots, words_of[use] = 1 + random() % (tiles * 16);
  const Patience patience{.spin = std::chrono::microseconds(argument(6)), .silence = std::chrono::hours(1)};

  const auto send = [&] {
    TestRing ring(memory, Role::sender, patience);
    Sleeper sleeper{std::mt19937(seed + 1), argument(7)};
    for (uint32_t use = 0; use < uses; ++use) {
      const uint32_t slot = slot_of[use];
      sleeper.maybe();
      wait(ring, ring.for_credit(slot), use);
      ring.claim(slot);
      auto* const data = reinterpret_cast<uint32_t*>(ring.slot(slot));
      uint32_t posted = 0; // tiles; now and then several at once
      for (uint32_t index = 0; index < words_of[use]; ++index) {
        data[index] = word(use, index);
        const uint32_t written = (index + 1) / 16;
        if (written > posted && index + 1 < words_of[use] && sleeper.random() % 2) {
          sleeper.maybe(), ring.post(slot, posted, written);
          posted = written;
        }
      }
      ring.post(slot, posted, ring.tiles_of(words_of[use] * 4));
    }
  };
  std::thread sender;
  if (std::string(arguments[8]) == "threads")
    sender = std::thread(send);
  else if (fork() == 0)
    send(), std::_Exit(0);

  TestRing ring(memory, Role::receiver, patience);
  Sleeper sleeper{std::mt19937(seed + 2), argument(7)};
  std::vector<uint32_t> held; // uses whose slot is not released
  const auto release = [&](size_t place) {
    const uint32_t use = held[place], slot = slot_of[use];
    const auto* const data = reinterpret_cast<const uint32_t*>(ring.slot(slot));
    for (uint32_t index = 0; index < words_of[use]; ++index)
      if (data[index] != word(use, index)) fail("wrong word", use, data[index]);
    if (!ring.holds(slot)) fail("not held", use, slot);
    sleeper.maybe();
    std::memset(ring.slot(slot), 0xff, geometry.slot_bytes);
    ring.release(slot);
    held.erase(held.begin() + static_cast<std::ptrdiff_t>(place));
  };
  for (uint32_t use = 0; use < uses; ++use) {
    const uint32_t slot = slot_of[use];
    for (size_t place = 0; place < held.size(); ++place)
      if (slot_of[held[place]] == slot) release(place--);
    sleeper.maybe();
    ring.begin_use(slot);
    const auto* const data = reinterpret_cast<const uint32_t*>(ring.slot(slot));
    for (uint32_t tile = 0; tile < ring.tiles_of(words_of[use] * 4); ++tile) {
      wait(ring, ring.for_tile(slot, tile), use);
      if (data[tile * 16] != word(use, tile * 16)) fail("wrong word", use, data[tile * 16]);
    }
    held.push_back(use);
    if (sleeper.random() % 2) release(sleeper.random() % held.size());
  }
  while (!held.empty()) release(held.size() - 1);
  if (sender.joinable()) sender.join();
  munmap(memory, bytes);
}

} // namespace

int main(int count, char** arguments) {
  if (count != 10) return 1;
  const std::string orders = arguments[1];
  if (orders == "post")
    run<Ring<RelaxedPost>>(arguments + 1);
  else if (orders == "credit")
    run<Ring<RelaxedCredit>>(arguments + 1);
  else
    run<Ring<>>(arguments + 1);
  std::printf("ok\n");
}
