// planner/orders.cpp: the actions that could run next wait in a heap, the others on the one action that they lack.
#include "planner/orders.h"

#include <functional>
#include <queue>
#include <tuple>

namespace terapipe::planner {

namespace {

// Least first: W, then B and I, of early stages; then F of late stages. Different for any two ranks' next actions, as a stage has one rank.
std::pair<int32_t, int32_t> frees_before_fills(const ScheduledAction& a) {
  if (a.kind == Kind::weight_grad) return {0, a.stage};
  return a.kind == Kind::forward ? std::pair{2, -a.stage} : std::pair{1, a.stage};
}

} // namespace

std::vector<int32_t> linear_order(const FlatSchedule& schedule, bool by_ticks) {
  using Ready = std::pair<std::pair<int32_t, int32_t>, int32_t>; // key, index
  std::priority_queue<Ready, std::vector<Ready>, std::greater<>> ready;
  const size_t count = size_t(schedule.size());
  std::vector<char> done(count);
  std::vector<int32_t> waiting(count, kNone), next_waiting(count, kNone); // lists of actions that lack this one
  std::vector<int32_t> order, later;
  order.reserve(count);
  const auto push = [&](int32_t i) { ready.push({frees_before_fills(schedule.action(i)), i}); };
  const auto consider = [&](int32_t i) { // the next of its rank
    for (const int32_t need : {schedule.own_need(i), schedule.other_need(i)}) {
      if (need == FlatSchedule::missing) return; // for ever
      if (need != kNone && !done[size_t(need)]) {
        next_waiting[size_t(i)] = waiting[size_t(need)], waiting[size_t(need)] = i;
        return;
      }
    }
    if (by_ticks)
      later.push_back(i);
    else
      push(i);
  };
  for (int32_t rank = 0; rank < schedule.ranks(); ++rank)
    if (schedule.first(rank) < schedule.first(rank + 1)) consider(schedule.first(rank));
  while (true) {
    for (const int32_t i : later) push(i);
    later.clear();
    if (ready.empty()) return order;
    while (!ready.empty()) {
      const int32_t i = ready.top().second;
      ready.pop();
      order.push_back(i), done[size_t(i)] = 1;
      for (int32_t waiter = waiting[size_t(i)]; waiter != kNone; waiter = next_waiting[size_t(waiter)]) consider(waiter);
      if (i + 1 < schedule.first(schedule.rank_of(i) + 1)) consider(i + 1);
    }
  }
}

} // namespace terapipe::planner
