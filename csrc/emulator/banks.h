// emulator/banks.h: bank conflicts of shared memory, counted for each instruction.
// 32 banks of 4 bytes. A warp's access is served in phases of 128 bytes: all lanes at once up to 4 bytes each, half a warp of 8, a quarter
// of 16; ldmatrix and stmatrix one phase a matrix. A phase takes as many turns as the busiest bank has different words; one turn is the
// least.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "emulator/shadow.h"

namespace tpk::emulator {

struct BankCounts {
  uint64_t accesses = 0; // by whole warps
  uint64_t phases = 0;   // the least number of turns
  uint64_t turns = 0;

  BankCounts& operator+=(const BankCounts& other) {
    accesses += other.accesses, phases += other.phases, turns += other.turns;
    return *this;
  }
};

// One lane's access to shared memory, kept until the warp meets again.
struct LaneAccess {
  uint32_t offset = 0, bytes = 0;
  Pc pc = 0;
};

class Banks {
 public:
  void reset() { counts_.clear(), last_ = nullptr; }
  // One phase: the lanes that take part, `bytes` each, at these offsets.
  void phase(BankCounts& counts, std::span<const uint32_t> offsets, uint32_t bytes);
  BankCounts& at(Pc pc);
  // Pairs up the lanes' accesses since the warp last met, the n-th of an instruction with the n-th of the other lanes, and empties the
  // logs.
  void settle(std::span<std::vector<LaneAccess>> lanes);
  const std::map<Pc, BankCounts>& counts() const { return counts_; }

 private:
  void warp_access(Pc pc, uint32_t bytes, std::span<const int64_t> offsets);

  std::map<Pc, BankCounts> counts_;
  BankCounts* last_ = nullptr;
  Pc last_pc_ = 0;
};

} // namespace tpk::emulator
