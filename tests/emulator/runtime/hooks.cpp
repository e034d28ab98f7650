// The call-outs that g++ -fsanitize=thread places before every access of a kernel. Thread Sanitizer's own runtime is
// not linked: these functions take its place. Part of the check flavour only.
#include <cstddef>

#include "checker.h"
#include "state.h"

namespace {

[[maybe_unused]] const bool linked = emulator::checking = true;

// The compiler calls these for accesses that it assumes to be aligned to their size.
void accessed(const void* p, size_t bytes, emulator::Access access, unsigned alignment, const void* pc) {
  if (emulator::current == nullptr) return; // host code: launchers are compiled together with their kernels
  emulator::check_access(*emulator::current, p, bytes, access, alignment, {pc, {}});
}

} // namespace

#define EMULATOR_HOOKS(bytes)                                                                                          \
  void __tsan_read##bytes(void* p) { accessed(p, bytes, emulator::Access::read, bytes, __builtin_return_address(0)); } \
  void __tsan_write##bytes(void* p) {                                                                                  \
    accessed(p, bytes, emulator::Access::write, bytes, __builtin_return_address(0));                                   \
  }                                                                                                                    \
  void __tsan_unaligned_read##bytes(void* p) {                                                                         \
    accessed(p, bytes, emulator::Access::read, 1, __builtin_return_address(0));                                        \
  }                                                                                                                    \
  void __tsan_unaligned_write##bytes(void* p) {                                                                        \
    accessed(p, bytes, emulator::Access::write, 1, __builtin_return_address(0));                                       \
  }

extern "C" {
EMULATOR_HOOKS(1)
EMULATOR_HOOKS(2)
EMULATOR_HOOKS(4)
EMULATOR_HOOKS(8)
EMULATOR_HOOKS(16)
void __tsan_read_range(void* p, size_t bytes) {
  accessed(p, bytes, emulator::Access::read, 1, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t bytes) {
  accessed(p, bytes, emulator::Access::write, 1, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
