// Address Sanitizer's interface, as weak references: null unless the library is linked with it (the asan flavour).
//
// The runtime itself is compiled without sanitizers, once for all flavours.
#pragma once

#include <cstddef>

extern "C" {
__attribute__((weak)) void __asan_poison_memory_region(const volatile void* p, size_t bytes);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* p, size_t bytes);
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** fake_stack, const void* low, size_t bytes);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* fake_stack, const void** low, size_t* bytes);
}

namespace emulator {

inline bool has_address_sanitizer() { return __sanitizer_start_switch_fiber != nullptr; }

inline void poison(const void* p, size_t bytes) {
  if (__asan_poison_memory_region != nullptr) __asan_poison_memory_region(p, bytes);
}
inline void unpoison(const void* p, size_t bytes) {
  if (__asan_unpoison_memory_region != nullptr) __asan_unpoison_memory_region(p, bytes);
}

} // namespace emulator
