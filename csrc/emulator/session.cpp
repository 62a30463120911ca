// emulator/session.cpp: the blocks of a grid, over host threads.
#include "emulator/session.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

namespace tpk::emulator {

Session& session() {
  static Session the_session;
  return the_session;
}

void Session::run(const Launch& launch) {
  if (launch.threads % lanes != 0)
    throw std::invalid_argument("emulator: launch of " + launch.kernel + " with " + std::to_string(launch.threads) +
                                " threads; use a multiple of 32");
  if (tensors.any_shared()) {
    enqueue(launch);
    if (!holding_) run_streams();
    return;
  }
  tensors.begin_launch();
  const uint32_t workers = std::clamp(host_threads, 1u, launch.grid);
  while (blocks_.size() < workers) blocks_.push_back(std::make_unique<Block>());
  std::vector<Report> reports(workers);
  std::atomic<uint32_t> next{0};
  std::atomic<bool> stopped{false};
  const auto work = [&](uint32_t worker) {
    Tensors own = tensors; // it remembers its last accesses
    for (uint32_t i = next++; i < launch.grid && !stopped; i = next++) {
      blocks_[worker]->run(launch, backwards ? launch.grid - 1 - i : i, backwards, own, reports[worker]);
      if (blocks_[worker]->stopped()) stopped = true;
    }
  };
  std::vector<std::thread> helpers;
  for (uint32_t worker = 1; worker < workers; ++worker) helpers.emplace_back(work, worker);
  work(0);
  for (std::thread& helper : helpers) helper.join();
  report_.blocks[launch.kernel] += launch.grid;
  for (Report& report : reports) merge(report_, std::move(report));
}

void Session::clear() {
  tensors.clear();
  published.clear();
  streams_.clear();
  holding_ = false;
}

Report Session::take_report() { return std::exchange(report_, Report{}); }

} // namespace tpk::emulator

namespace tpk::cuda {

int device_count() { return 1; }
DeviceLimits limits_of(int) { return emulator::session().device; }

} // namespace tpk::cuda
