// emulator/session.h: launches and what they found: registered tensors, settings, and the report since it was last taken.
// Blocks of a grid run one after another, or on several host threads; a block's threads are fibers of one host thread.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator/block.h"
#include "tpk/device_limits.h"

namespace tpk::emulator {

class Session {
 public:
  Tensors tensors;
  uint32_t host_threads = 1;
  DeviceLimits device;    // that the launchers believe they have
  bool backwards = false; // threads and blocks run in the reverse order, which must not change results

  void run(const Launch& launch);
  Report take_report();

 private:
  Report report_;
  std::vector<std::unique_ptr<Block>> blocks_; // one a host thread
};

Session& session();

// What the launchers of the kernels (cuda/*_launch.cuh) take. Compiled with the kernels.
struct EmulatorLauncher {
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
                   checked(name, "bytes of shared memory", shared_bytes, 0, max_shared_bytes), body, &bound, sizeof bound});
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
