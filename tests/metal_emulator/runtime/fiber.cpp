#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if !defined(__x86_64__)
#error "The context switch is written for x86-64"
#endif

extern "C" void emulator_switch_stack(void** save, void* load);

// Saves the callee-saved registers and the stack pointer, loads the other stack's.
asm(R"(.text
.globl emulator_switch_stack
.hidden emulator_switch_stack
.type emulator_switch_stack,@function
emulator_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch_stack, .-emulator_switch_stack
)");

namespace emulator {

void Fiber::start(void (*entry)()) {
  constexpr int kSavedRegisters = 6;
  void** slot = reinterpret_cast<void**>(stack_top_);
  *--slot = nullptr;  // where a return address would be: makes the stack 16n + 8 at entry
  *--slot = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedRegisters; i++) *--slot = nullptr;
  own_ = slot;
}

void Fiber::resume() { emulator_switch_stack(&caller_, own_); }

void Fiber::suspend() { emulator_switch_stack(&own_, caller_); }

StackPool::StackPool() {
  void* memory = mmap(nullptr, kStacks * kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<char*>(memory);
  for (int i = 0; i < kStacks; i++) mprotect(base_ + i * kStackBytes, kGuardBytes, PROT_NONE);
}

char* StackPool::top(int index) const {
  // Staggered, so that equal frames of different threads do not share cache sets.
  return base_ + (index + 1) * kStackBytes - 128 * (index % 32);
}

bool StackPool::contains(const char* address) const {
  return address >= base_ && address < base_ + kStacks * kStackBytes;
}

bool StackPool::is_guard(const char* address) const {
  return contains(address) && (address - base_) % kStackBytes < kGuardBytes;
}

}  // namespace emulator
