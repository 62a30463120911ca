// planner/slots.h: the slot of every transfer, and whether a schedule keeps its rules; the fast path of python/terapipe/schedule/slots.py
// and check.py, which stay beside it as oracles and explain what is wrong. O(actions * ranks) time and memory for the vector clocks. Arrays
// have one entry an action, rank after rank in the order of the lists. Trap: only regular schedules are taken.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/simulator.h"

namespace terapipe::planner {

// Every action is there once, forwards of a micro ascend and backwards descend in slice on a stage, micros' backwards do not interleave, W
// comes after its I, and each link is read in the order in which it is written.
bool sound(const FlatSchedule& schedule);

// For what each action puts: how many of the receiver's actions must have ended before the put can begin, whatever the times. Empty if the
// ranks wait for each other.
std::vector<int32_t> finished_before_puts(const FlatSchedule& schedule);

struct SlotColours {
  std::vector<int32_t> slot;   // of what an action puts, or kNone
  std::vector<int32_t> counts; // a link
};

// Interval colouring of every link's transfers: a slot is free again once the receiver has ended the releasing action, as `finished` tells.
// at_most: slots of a link (0: any number); when all are held the one that is freed first is given before its release.
SlotColours colour_slots(const FlatSchedule& schedule, const std::vector<int32_t>& finished, bool resident, int32_t at_most);

} // namespace terapipe::planner
