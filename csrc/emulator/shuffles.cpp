// emulator/shuffles.cpp: values that lanes of a warp exchange. None of them orders memory.
#include "emulator/block.h"
#include "emulator/shim.h"

namespace tpk::emulator {

uint32_t shuffle(uint32_t mask, uint32_t value, uint32_t source_lane) {
  Block& block = *current_block;
  const Pc pc = TPK_EMULATOR_PC;
  if ((mask >> source_lane & 1) == 0)
    block.fail("divergence", "shuffles from lane " + std::to_string(source_lane) + ", which is not in the mask",
               "read from lanes that take part only; what others give is undefined", pc);
  Warp& warp = block.warp();
  const uint32_t lane = block.lane();
  warp.in[lane].bits[0] = value, warp.in[lane].bits[1] = source_lane;
  block.meet("a shuffle", mask, pc, [&](Warp& warp) {
    block.count("shuffle");
    for (uint32_t i = 0; i < lanes; ++i)
      if (mask >> i & 1) warp.out[i].bits[0] = warp.in[warp.in[i].bits[1]].bits[0];
  });
  return warp.out[lane].bits[0];
}

uint32_t ballot(uint32_t mask, bool predicate) {
  Block& block = *current_block;
  Warp& warp = block.warp();
  const uint32_t lane = block.lane();
  warp.in[lane].bits[0] = predicate;
  block.meet("a vote", mask, TPK_EMULATOR_PC, [&](Warp& warp) {
    block.count("vote");
    uint32_t votes = 0;
    for (uint32_t i = 0; i < lanes; ++i) votes |= (mask >> i & 1) != 0 && warp.in[i].bits[0] != 0 ? 1u << i : 0;
    for (uint32_t i = 0; i < lanes; ++i)
      if (mask >> i & 1) warp.out[i].bits[0] = votes;
  });
  return warp.out[lane].bits[0];
}

} // namespace tpk::emulator
