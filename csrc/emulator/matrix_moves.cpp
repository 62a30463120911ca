// emulator/matrix_moves.cpp: ldmatrix and stmatrix (m8n8, b16): 8 x 8 matrices of 16-bit elements between shared memory and a warp's
// registers. Lane 8i + r gives the address of row r of matrix i, 16 bytes at a multiple of 16. Register i of lane l is row l / 4, columns 2
// (l % 4) and one more, of matrix i; transposed, it is column l / 4, rows 2 (l % 4) and one more. With one or two matrices the other lanes'
// addresses count for nothing.
#include <cstring>

#include "emulator/block.h"
#include "emulator/shim.h"

namespace tpk::emulator {
namespace {

struct Matrix {
  uint16_t at[8][8];
};

void count_banks(Block& block, const Warp& warp, uint32_t matrices, Pc pc) {
  BankCounts& counts = block.banks.at(pc);
  ++counts.accesses;
  for (uint32_t i = 0; i < matrices; ++i) {
    std::array<uint32_t, 8> rows;
    for (uint32_t r = 0; r < 8; ++r) rows[r] = warp.in[8 * i + r].bits[0];
    block.banks.phase(counts, rows, 16);
  }
}

// Checks the lane's row, if one is asked of it, and brings its address to the meeting.
Operands& bring_row(Block& block, uint32_t shared, uint32_t matrices, Access access, Pc pc) {
  if (block.lane() < 8 * matrices) {
    block.require_shared(shared, 16, 16, pc);
    block.shared_access(shared, 16, access, pc, false);
  }
  Operands& in = block.warp().in[block.lane()];
  in.bits[0] = shared;
  return in;
}

// The element in `half` of lane l's register.
uint16_t& element(Matrix& matrix, uint32_t l, uint32_t half, bool transposed) {
  const uint32_t outer = l / 4, inner = 2 * (l % 4) + half;
  return transposed ? matrix.at[inner][outer] : matrix.at[outer][inner];
}

} // namespace

Quad ldmatrix(uint32_t shared, uint32_t matrices, bool transposed) {
  const Pc pc = TPK_EMULATOR_PC;
  Block& block = *current_block;
  bring_row(block, shared, matrices, Access::read, pc);
  block.meet(transposed ? "ldmatrix (transposed)" : "ldmatrix", ~0u, pc, [&](Warp& warp) {
    block.count("ldmatrix");
    count_banks(block, warp, matrices, pc);
    for (uint32_t i = 0; i < matrices; ++i) {
      Matrix matrix;
      for (uint32_t r = 0; r < 8; ++r) std::memcpy(matrix.at[r], block.shared() + warp.in[8 * i + r].bits[0], 16);
      for (uint32_t l = 0; l < lanes; ++l)
        warp.out[l].bits[i] = element(matrix, l, 0, transposed) | uint32_t{element(matrix, l, 1, transposed)} << 16;
    }
  });
  const Operands& out = block.warp().out[block.lane()];
  return {out.bits[0], out.bits[1], out.bits[2], out.bits[3]};
}

void stmatrix(uint32_t shared, Quad values, uint32_t matrices, bool transposed) {
  const Pc pc = TPK_EMULATOR_PC;
  Block& block = *current_block;
  Operands& in = bring_row(block, shared, matrices, Access::write, pc);
  for (uint32_t i = 0; i < 4; ++i) in.bits[1 + i] = values.r[i];
  block.meet(transposed ? "stmatrix (transposed)" : "stmatrix", ~0u, pc, [&](Warp& warp) {
    block.count("stmatrix");
    count_banks(block, warp, matrices, pc);
    for (uint32_t i = 0; i < matrices; ++i) {
      Matrix matrix;
      for (uint32_t l = 0; l < lanes; ++l)
        for (uint32_t half = 0; half < 2; ++half)
          element(matrix, l, half, transposed) = static_cast<uint16_t>(warp.in[l].bits[1 + i] >> half * 16);
      for (uint32_t r = 0; r < 8; ++r) std::memcpy(block.shared() + warp.in[8 * i + r].bits[0], matrix.at[r], 16);
    }
  });
}

} // namespace tpk::emulator
