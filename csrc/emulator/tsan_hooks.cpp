// emulator/tsan_hooks.cpp: device code is compiled with -fsanitize=thread, whose library is this file: each plain access comes here first.
#include "emulator/block.h"

using tpk::emulator::Access;
using tpk::emulator::current_block;

namespace {
__attribute__((always_inline)) inline void access(const void* address, uint32_t bytes, Access access, bool aligned, const void* pc) {
  if (current_block != nullptr)
    current_block->access(reinterpret_cast<uintptr_t>(address), bytes, access, aligned, tpk::emulator::to_pc(pc));
}
} // namespace

#define TPK_HOOKS(bytes)                                                                                                                   \
  void __tsan_read##bytes(void* address) { access(address, bytes, Access::read, true, __builtin_return_address(0)); }                      \
  void __tsan_write##bytes(void* address) { access(address, bytes, Access::write, true, __builtin_return_address(0)); }                    \
  void __tsan_unaligned_read##bytes(void* address) { access(address, bytes, Access::read, false, __builtin_return_address(0)); }           \
  void __tsan_unaligned_write##bytes(void* address) { access(address, bytes, Access::write, false, __builtin_return_address(0)); }

extern "C" {
TPK_HOOKS(1)
TPK_HOOKS(2)
TPK_HOOKS(4)
TPK_HOOKS(8)
TPK_HOOKS(16)
void __tsan_read_range(void* address, size_t bytes) {
  access(address, static_cast<uint32_t>(bytes), Access::read, false, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  access(address, static_cast<uint32_t>(bytes), Access::write, false, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
