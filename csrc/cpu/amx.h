// cpu/amx.h: the few AMX instructions, as inline assembly with memory clobbers: g++ 12's own intrinsics tell the compiler neither that a
// tile load reads memory nor that ldtilecfg reads 64 bytes, and it drops or moves the stores before them.
#pragma once

#include "simd.h"

#if TPK_LEVEL >= TPK_LEVEL_AMX_BF16
namespace tpk::cpu::TPK_NAMESPACE {
namespace {

template <int Tile> TPK_INLINE void tile_load(const void* base, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(row_bytes), "i"(Tile) : "memory");
}
template <int Tile> TPK_INLINE void tile_store(void* base, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(base), "r"(row_bytes), "i"(Tile) : "memory");
}
template <int Tile> TPK_INLINE void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(Tile)); }
// C += A B: 16 x 16 fp32, A 16 x 32 bf16, B 16 pairs x 16.
template <int C, int A, int B> TPK_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// The tile registers of this thread for the time of a task: all eight 16 rows x 64 bytes.
class TileSession {
 public:
  TileSession() {
    Config config;
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }
  ~TileSession() { asm volatile("tilerelease"); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
};

} // namespace
} // namespace tpk::cpu::TPK_NAMESPACE
#endif
