// planner/simulator.h: runs a schedule on the clock; the twin of python/terapipe/schedule/simulate_reference.py, with equal results.
//
// A rank runs its list in order; an action starts when the rank is free and its inputs have arrived; a put starts when the action ends and,
// if its slot is still held, waits for it with the rank idle; a transfer then occupies its link and arrives a latency later. O(actions).
// Arrays have one entry an action, rank after rank in the order of the lists. `Time` is int64 (exact) or double.
// Trap: only regular schedules are taken (each action once, no stage missing or on two ranks); for others the Python twin explains.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace terapipe::planner {

enum class Kind : uint8_t { forward, backward, input_grad, weight_grad };

struct ScheduledAction {
  int32_t stage;
  Kind kind;
  int32_t micro, slice;
};

struct SimulatedLink {
  int32_t source_rank, destination_rank;
  bool forward; // carries hidden states, else gradients
};

inline constexpr int32_t kNone = -1;

// A schedule with its needs and transfers resolved to indices.
class FlatSchedule {
 public:
  FlatSchedule(std::vector<ScheduledAction> actions, const std::vector<int32_t>& rank_lengths);

  bool regular() const { return regular_; }
  int32_t ranks() const { return int32_t(first_.size()) - 1; }
  int32_t size() const { return int32_t(actions_.size()); }

  const ScheduledAction& action(int32_t index) const { return actions_[size_t(index)]; }
  int32_t first(int32_t rank) const { return first_[size_t(rank)]; } // of a rank's actions; first(ranks()) is the end
  int32_t rank_of(int32_t index) const { return rank_of_[size_t(index)]; }
  int32_t find(int32_t stage, Kind kind, int32_t micro, int32_t slice) const; // kNone if there is none
  int32_t gradient_action(int32_t stage, int32_t micro, int32_t slice) const; // I where the backward is split, else B
  int32_t last_backward(int32_t stage, int32_t micro, int32_t slice) const;   // W where the backward is split, else B

  // What an action needs; `missing` if it is not in the schedule, kNone if there is no such need.
  static constexpr int32_t missing = -2;
  int32_t own_need(int32_t index) const { return own_need_[size_t(index)]; }     // on its own stage
  int32_t other_need(int32_t index) const { return other_need_[size_t(index)]; } // on the neighbouring stage
  bool takes(int32_t index) const { return takes_[size_t(index)] != 0; }         // other_need comes over a link

  const std::vector<SimulatedLink>& links() const { return links_; } // sorted by source, destination, gradients before hidden states
  const std::vector<int32_t>& link_of() const { return link_of_; }   // that an action puts its output on, or kNone
  int32_t receiver(int32_t index) const { return receiver_[size_t(index)]; } // the action that takes what `index` puts, or missing

 private:
  bool resolve();
  int64_t cell(int32_t stage, Kind kind, int32_t micro, int32_t slice) const {
    return ((int64_t(stage) * 4 + int64_t(kind)) * micros_ + micro) * slices_ + slice;
  }

  std::vector<ScheduledAction> actions_;
  std::vector<int32_t> first_, rank_of_, index_, own_need_, other_need_, link_of_, receiver_;
  std::vector<char> takes_;
  std::vector<SimulatedLink> links_;
  int64_t stages_ = 0, micros_ = 0, slices_ = 0;
  bool regular_ = false;
};

// When the put of an action may begin, beyond its own end: once the rank has left another action.
struct PutGates {
  std::vector<int32_t> gate; // an action, kNone, or FlatSchedule::missing (never)
};

// slot[i]: of what action i puts (any number if it puts nothing); slots[link]: how many it owns, 0 is a rendezvous.
PutGates put_gates(const FlatSchedule& schedule, const std::vector<int32_t>& slot, const std::vector<int32_t>& slots, bool resident);

template <typename Time> struct SimulatedCosts {
  const Time* cost;      // an action
  const Time* occupancy; // of its link by what it puts; nullptr: 0
  const Time* latency;   // a link; nullptr: 0
};

template <typename Time> struct SimulatedTimes {
  bool finished = false;                                  // false: the ranks wait for each other
  std::vector<Time> start, end, flight_start, flight_end; // flights are meaningful where an action puts
  Time makespan = 0;
};

template <typename Time>
SimulatedTimes<Time> simulate(const FlatSchedule& schedule, const SimulatedCosts<Time>& costs, const PutGates* gates);

// What a rank holds over time: from the start of an F to the end of its last backward. size: a slice's, at its F action; nullptr: 1.
template <typename Time, typename Size> struct LiveSteps {
  std::vector<Time> time;
  std::vector<Size> held;
  Size peak = 0;
};
template <typename Time, typename Size>
LiveSteps<Time, Size> live(const FlatSchedule& schedule, int32_t rank, const Time* start, const Time* end, const Size* size);

} // namespace terapipe::planner
