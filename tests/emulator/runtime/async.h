// Copies that complete later: cp.async, and bulk copies that mbarriers count.
#pragma once

#include <emulator/ptx.h>

#include <cstdint>
#include <vector>

#include "clocks.h"

namespace emulator {

struct AsyncCopy {
  char* to;
  const char* from;
  unsigned bytes;        // of the destination
  unsigned source_bytes; // read from `from`; the rest is zero
  Site site;
};
using AsyncGroup = std::vector<AsyncCopy>;

// One thread's cp.async copies.
struct AsyncCopies {
  AsyncGroup open;                // since the last commit
  std::vector<AsyncGroup> groups; // committed, oldest first
};

void begin_async();
// Delivers what the exiting thread still has under way.
void finish_copies(Thread& thread);
// Completes a bulk copy, a random one or the oldest; false if none is under way.
bool complete_some_bulk_copy(bool random);

} // namespace emulator
