// emulator/report.h: what a launch found and counted, and how it reads.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "emulator/banks.h"

namespace tpk::emulator {

// One mistake, as often as it was seen at these two places.
struct Finding {
  const char* kind; // "race", "unwritten", "out of bounds", ...
  std::string kernel;
  uint32_t block = 0;
  std::string threads; // "thread 3", "threads 0-31"
  std::string what;    // a sentence without its subject: "reads 4 bytes at shared offset 128, which ..."
  std::string remedy;
  Pc pc = 0, other_pc = 0;
  std::string other{}; // what happened at other_pc
  uint64_t count = 1;

  std::string text() const; // with source lines
};

struct Report {
  std::vector<Finding> findings;
  uint64_t findings_left_out = 0;
  std::map<Pc, BankCounts> banks;
  std::map<std::string, uint64_t> operations; // warp-wide instructions and barriers executed
  std::map<std::string, uint64_t> blocks;     // that ran, of each kernel
};

// Findings at the same places become one.
void merge(Report& into, Report&& from);

// Source line of an instruction, and of the calls it was inlined into, innermost first: "csrc/cuda/a.cuh:12 < csrc/cuda/b.cuh:80".
std::string place(Pc pc);
// Looks up many at once, which is much faster.
void find_places(const std::vector<Pc>& pcs);

extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start; // the linker's name for the start of this module

inline Pc to_pc(const void* instruction) {
  return static_cast<Pc>(reinterpret_cast<uintptr_t>(instruction) - reinterpret_cast<uintptr_t>(&__ehdr_start));
}

} // namespace tpk::emulator
