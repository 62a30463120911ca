// emulator/clocks.h: which accesses of which threads are ordered: one vector clock per thread, joined where threads synchronise.
// Thread t has seen what thread u did up to seen(t)[u]. A release publishes the clock and begins a new interval; an acquire takes over
// what was published. Two accesses of different threads are ordered if the later thread has seen the interval of the earlier.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tpk::emulator {

using ClockRow = std::vector<int32_t>;

class Clocks {
 public:
  void reset(uint32_t threads) {
    threads_ = threads;
    rows_.assign(size_t{threads} * threads, 0);
    for (uint32_t t = 0; t < threads; ++t) row(t)[t] = 1;
  }
  const int32_t* seen(uint32_t thread) const { return rows_.data() + size_t{thread} * threads_; }
  int32_t now(uint32_t thread) const { return seen(thread)[thread]; }

  void release(uint32_t thread, ClockRow& published) {
    int32_t* own = row(thread);
    published.resize(threads_);
    join(published.data(), own);
    ++own[thread];
  }
  // `published` takes over another publication.
  void acquire_into(ClockRow& published, const ClockRow& other) const {
    published.resize(threads_);
    join(published.data(), other.data());
  }
  void acquire(uint32_t thread, const ClockRow& published) {
    if (!published.empty()) join(row(thread), published.data());
  }

 private:
  int32_t* row(uint32_t thread) { return rows_.data() + size_t{thread} * threads_; }
  void join(int32_t* into, const int32_t* from) const {
    for (uint32_t i = 0; i < threads_; ++i) into[i] = std::max(into[i], from[i]);
  }

  uint32_t threads_ = 0;
  std::vector<int32_t> rows_;
};

} // namespace tpk::emulator
