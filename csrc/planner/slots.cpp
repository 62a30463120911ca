// planner/slots.cpp: vector clocks over a schedule, interval colouring of its transfers, its rules.
#include "planner/slots.h"

#include <algorithm>
#include <functional>
#include <map>
#include <queue>
#include <stdexcept>
#include <utility>

#include "planner/orders.h"

namespace terapipe::planner {

namespace {

bool complete(const FlatSchedule& schedule, int32_t stages, int32_t micros, int32_t slices) {
  for (int32_t stage = 0; stage < stages; ++stage)
    for (int32_t micro = 0; micro < micros; ++micro)
      for (int32_t slice = 0; slice < slices; ++slice) {
        const auto has = [&](Kind kind) { return schedule.find(stage, kind, micro, slice) != kNone; };
        if (!has(Kind::forward) || has(Kind::input_grad) != has(Kind::weight_grad) || has(Kind::backward) == has(Kind::input_grad))
          return false;
      }
  return true;
}

bool ordered_on_stages(const FlatSchedule& schedule, int32_t stages, int32_t micros, int32_t slices) {
  // Forwards count up from slice 0 and backwards down from the last; with every action there once, nothing else ascends or descends.
  std::vector<int32_t> next_forward(size_t(stages) * size_t(micros)), next_backward(next_forward.size(), slices - 1);
  std::vector<int32_t> open(size_t(stages), kNone); // the micro whose backward runs on the stage
  for (int32_t i = 0; i < schedule.size(); ++i) {
    const ScheduledAction& a = schedule.action(i);
    const size_t at = size_t(a.stage) * size_t(micros) + size_t(a.micro);
    if (a.kind == Kind::forward) {
      if (next_forward[at]++ != a.slice) return false;
      continue;
    }
    if (schedule.own_need(i) > i) return false; // both on this rank: F before B and I, I before W
    if (a.kind == Kind::weight_grad) continue;
    if (next_backward[at]-- != a.slice) return false;
    int32_t& micro = open[size_t(a.stage)];
    if (micro != kNone && micro != a.micro) return false;
    micro = a.slice == 0 ? kNone : a.micro;
  }
  return true;
}

bool ordered_on_links(const FlatSchedule& schedule) {
  // The receivers of what a link carries, in the order of the puts, must stand in that order in the receiver's list.
  std::vector<int32_t> last(schedule.links().size(), kNone);
  for (int32_t i = 0; i < schedule.size(); ++i) {
    const int32_t link = schedule.link_of()[size_t(i)];
    if (link == kNone) continue;
    if (schedule.receiver(i) <= last[size_t(link)]) return false;
    last[size_t(link)] = schedule.receiver(i);
  }
  return true;
}

} // namespace

bool sound(const FlatSchedule& schedule) {
  int32_t stages = 0, micros = 0, slices = 0;
  for (int32_t i = 0; i < schedule.size(); ++i) {
    const ScheduledAction& a = schedule.action(i);
    stages = std::max(stages, a.stage + 1), micros = std::max(micros, a.micro + 1), slices = std::max(slices, a.slice + 1);
  }
  return complete(schedule, stages, micros, slices) && ordered_on_stages(schedule, stages, micros, slices) && ordered_on_links(schedule);
}

std::vector<int32_t> finished_before_puts(const FlatSchedule& schedule) {
  const size_t count = size_t(schedule.size()), ranks = size_t(schedule.ranks());
  std::vector<int32_t> clocks(count * ranks), finished(count); // clocks: of each rank, how many actions have ended once this one has
  const std::vector<int32_t> order = linear_order(schedule, false);
  if (order.size() != count) return {};
  for (const int32_t i : order) {
    const int32_t rank = schedule.rank_of(i), first = schedule.first(rank);
    int32_t* clock = clocks.data() + size_t(i) * ranks;
    for (const int32_t need : {schedule.own_need(i), schedule.other_need(i), i > first ? i - 1 : kNone}) {
      if (need == kNone) continue;
      const int32_t* other = clocks.data() + size_t(need) * ranks;
      for (size_t r = 0; r < ranks; ++r) clock[r] = std::max(clock[r], other[r]);
    }
    const int32_t link = schedule.link_of()[size_t(i)];
    if (link != kNone) finished[size_t(i)] = clock[size_t(schedule.links()[size_t(link)].destination_rank)];
    clock[size_t(rank)] = i - first + 1;
  }
  return finished;
}

SlotColours colour_slots(const FlatSchedule& schedule, const std::vector<int32_t>& finished, bool resident, int32_t at_most) {
  if (finished.size() != size_t(schedule.size())) throw std::invalid_argument("one count for each action is needed");
  using Held = std::pair<int32_t, int32_t>; // position of the release in the receiver's list, slot
  struct Heaps {
    std::priority_queue<int32_t, std::vector<int32_t>, std::greater<>> free;
    std::priority_queue<Held, std::vector<Held>, std::greater<>> held;
  };
  std::vector<Heaps> heaps(schedule.links().size());
  SlotColours colours{std::vector<int32_t>(size_t(schedule.size()), kNone), std::vector<int32_t>(heaps.size())};
  for (int32_t i = 0; i < schedule.size(); ++i) {
    const int32_t link = schedule.link_of()[size_t(i)];
    if (link == kNone) continue;
    auto& [free, held] = heaps[size_t(link)];
    while (!held.empty() && held.top().first < finished[size_t(i)]) free.push(held.top().second), held.pop();
    int32_t slot;
    if (!free.empty())
      slot = free.top(), free.pop();
    else if (at_most == 0 || colours.counts[size_t(link)] < at_most)
      slot = colours.counts[size_t(link)]++;
    else
      slot = held.top().second, held.pop();
    colours.slot[size_t(i)] = slot;
    const ScheduledAction& a = schedule.action(i);
    int32_t release = schedule.receiver(i);
    if (resident && release != FlatSchedule::missing)
      release = schedule.last_backward(a.kind == Kind::forward ? a.stage + 1 : a.stage - 1, a.micro, a.slice);
    if (release < 0) throw std::invalid_argument("a transfer is never released");
    held.emplace(release - schedule.first(schedule.rank_of(release)), slot);
  }
  return colours;
}

} // namespace terapipe::planner
