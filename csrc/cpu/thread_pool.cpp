// cpu/thread_pool.cpp: workers wait on a job counter (short spin, then futex through std::atomic::wait) and claim tasks from an atomic.
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "kernels.h"

namespace tpk::cpu {

void relax_or_yield(int64_t spins) {
  if (spins % 256 == 255) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

namespace {

constexpr int64_t page = 4096;
constexpr int64_t kept_bytes = int64_t(256) << 20; // a slot larger than this is given back after the call
constexpr int64_t spins_before_sleep = 2000;

struct Slot {
  std::byte* data = nullptr;
  int64_t bytes = 0;

  std::byte* reserve(int64_t wanted) {
    if (wanted <= bytes) return data;
    release();
    const int64_t rounded = (wanted + page - 1) / page * page;
    data = static_cast<std::byte*>(std::aligned_alloc(page, rounded));
    if (data == nullptr) throw std::bad_alloc();
    bytes = rounded;
    return data;
  }
  void release() {
    std::free(data);
    data = nullptr;
    bytes = 0;
  }
};

// Results below 2^-126 become 0 while it lives, on this thread. Probabilities of keys far below the maximum fall there, and each such
// number costs a product some hundred cycles: a model's step took half as long again while its attention was peaked.
class FlushSmallResults {
#if defined(__x86_64__)
 public:
  FlushSmallResults() { __builtin_ia32_ldmxcsr(before_ | 1u << 15); }
  ~FlushSmallResults() { __builtin_ia32_ldmxcsr(before_); }
  FlushSmallResults(const FlushSmallResults&) = delete;

 private:
  const uint32_t before_ = __builtin_ia32_stmxcsr();
#endif
};

} // namespace

struct ThreadPool::State {
  std::mutex busy; // held for a whole call
  std::vector<std::thread> threads;
  std::vector<Slot> slots;
  std::atomic<uint32_t> job{0};     // a new value wakes the workers
  std::atomic<uint32_t> running{0}; // workers still in the current job
  std::atomic<int64_t> next{0};
  std::atomic<bool> stop{false};
  int64_t tasks = 0, participants = 0;
  const std::function<void(int64_t, int64_t)>* body = nullptr;
  std::mutex error_mutex;
  std::exception_ptr error;

  void work(int64_t worker) {
    [[maybe_unused]] const FlushSmallResults flush;
    try {
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) (*body)(worker, task);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  }

  void loop(int64_t worker, uint32_t seen) {
    while (true) {
      for (int64_t spin = 0; spin < spins_before_sleep && job.load(std::memory_order_acquire) == seen; ++spin) relax_or_yield(0);
      job.wait(seen, std::memory_order_acquire);
      seen = job.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_acquire)) return;
      if (worker < participants) work(worker);
      if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) running.notify_one();
    }
  }

  void grow(int64_t wanted) {
    while (int64_t(threads.size()) + 1 < wanted) {
      const int64_t worker = int64_t(threads.size()) + 1;
      threads.emplace_back([this, worker, seen = job.load()] { loop(worker, seen); });
    }
  }

  void run(int64_t count, int64_t workers, const std::function<void(int64_t, int64_t)>& what) {
    tasks = count;
    participants = workers;
    body = &what;
    next.store(0, std::memory_order_relaxed);
    const bool alone = workers <= 1 || count <= 1;
    if (!alone) {
      running.store(uint32_t(threads.size()), std::memory_order_relaxed);
      job.fetch_add(1, std::memory_order_acq_rel);
      job.notify_all();
    }
    work(0);
    if (!alone) {
      uint32_t left;
      for (int64_t spin = 0; running.load(std::memory_order_acquire) != 0 && spin < spins_before_sleep; ++spin) relax_or_yield(spin);
      while ((left = running.load(std::memory_order_acquire)) != 0) running.wait(left, std::memory_order_acquire);
    }
    if (error) {
      const std::exception_ptr raised = error;
      error = nullptr;
      std::rethrow_exception(raised);
    }
  }
};

namespace {

std::atomic<ThreadPool*> current{nullptr};

void forget_after_fork() { current.store(nullptr); } // the parent's threads do not exist here; its memory is left alone

struct AtExit {
  ~AtExit() { delete current.exchange(nullptr); }
};

} // namespace

ThreadPool::ThreadPool() : state_(std::make_unique<State>()) {}

ThreadPool::~ThreadPool() {
  if (!state_->busy.try_lock()) { // a daemon thread is inside a call while the process exits: leave everything to the system
    (void)state_.release();
    return;
  }
  state_->stop.store(true, std::memory_order_release);
  state_->job.fetch_add(1, std::memory_order_acq_rel);
  state_->job.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
  for (Slot& slot : state_->slots) slot.release();
  state_->busy.unlock();
}

ThreadPool& ThreadPool::instance() {
  static std::once_flag registered;
  std::call_once(registered, [] { pthread_atfork(nullptr, nullptr, forget_after_fork); });
  static AtExit at_exit;
  ThreadPool* pool = current.load();
  if (pool != nullptr) return *pool;
  auto* fresh = new ThreadPool;
  if (current.compare_exchange_strong(pool, fresh)) return *fresh;
  delete fresh;
  return *pool;
}

ThreadPool::Lease::Lease(int64_t threads) : pool_(instance()), threads_(threads < 1 ? 1 : threads) {
  State& state = *pool_.state_;
  state.busy.lock();
  try {
    state.grow(threads_);
    if (int64_t(state.slots.size()) < threads_ + 1) state.slots.resize(threads_ + 1);
  } catch (...) {
    state.busy.unlock();
    throw;
  }
}

ThreadPool::Lease::~Lease() {
  State& state = *pool_.state_;
  for (Slot& slot : state.slots)
    if (slot.bytes > kept_bytes) slot.release();
  state.busy.unlock();
}

void ThreadPool::Lease::run(int64_t tasks, const std::function<void(int64_t, int64_t)>& body) { pool_.state_->run(tasks, threads_, body); }

std::byte* ThreadPool::Lease::shared_memory(int64_t bytes) { return pool_.state_->slots[0].reserve(bytes); }
std::byte* ThreadPool::Lease::memory(int64_t worker, int64_t bytes) { return pool_.state_->slots[worker + 1].reserve(bytes); }

} // namespace tpk::cpu
