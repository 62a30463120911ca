// emulator/global.cpp: wide accesses to global memory, and atomic additions, which other host threads may make at the same time.
#include <atomic>
#include <cstring>

#include "emulator/block.h"
#include "emulator/shim.h"

namespace tpk::emulator {
namespace {

void check(const void* global, uint32_t bytes, Access access, Pc pc) {
  current_block->access(reinterpret_cast<uintptr_t>(global), bytes, access, true, pc);
}

} // namespace

Quad load_global_16(const void* global) {
  check(global, 16, Access::read, TPK_EMULATOR_PC);
  Quad value;
  std::memcpy(&value, global, 16);
  return value;
}
void store_global_16(void* global, Quad value) {
  check(global, 16, Access::write, TPK_EMULATOR_PC);
  std::memcpy(global, &value, 16);
}
void store_global_8(void* global, uint64_t value) {
  check(global, 8, Access::write, TPK_EMULATOR_PC);
  std::memcpy(global, &value, 8);
}
void red_add(float* global, float value) {
  check(global, 4, Access::atomic, TPK_EMULATOR_PC);
  std::atomic_ref<float>(*global).fetch_add(value, std::memory_order_relaxed);
}
void red_add_4(float* global, FloatQuad values) {
  check(global, 16, Access::atomic, TPK_EMULATOR_PC);
  for (int i = 0; i < 4; ++i) std::atomic_ref<float>(global[i]).fetch_add(values.f[i], std::memory_order_relaxed);
}

} // namespace tpk::emulator
