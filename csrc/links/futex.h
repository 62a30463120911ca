// links/futex.h: sleep on a 32-bit word that two processes share, and a processor's hint that a loop is waiting. Linux.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace tpk::links {

using Word = std::atomic<uint32_t>; // no process-private lock behind it, so it works across mappings
static_assert(Word::is_always_lock_free && sizeof(Word) == 4);

using Clock = std::chrono::steady_clock;

/// Sleeps while `word` holds `seen`, at most `limit`; the kernel compares and falls asleep in one step.
inline void futex_wait(const Word& word, uint32_t seen, std::chrono::nanoseconds limit) {
  const timespec time{static_cast<time_t>(limit.count() / 1'000'000'000), static_cast<long>(limit.count() % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0); // not FUTEX_PRIVATE: the other end is another process
}

inline void futex_wake(const Word& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

} // namespace tpk::links
