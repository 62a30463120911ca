// emulator/barriers.cpp: where a thread is, and the barriers of a block and of a warp.
#include "emulator/block.h"
#include "emulator/shim.h"

namespace tpk::emulator {

Index thread_index() noexcept { return {current_block->thread()}; }
Index block_index() noexcept { return {current_block->index()}; }
Index block_size() noexcept { return {current_block->launch().threads}; }
Index grid_size() noexcept { return {current_block->launch().grid}; }
unsigned char* shared_memory() noexcept { return current_block->shared(); }

void sync_threads() { current_block->barrier(0, current_block->launch().threads, true, "__syncthreads", TPK_EMULATOR_PC); }
void sync_warp(uint32_t mask) { current_block->sync_warp(mask, TPK_EMULATOR_PC); }
void barrier_sync(int id, int threads) {
  current_block->barrier(static_cast<uint32_t>(id), static_cast<uint32_t>(threads), true, "barrier_sync", TPK_EMULATOR_PC);
}

} // namespace tpk::emulator
