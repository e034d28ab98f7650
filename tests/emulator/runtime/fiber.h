// Fibers: stacks that take turns on one thread of the operating system.
#pragma once

#include <cstddef>

namespace emulator {

struct Fiber {
  void* stack_pointer = nullptr; // while it does not run
  char* low = nullptr;           // the stack is [low, high)
  char* high = nullptr;
  void* fake_stack = nullptr; // AddressSanitizer's
  bool holds(const void* p) const { return p >= low && p < high; }
};

// Maps a stack for fiber number `index` below kMaxThreads.
void map_stack(Fiber& fiber, int index);
// Lets the fiber start with `entry`, which must not return, when it is switched to; whatever it ran is forgotten.
void prepare_fiber(Fiber& fiber, int index, void (*entry)());
// Suspends `from`, which runs, and resumes `to`.
void switch_fiber(Fiber& from, Fiber& to);
// To be called first on a fresh fiber.
void fiber_started();

} // namespace emulator
