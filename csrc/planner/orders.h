// planner/orders.h: one order of all actions that keeps every rank's list and every need; the fast path of
// python/terapipe/schedule/orders.py, which is the oracle and explains what is wrong. O(actions * log ranks). Arrays have one entry an
// action. Trap: only regular schedules are taken.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/simulator.h"

namespace terapipe::planner {

// Indices of actions. Of those that could run next, what frees a slot comes before what fills one. by_ticks: all that can run at a tick
// come before what they make possible; else one at a time. Shorter than the schedule if the ranks wait for each other.
std::vector<int32_t> linear_order(const FlatSchedule& schedule, bool by_ticks);

} // namespace terapipe::planner
