// emulator/mma.cpp: mma.sync.m16n8k16 (row.col, fp32 sums) as a matrix product of the warp's fragments.
// Lane l holds, with g = l / 4 and t = l % 4:  A [16 x 16] a0 (g, 2t..), a1 (g+8, 2t..), a2 (g, 2t+8..), a3 (g+8, 2t+8..), two neighbouring
// columns a register, the first in the low half;  B [16 x 8] b0 (2t.., g), b1 (2t+8.., g), two neighbouring rows;  D [16 x 8] d0 d1 (g,
// 2t..), d2 d3 (g+8, 2t..). Products are exact in fp32 and are added to d one after another with k ascending; the hardware's order is not
// documented.
#include <bit>

#include "emulator/block.h"
#include "emulator/shim.h"

namespace tpk::emulator {
namespace {

float bf16_value(uint32_t bits) { return std::bit_cast<float>(bits << 16); }

// from_fp16 without branches, so that it becomes vector code.
float fp16_value(uint32_t bits) {
  const uint32_t magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
  const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  return std::bit_cast<float>(sign | (magnitude >= 0x7c00u << 13 ? 0x7f800000u | magnitude : finite));
}

struct Fragments {
  uint32_t a[16][16], b[16][8]; // 16 bits each
  float d[16][8];
};

#if defined(__x86_64__)
__attribute__((target_clones("default", "avx2")))
#endif
void multiply(Fragments& f, bool fp16) {
  float a[16][16], b[16][8];
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k) a[i][k] = fp16 ? fp16_value(f.a[i][k]) : bf16_value(f.a[i][k]);
  for (int k = 0; k < 16; ++k)
    for (int j = 0; j < 8; ++j) b[k][j] = fp16 ? fp16_value(f.b[k][j]) : bf16_value(f.b[k][j]);
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < 8; ++j) f.d[i][j] += a[i][k] * b[k][j];
}

FloatQuad mma(bool fp16, const FloatQuad& d, const Quad& a, uint32_t b0, uint32_t b1, Pc pc) {
  Block& block = *current_block;
  Warp& warp = block.warp();
  const uint32_t lane = block.lane();
  Operands& in = warp.in[lane];
  for (int i = 0; i < 4; ++i) in.bits[i] = a.r[i], in.floats[6 + i] = d.f[i];
  in.bits[4] = b0, in.bits[5] = b1;
  block.meet("mma_m16n8k16", ~0u, pc, [&](Warp& warp) {
    block.count("mma_m16n8k16");
    Fragments f;
    for (uint32_t l = 0; l < lanes; ++l) {
      const Operands& in = warp.in[l];
      const uint32_t g = l / 4, t = l % 4;
      for (uint32_t half = 0; half < 2; ++half) {
        for (uint32_t i = 0; i < 4; ++i) f.a[g + i % 2 * 8][2 * t + i / 2 * 8 + half] = in.bits[i] >> half * 16 & 0xffffu;
        for (uint32_t i = 0; i < 2; ++i) f.b[2 * t + i * 8 + half][g] = in.bits[4 + i] >> half * 16 & 0xffffu;
        for (uint32_t i = 0; i < 2; ++i) f.d[g + i * 8][2 * t + half] = in.floats[6 + 2 * i + half];
      }
    }
    multiply(f, fp16);
    for (uint32_t l = 0; l < lanes; ++l)
      for (uint32_t i = 0; i < 4; ++i) warp.out[l].floats[i] = f.d[l / 4 + i / 2 * 8][2 * (l % 4) + i % 2];
  });
  const Operands& out = warp.out[lane];
  return {out.floats[0], out.floats[1], out.floats[2], out.floats[3]};
}

} // namespace

FloatQuad mma_bf16(FloatQuad d, Quad a, uint32_t b0, uint32_t b1) { return mma(false, d, a, b0, b1, TPK_EMULATOR_PC); }
FloatQuad mma_fp16(FloatQuad d, Quad a, uint32_t b0, uint32_t b1) { return mma(true, d, a, b0, b1, TPK_EMULATOR_PC); }

} // namespace tpk::emulator
