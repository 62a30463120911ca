// links/heartbeat.h: one thread a process that counts up a word of every open link, whatever Python and the kernels are doing.
// A process that was stopped (SIGSTOP, a frozen cgroup) is neither dead nor disconnected; only its silent heartbeat tells.
#pragma once

#include "links/futex.h"

namespace tpk::links {

constexpr std::chrono::milliseconds kBeat{100};

/// Beats `word` until `end_heartbeat`, which returns only once it is no longer touched. A forked child beats its own words only.
void begin_heartbeat(Word& word);
void end_heartbeat(Word& word);

} // namespace tpk::links
