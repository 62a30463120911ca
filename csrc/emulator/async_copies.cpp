// emulator/async_copies.cpp: cp.async: the destination is poison from the copy to the wait for its group, and then it is the waiting
// thread's own write: others need a barrier to see it.
#include "emulator/block.h"
#include "emulator/shim.h"

namespace tpk::emulator {

void cp_async(uint32_t shared, const void* global, uint32_t bytes, uint32_t read_bytes) {
  current_block->count("cp.async");
  current_block->begin_copy({shared, static_cast<const char*>(global), bytes, read_bytes}, TPK_EMULATOR_PC);
}
void cp_async_commit() { current_block->commit_copies(); }
void cp_async_wait(uint32_t pending) { current_block->wait_for_copies(pending); }
void cp_async_wait_all() { current_block->wait_for_all_copies(); }

} // namespace tpk::emulator
