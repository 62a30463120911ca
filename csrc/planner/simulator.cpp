// planner/simulator.cpp: resolving a schedule once, and running it as often as costs change.
#include "planner/simulator.h"

#include <algorithm>
#include <tuple>

namespace terapipe::planner {

FlatSchedule::FlatSchedule(std::vector<ScheduledAction> actions, const std::vector<int32_t>& rank_lengths) : actions_(std::move(actions)) {
  first_.push_back(0);
  for (size_t rank = 0; rank < rank_lengths.size(); ++rank) {
    first_.push_back(first_.back() + rank_lengths[rank]);
    rank_of_.insert(rank_of_.end(), size_t(rank_lengths[rank]), int32_t(rank));
  }
  regular_ = resolve();
}

int32_t FlatSchedule::find(int32_t stage, Kind kind, int32_t micro, int32_t slice) const {
  if (stage < 0 || stage >= stages_) return kNone;
  return index_[size_t(cell(stage, kind, micro, slice))];
}

int32_t FlatSchedule::gradient_action(int32_t stage, int32_t micro, int32_t slice) const {
  const int32_t split = find(stage, Kind::input_grad, micro, slice);
  return split != kNone ? split : find(stage, Kind::backward, micro, slice);
}

int32_t FlatSchedule::last_backward(int32_t stage, int32_t micro, int32_t slice) const {
  const int32_t split = find(stage, Kind::weight_grad, micro, slice);
  return split != kNone ? split : find(stage, Kind::backward, micro, slice);
}

bool FlatSchedule::resolve() {
  if (rank_of_.size() != actions_.size()) return false;
  for (const ScheduledAction& a : actions_) {
    if (a.stage < 0 || a.micro < 0 || a.slice < 0) return false;
    stages_ = std::max(stages_, int64_t(a.stage) + 1), micros_ = std::max(micros_, int64_t(a.micro) + 1);
    slices_ = std::max(slices_, int64_t(a.slice) + 1);
  }
  // The index is a dense array; a schedule so sparse that it would not fit is left to the twin. Products stay below 2^63 step by step.
  const int64_t most = 64 * int64_t(actions_.size()) + 4096;
  if (stages_ > most || micros_ > most || slices_ > most || stages_ * 4 * micros_ > most || stages_ * 4 * micros_ * slices_ > most)
    return false;
  index_.assign(size_t(stages_ * 4 * micros_ * slices_), kNone);
  std::vector<int32_t> stage_rank(size_t(stages_), kNone);
  for (int32_t i = 0; i < size(); ++i) {
    const ScheduledAction& a = actions_[size_t(i)];
    int32_t& place = index_[size_t(cell(a.stage, a.kind, a.micro, a.slice))];
    if (place != kNone) return false; // listed twice
    place = i;
    int32_t& rank = stage_rank[size_t(a.stage)];
    if (rank != kNone && rank != rank_of(i)) return false; // a stage on two ranks
    rank = rank_of(i);
  }
  if (std::find(stage_rank.begin(), stage_rank.end(), kNone) != stage_rank.end()) return false; // a stage without actions

  const size_t count = actions_.size();
  own_need_.assign(count, kNone), other_need_.assign(count, kNone), link_of_.assign(count, kNone), receiver_.assign(count, kNone);
  takes_.assign(count, 0);
  const auto needed = [](int32_t index) { return index == kNone ? missing : index; };
  std::vector<std::tuple<int32_t, int32_t, bool>> keys;
  const auto key = [&](int32_t source, int32_t destination) {
    return std::tuple(stage_rank[size_t(source)], stage_rank[size_t(destination)], destination > source);
  };
  for (int32_t s = 0; s + 1 < stages_; ++s)
    if (stage_rank[size_t(s)] != stage_rank[size_t(s) + 1]) keys.push_back(key(s, s + 1)), keys.push_back(key(s + 1, s));
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());

  std::vector<char> used(keys.size());
  for (int32_t i = 0; i < size(); ++i) {
    const auto [stage, kind, micro, slice] = actions_[size_t(i)];
    const int32_t step = kind == Kind::forward ? 1 : -1; // towards the stage that gets the output
    const size_t at = size_t(i);
    if (kind == Kind::weight_grad) {
      own_need_[at] = needed(find(stage, Kind::input_grad, micro, slice));
      continue;
    }
    if (kind != Kind::forward) own_need_[at] = needed(find(stage, Kind::forward, micro, slice));
    const int32_t before = stage - step, next = stage + step;
    if (before >= 0 && before < stages_) {
      other_need_[at] = needed(kind == Kind::forward ? find(before, Kind::forward, micro, slice) : gradient_action(before, micro, slice));
      takes_[at] = stage_rank[size_t(before)] != rank_of(i);
    }
    if (next >= 0 && next < stages_ && stage_rank[size_t(next)] != rank_of(i)) {
      const auto link = std::lower_bound(keys.begin(), keys.end(), key(stage, next)) - keys.begin();
      link_of_[at] = int32_t(link);
      used[size_t(link)] = 1;
      receiver_[at] = needed(kind == Kind::forward ? find(next, Kind::forward, micro, slice) : gradient_action(next, micro, slice));
    }
  }
  std::vector<int32_t> renumbered(keys.size());
  for (size_t link = 0; link < keys.size(); ++link) {
    if (!used[link]) continue;
    renumbered[link] = int32_t(links_.size());
    links_.push_back({std::get<0>(keys[link]), std::get<1>(keys[link]), std::get<2>(keys[link])});
  }
  for (int32_t& link : link_of_)
    if (link != kNone) link = renumbered[size_t(link)];
  return true;
}

PutGates put_gates(const FlatSchedule& schedule, const std::vector<int32_t>& slot, const std::vector<int32_t>& slots, bool resident) {
  PutGates gates{std::vector<int32_t>(size_t(schedule.size()), kNone)};
  std::vector<std::vector<int32_t>> last(slots.size()); // by link and slot: the action whose put used it last
  for (size_t link = 0; link < slots.size(); ++link) last[link].assign(size_t(slots[link]), kNone);
  for (int32_t i = 0; i < schedule.size(); ++i) {
    const int32_t link = schedule.link_of()[size_t(i)];
    if (link == kNone) continue;
    int32_t& gate = gates.gate[size_t(i)];
    if (slots[size_t(link)] == 0) { // a rendezvous: once the receiver has left the action before the one that takes it
      const int32_t taker = schedule.receiver(i);
      if (taker == FlatSchedule::missing)
        gate = FlatSchedule::missing;
      else if (taker > schedule.first(schedule.rank_of(taker)))
        gate = taker - 1;
      continue;
    }
    int32_t& previous = last[size_t(link)][size_t(slot[size_t(i)])];
    if (previous != kNone) {
      gate = schedule.receiver(previous);
      if (resident) {
        const ScheduledAction& a = schedule.action(previous);
        const int32_t stage = a.kind == Kind::forward ? a.stage + 1 : a.stage - 1;
        gate = schedule.last_backward(stage, a.micro, a.slice);
      }
      if (gate == kNone) gate = FlatSchedule::missing;
    }
    previous = i;
  }
  return gates;
}

template <typename Time>
SimulatedTimes<Time> simulate(const FlatSchedule& schedule, const SimulatedCosts<Time>& costs, const PutGates* gates) {
  const size_t count = size_t(schedule.size()), ranks = size_t(schedule.ranks());
  SimulatedTimes<Time> times;
  times.start.resize(count), times.end.resize(count), times.flight_start.resize(count), times.flight_end.resize(count);
  std::vector<Time> free_at(ranks), left_at(count), link_free(schedule.links().size());
  std::vector<char> ended(count), left(count);
  std::vector<int32_t> position(ranks), agenda(ranks);
  // Ranks to look at again once an action has been left: a rank waits for one at a time, so the lists are linked through the ranks.
  std::vector<int32_t> waiting(count, kNone), next_waiting(ranks, kNone);
  for (size_t rank = 0; rank < ranks; ++rank) position[rank] = schedule.first(int32_t(rank)), agenda[rank] = int32_t(rank);
  size_t done = 0;

  const auto wait_for = [&](int32_t action, int32_t rank) {
    if (action == FlatSchedule::missing) return; // for ever
    next_waiting[size_t(rank)] = waiting[size_t(action)];
    waiting[size_t(action)] = rank;
  };
  const auto open = [&](int32_t need) { return need != kNone && (need == FlatSchedule::missing || !left[size_t(need)]); };

  while (!agenda.empty()) {
    const int32_t rank = agenda.back();
    agenda.pop_back();
    int32_t& i = position[size_t(rank)];
    for (; i < schedule.first(rank + 1); ++i) {
      const size_t at = size_t(i);
      if (!ended[at]) {
        const int32_t own = schedule.own_need(i), other = schedule.other_need(i);
        if (open(own) || open(other)) {
          wait_for(open(own) ? own : other, rank);
          break;
        }
        Time start = free_at[size_t(rank)];
        if (schedule.takes(i)) start = std::max(start, times.flight_end[size_t(other)]);
        times.start[at] = start, times.end[at] = start + costs.cost[at];
        ended[at] = 1;
      }
      left_at[at] = times.end[at];
      const int32_t link = schedule.link_of()[at];
      if (link != kNone) {
        const int32_t gate = gates ? gates->gate[at] : kNone;
        if (open(gate)) {
          wait_for(gate, rank);
          break;
        }
        if (gate != kNone) left_at[at] = std::max(left_at[at], left_at[size_t(gate)]);
        Time& until = link_free[size_t(link)];
        const Time begin = std::max(left_at[at], until);
        until = begin + (costs.occupancy ? costs.occupancy[at] : Time(0));
        times.flight_start[at] = begin, times.flight_end[at] = until + (costs.latency ? costs.latency[link] : Time(0));
      }
      left[at] = 1;
      ++done;
      free_at[size_t(rank)] = left_at[at];
      for (int32_t waiter = waiting[at]; waiter != kNone; waiter = next_waiting[size_t(waiter)]) agenda.push_back(waiter);
    }
  }
  times.finished = done == count;
  for (const Time end : times.end) times.makespan = std::max(times.makespan, end);
  return times;
}

template <typename Time, typename Size>
LiveSteps<Time, Size> live(const FlatSchedule& schedule, int32_t rank, const Time* start, const Time* end, const Size* size) {
  LiveSteps<Time, Size> steps;
  Size held = 0;
  for (int32_t i = schedule.first(rank); i < schedule.first(rank + 1); ++i) {
    const ScheduledAction& a = schedule.action(i);
    const bool begins = a.kind == Kind::forward;
    if (!begins && i != schedule.last_backward(a.stage, a.micro, a.slice)) continue;
    const int32_t forward = begins ? i : schedule.find(a.stage, Kind::forward, a.micro, a.slice);
    const Size amount = size ? size[forward] : Size(1);
    held = begins ? held + amount : held - amount;
    steps.time.push_back(begins ? start[i] : end[i]), steps.held.push_back(held);
    steps.peak = std::max(steps.peak, held);
  }
  return steps;
}

template SimulatedTimes<int64_t> simulate(const FlatSchedule&, const SimulatedCosts<int64_t>&, const PutGates*);
template SimulatedTimes<double> simulate(const FlatSchedule&, const SimulatedCosts<double>&, const PutGates*);
template LiveSteps<int64_t, int64_t> live(const FlatSchedule&, int32_t, const int64_t*, const int64_t*, const int64_t*);
template LiveSteps<int64_t, double> live(const FlatSchedule&, int32_t, const int64_t*, const int64_t*, const double*);
template LiveSteps<double, int64_t> live(const FlatSchedule&, int32_t, const double*, const double*, const int64_t*);
template LiveSteps<double, double> live(const FlatSchedule&, int32_t, const double*, const double*, const double*);

} // namespace terapipe::planner
