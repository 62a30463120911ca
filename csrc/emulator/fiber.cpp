// emulator/fiber.cpp: the switch of stacks, by hand on x86-64, by ucontext elsewhere.
#include "emulator/fiber.h"

#include <new>
#include <sys/mman.h>

#if defined(__x86_64__)
// Callee-saved registers go to the old stack and come from the new one. The jump, unlike ret, is predicted: threads of a warp meet at one
// place.
asm(R"(
.text
.globl tpk_emulator_switch
.hidden tpk_emulator_switch
.type tpk_emulator_switch, @function
tpk_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rdx
  jmpq *%rdx
.size tpk_emulator_switch, . - tpk_emulator_switch
)");
extern "C" void tpk_emulator_switch(void** from, void** to);
#endif

namespace tpk::emulator {

#if defined(__x86_64__)

void prepare_fiber(Fiber& fiber, char*, char* stack_end, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(stack_end) & ~uintptr_t{15};
  auto* frame = reinterpret_cast<void**>(top) - 8; // six registers, the entry, and the slot of a return address that nobody uses
  for (int i = 0; i < 8; ++i) frame[i] = nullptr;
  frame[6] = reinterpret_cast<void*>(entry);
  fiber.stack_pointer = frame;
}

void switch_fiber(Fiber& from, Fiber& to) { tpk_emulator_switch(&from.stack_pointer, &to.stack_pointer); }

#else

void prepare_fiber(Fiber& fiber, char* stack_begin, char* stack_end, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack_begin;
  fiber.context.uc_stack.ss_size = static_cast<size_t>(stack_end - stack_begin);
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

#endif

Stacks::Stacks(size_t count) : bytes_(count * (stack_bytes + guard_bytes)) {
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
  for (size_t i = 0; i < count; ++i) mprotect(begin(i) - guard_bytes, guard_bytes, PROT_NONE);
}

Stacks::~Stacks() { munmap(memory_, bytes_); }

} // namespace tpk::emulator
