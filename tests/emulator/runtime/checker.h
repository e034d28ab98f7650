// The checker: every access of a kernel against the flags of its bytes and the accesses of other threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "report.h"

namespace emulator {

struct Thread;

enum class Access : uint8_t { read, write, atomic };

// Reports what is wrong with an access of `thread`. `alignment` is what the instruction requires, 1 if nothing.
void check_access(Thread& thread, const void* p, size_t bytes, Access access, unsigned alignment, const Where& where);

} // namespace emulator
