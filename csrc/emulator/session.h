// emulator/session.h: launches and what they found: registered tensors, settings, and the report since it was last taken.
// Blocks of a grid run one after another, or on several host threads; a block's threads are fibers of one host thread. Where a shared
// tensor is registered, blocks of all streams that have launches take turns on one host thread (streams.cpp).
#pragma once

#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/attention.h"
#include "emulator/block.h"
#include "tpk/device_limits.h"

namespace tpk::emulator {

// Launches of one stream of a device, in order.
struct Stream {
  uint32_t device = 0, number = 0, launches = 0;
  uint64_t handle = 0;
  struct Waiting {
    Launch launch;
    std::vector<std::byte> params; // a copy: the caller is gone when it runs
  };
  std::deque<Waiting> waiting{};
  Known known{}; // to what is launched next
};

class Session {
 public:
  Tensors tensors;
  std::unordered_map<const void*, std::vector<Publication>> published; // of each word, what its last store let others know
  uint32_t host_threads = 1;
  DeviceLimits device;    // that the launchers believe they have
  bool backwards = false; // threads and blocks run in the reverse order, which must not change results

  uint32_t seed = 0;     // of the turns that blocks of several streams take
  double patience_s = 5; // of this host thread's time, while all blocks wait; another host thread may still write what they wait for

  void run(const Launch& launch);
  // Launches wait until run_held(), which runs those of different streams at once.
  void hold() { holding_ = true; }
  void run_held();
  // Forgets the tensors and all streams.
  void clear();
  Report take_report();

 private:
  void enqueue(const Launch& launch);
  void run_streams();

  Report report_;
  std::vector<std::unique_ptr<Block>> blocks_; // one a host thread, or one of those that take turns
  std::deque<Stream> streams_;
  uint32_t blocks_begun_ = 0;
  bool holding_ = false;
};

Session& session();

// What the launchers of the kernels (cuda/*_launch.cuh) take. Compiled with the kernels.
struct EmulatorLauncher {
  cuda::Place place;

  template <class Task>
  void run(void (*kernel)(Task), const char* name, int64_t grid, int threads, int64_t shared_bytes, const Task& task) {
    struct Bound {
      void (*kernel)(Task);
      Task task;
    };
    const Bound bound{kernel, task};
    const auto body = [](const void* params) {
      const auto& call = *static_cast<const Bound*>(params);
      call.kernel(call.task);
    };
    session().run({name, checked(name, "blocks", grid, 1, 0x7fffffff), checked(name, "threads", threads, 1, max_threads),
                   checked(name, "bytes of shared memory", shared_bytes, 0, max_shared_bytes), body, &bound, sizeof bound,
                   static_cast<uint32_t>(place.device), reinterpret_cast<uintptr_t>(place.stream)});
  }

 private:
  static uint32_t checked(const char* name, const char* what, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most)
      throw std::invalid_argument("emulator: launch of " + std::string(name) + " with " + std::to_string(value) + " " + what +
                                  ", outside " + std::to_string(least) + ".." + std::to_string(most));
    return static_cast<uint32_t>(value);
  }
};

} // namespace tpk::emulator
