// emulator/fiber.h: one thread of a block is a fiber: its own stack, switched to and from by hand within one host thread.
// A switch costs about five nanoseconds on x86-64 (six registers and a jump); elsewhere ucontext does it, slower. Trap: a fiber that is
// given up never unwinds, so device code must not own anything.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace tpk::emulator {

struct Fiber {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
};

// Lets `fiber` begin in `entry`, which never returns, on the stack that ends at `stack_end`.
void prepare_fiber(Fiber& fiber, char* stack_begin, char* stack_end, void (*entry)());

// Goes on with `to`; returns when somebody switches back to `from`.
void switch_fiber(Fiber& from, Fiber& to);

// Stacks of one block's threads: one mapping, so that one comparison tells whether an address is on a stack. Each ends in a page without
// access, and starts at another cache line, since stacks at equal distances would fight for the same sets.
class Stacks {
 public:
  static constexpr size_t stack_bytes = 128 << 10, guard_bytes = 4 << 10;

  explicit Stacks(size_t count);
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  char* begin(size_t index) const { return memory_ + index * (stack_bytes + guard_bytes) + guard_bytes; }
  char* end(size_t index) const { return begin(index) + stack_bytes - index % 32 * 192; }
  uintptr_t memory() const { return reinterpret_cast<uintptr_t>(memory_); }
  size_t bytes() const { return bytes_; }

 private:
  char* memory_;
  size_t bytes_;
};

} // namespace tpk::emulator
