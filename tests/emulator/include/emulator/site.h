// The place of a call in a kernel's source, taken by default arguments where the call is written.
#pragma once

namespace emulator {

struct Site {
  const char* file = nullptr;
  int line = 0;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

} // namespace emulator
