// emulator/shared.cpp: accesses to shared memory that device code makes by 32-bit address.
#include <cstring>

#include "emulator/block.h"
#include "emulator/shim.h"

namespace tpk::emulator {
namespace {

unsigned char* accessed(uint32_t shared, uint32_t bytes, Access access, Pc pc) {
  current_block->require_shared(shared, bytes, bytes, pc);
  current_block->shared_access(shared, bytes, access, pc);
  return current_block->shared() + shared;
}

} // namespace

uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - current_block->shared());
}
void store_shared_4(uint32_t shared, uint32_t value) { std::memcpy(accessed(shared, 4, Access::write, TPK_EMULATOR_PC), &value, 4); }
void store_shared_16(uint32_t shared, Quad value) { std::memcpy(accessed(shared, 16, Access::write, TPK_EMULATOR_PC), &value, 16); }
Quad load_shared_16(uint32_t shared) {
  Quad value;
  std::memcpy(&value, accessed(shared, 16, Access::read, TPK_EMULATOR_PC), 16);
  return value;
}

} // namespace tpk::emulator
