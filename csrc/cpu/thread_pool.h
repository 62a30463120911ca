// cpu/thread_pool.h: a persistent pool of threads. One job at a time; the caller is worker 0 and takes part.
// The pool grows to the largest thread count ever asked for and a job uses as many workers as its call says. Trap: after fork() the child
// has none of the threads, so it forgets the parent's pool and starts its own when it first needs one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace tpk::cpu {

class ThreadPool {
 public:
  // Everything one call may touch while it holds the pool: workers and their reusable memory.
  class Lease {
   public:
    explicit Lease(int64_t threads);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    int64_t threads() const { return threads_; }
    // Runs body(worker, task) for every task in [0, tasks); tasks are claimed in ascending order. Returns when all are done.
    void run(int64_t tasks, const std::function<void(int64_t worker, int64_t task)>& body);
    // Memory that stays allocated between calls, aligned to 4096 bytes: one block for all, one for each worker.
    std::byte* shared_memory(int64_t bytes);
    std::byte* memory(int64_t worker, int64_t bytes);

   private:
    ThreadPool& pool_;
    int64_t threads_;
  };

  ThreadPool();
  ~ThreadPool();
  // The pool of this process.
  static ThreadPool& instance();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace tpk::cpu
