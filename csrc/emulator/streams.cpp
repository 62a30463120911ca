// emulator/streams.cpp: launches of several streams at once: their blocks take turns on one host thread, wherever one of them rests.
// A stream's launches run one after another, up to three blocks of each together. Who comes next is drawn by the session's seed.
#include <time.h>

#include <algorithm>
#include <array>

#include "emulator/session.h"

namespace tpk::emulator {
namespace {

constexpr uint32_t most_resident = 3; // enough for one to wait, one to come late and one to end early

// One launch at work.
struct Work {
  Stream* stream;
  uint32_t next = 0;
  std::array<Block*, most_resident> resident{};
  Known known{}; // by blocks that are over
};

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

bool spins(const Work& work) {
  const bool full = work.next == work.stream->waiting.front().launch.grid || std::ranges::count(work.resident, nullptr) == 0;
  return full && std::ranges::all_of(work.resident, [](const Block* block) { return block == nullptr || block->spins(); });
}

// What each launch at work waits for, and what would come after it.
void report_standstill(const std::vector<Work>& works) {
  for (const Work& work : works) {
    std::string behind;
    for (size_t later = 1; later < work.stream->waiting.size(); ++later)
      behind += (later == 1 ? "; behind it in its stream, not begun: " : ", ") + work.stream->waiting[later].launch.kernel;
    const auto block = std::ranges::find_if(work.resident, [](const Block* each) { return each != nullptr; });
    (*block)->report_spin(behind);
  }
}

} // namespace

void Session::enqueue(const Launch& launch) {
  auto stream = std::find_if(streams_.begin(), streams_.end(),
                             [&](const Stream& stream) { return stream.device == launch.device && stream.handle == launch.stream; });
  if (stream == streams_.end()) {
    const auto number = static_cast<uint32_t>(streams_.size());
    stream = streams_.insert(stream, {launch.device, number, 0, launch.stream});
  }
  const auto* params = static_cast<const std::byte*>(launch.params);
  Stream::Waiting& waiting = stream->waiting.emplace_back(launch, std::vector(params, params + launch.params_bytes));
  waiting.launch.params = waiting.params.data();
}

void Session::run_held() {
  holding_ = false;
  run_streams();
}

void Session::run_streams() {
  std::vector<Work> works;
  const auto begin_launch = [&](Work& work) {
    ++work.stream->launches;
    work.next = 0, work.known = work.stream->known;
    tensors.begin_launch();
    const Launch& launch = work.stream->waiting.front().launch;
    report_.blocks[launch.kernel] += launch.grid;
  };
  for (Stream& stream : streams_)
    if (!stream.waiting.empty()) begin_launch(works.emplace_back(Work{&stream}));
  while (blocks_.size() < works.size() * most_resident) blocks_.push_back(std::make_unique<Block>());
  std::vector<Block*> free;
  for (const auto& block : blocks_) free.push_back(block.get());
  uint64_t state = seed * 2 + 1;
  const auto draw = [&](size_t below) { return (state = state * 6364136223846793005u + 1442695040888963407u, state >> 33) % below; };
  double all_wait_since = 0;
  for (uint64_t turn = 1; !works.empty(); ++turn) {
    if (turn % (most_turns / 2) == 0) {
      if (!std::ranges::all_of(works, spins))
        all_wait_since = 0;
      else if (all_wait_since == 0)
        all_wait_since = thread_seconds();
      else if (thread_seconds() - all_wait_since > patience_s) {
        report_standstill(works);
        for (Stream& stream : streams_) stream.waiting.clear();
        return;
      }
    }
    const size_t drawn = draw(works.size());
    Work& work = works[drawn];
    const Launch& launch = work.stream->waiting.front().launch;
    Block*& block = work.resident[draw(most_resident)];
    if (block == nullptr && work.next < launch.grid) {
      block = free.back(), free.pop_back();
      const uint32_t index = backwards ? launch.grid - 1 - work.next : work.next;
      block->begin(launch, index, backwards, tensors, report_,
                   {work.stream->number, work.stream->launches, ++blocks_begun_, work.stream->device, work.stream->known});
      ++work.next;
    }
    if (block == nullptr || !block->go_on()) continue;
    block->end();
    if (block->stopped()) { // nothing that follows would mean anything
      for (Stream& stream : streams_) stream.waiting.clear();
      return;
    }
    work.known = joined(work.known, block->known_at_the_end());
    free.push_back(block);
    block = nullptr;
    if (work.next < launch.grid || work.resident != std::array<Block*, most_resident>{}) continue;
    Knowledge over = work.known == nullptr ? Knowledge() : *work.known;
    over.launch_is_over(work.stream->number, work.stream->launches);
    work.stream->known = std::make_shared<const Knowledge>(std::move(over));
    work.stream->waiting.pop_front();
    if (work.stream->waiting.empty())
      works.erase(works.begin() + static_cast<ptrdiff_t>(drawn));
    else
      begin_launch(work);
  }
}

} // namespace tpk::emulator
