// Stacks and the switch between them; the one file that is written for an architecture.
#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "sanitizer.h"
#include "state.h"

#if !defined(__x86_64__)
#error "the emulator's fibers are written for x86-64"
#endif

// Saves the callee-saved registers on the old stack, keeps its stack pointer in *save, and restores those of the new.
asm(R"(
.text
.globl emulator_switch_stack
.hidden emulator_switch_stack
.type emulator_switch_stack, @function
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
extern "C" __attribute__((visibility("hidden"))) void emulator_switch_stack(void** save, void* stack_pointer);

namespace emulator {
namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kStackGuardBytes = 4096;
constexpr int kSavedRegisters = 6;

char* stack_pool() {
  static char* const pool = [] {
    void* p = mmap(nullptr, kStackBytes * kMaxThreads, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      perror("emulator: stacks");
      abort();
    }
    return static_cast<char*>(p);
  }();
  return pool;
}

Fiber* switched_from = nullptr;

void start_switch(Fiber& from, const Fiber& to) {
  if (!has_address_sanitizer()) return;
  switched_from = &from;
  __sanitizer_start_switch_fiber(&from.fake_stack, to.low, static_cast<size_t>(to.high - to.low));
}

// The bounds of the host's stack are known only to the sanitizer, which tells them here.
void finish_switch(void* fake_stack) {
  if (!has_address_sanitizer()) return;
  const void* low = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(fake_stack, &low, &bytes);
  if (switched_from->low == nullptr) {
    switched_from->low = static_cast<char*>(const_cast<void*>(low));
    switched_from->high = switched_from->low + bytes;
  }
}

} // namespace

void map_stack(Fiber& fiber, int index) {
  char* const slot = stack_pool() + kStackBytes * index;
  mprotect(slot, kStackGuardBytes, PROT_NONE); // an overflow faults instead of reaching the neighbour
  fiber.low = slot + kStackGuardBytes;
  fiber.high = slot + kStackBytes;
}

void prepare_fiber(Fiber& fiber, int index, void (*entry)()) {
  unpoison(fiber.low, static_cast<size_t>(fiber.high - fiber.low));
  // Staggered tops: otherwise the hot ends of a thousand stacks would share a few cache sets.
  const uintptr_t top = reinterpret_cast<uintptr_t>(fiber.high) - 64 - static_cast<uintptr_t>(index % 32) * 320;
  void** sp = reinterpret_cast<void**>(top & ~uintptr_t{15});
  *--sp = nullptr; // entry's return address: there is none
  *--sp = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedRegisters; ++i) *--sp = nullptr;
  fiber.stack_pointer = sp;
  fiber.fake_stack = nullptr;
}

void switch_fiber(Fiber& from, Fiber& to) {
  start_switch(from, to);
  emulator_switch_stack(&from.stack_pointer, to.stack_pointer);
  finish_switch(from.fake_stack);
}

void fiber_started() { finish_switch(nullptr); }

} // namespace emulator
