// emulator/banks.cpp: turns of one warp-wide access, and how single lanes' accesses become warp-wide ones.
#include "emulator/banks.h"

#include <algorithm>
#include <array>
#include <utility>

namespace tpk::emulator {

BankCounts& Banks::at(Pc pc) {
  if (last_ == nullptr || last_pc_ != pc) last_ = &counts_[pc], last_pc_ = pc;
  return *last_;
}

void Banks::phase(BankCounts& counts, std::span<const uint32_t> offsets, uint32_t bytes) {
  uint32_t wanted[32][33]; // different words of each bank; one word goes to all lanes that want it
  std::array<uint8_t, 32> busy{};
  uint8_t turns = 1;
  for (const uint32_t offset : offsets) {
    for (uint32_t word = offset / 4; word <= (offset + bytes - 1) / 4; ++word) {
      uint32_t* words = wanted[word % 32];
      uint8_t& count = busy[word % 32];
      if (std::find(words, words + count, word) != words + count) continue;
      words[count++] = word;
      turns = std::max(turns, count);
    }
  }
  ++counts.phases;
  counts.turns += turns;
}

void Banks::warp_access(Pc pc, uint32_t bytes, std::span<const int64_t> offsets) {
  BankCounts& counts = at(pc);
  ++counts.accesses;
  const size_t lanes = bytes <= 4 ? 32 : bytes <= 8 ? 16 : 8;
  for (size_t first = 0; first < 32; first += lanes) {
    std::array<uint32_t, 32> present;
    size_t count = 0;
    for (size_t lane = first; lane < first + lanes; ++lane)
      if (offsets[lane] >= 0) present[count++] = static_cast<uint32_t>(offsets[lane]);
    if (count > 0) phase(counts, {present.data(), count}, bytes);
  }
}

void Banks::settle(std::span<std::vector<LaneAccess>> lanes) {
  std::array<int64_t, 32> offsets;
  const auto& first = lanes[0];
  const bool alike = std::all_of(lanes.begin(), lanes.end(), [&](const auto& log) {
    return std::equal(log.begin(), log.end(), first.begin(), first.end(),
                      [](const LaneAccess& a, const LaneAccess& b) { return a.pc == b.pc && a.bytes == b.bytes; });
  });
  if (alike) {
    for (size_t i = 0; i < first.size(); ++i) {
      for (size_t lane = 0; lane < 32; ++lane) offsets[lane] = lanes[lane][i].offset;
      warp_access(first[i].pc, first[i].bytes, offsets);
    }
  } else { // lanes went different ways
    std::map<std::pair<Pc, uint32_t>, std::vector<std::array<int64_t, 32>>> accesses;
    for (size_t lane = 0; lane < 32; ++lane) {
      std::map<std::pair<Pc, uint32_t>, size_t> seen;
      for (const LaneAccess& access : lanes[lane]) {
        auto& of_instruction = accesses[{access.pc, access.bytes}];
        const size_t index = seen[{access.pc, access.bytes}]++;
        if (index == of_instruction.size()) of_instruction.emplace_back().fill(-1);
        of_instruction[index][lane] = access.offset;
      }
    }
    for (const auto& [instruction, warps] : accesses)
      for (const auto& warp : warps) warp_access(instruction.first, instruction.second, warp);
  }
  for (auto& log : lanes) log.clear();
}

} // namespace tpk::emulator
