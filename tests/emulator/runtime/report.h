// Findings: what went wrong, in which kernel, at which line, by which thread, on which buffer.
#pragma once

#include <cstdint>
#include <string>

#include "emulator/site.h"

namespace emulator {

struct Thread;

// Where something happened: the return address of an access's call-out, or the place that a wrapper passed on.
struct Where {
  const void* pc = nullptr;
  Site site;
  const Thread* thread = nullptr; // null: the one that runs
};

// Keeps a finding, once for each kind, place and buffer. `buffer` is empty where none is involved.
void report(const char* kind, const Where& where, const std::string& buffer, const std::string& message);
// The same, for what makes it impossible to go on with the launch.
[[noreturn]] void fail(const char* kind, const Where& where, const std::string& buffer, const std::string& message);

int findings_count();
// One line a finding, its fields separated by the ASCII unit separator: kind, kernel, file, line, block, thread,
// buffer, message, callers. Valid until the next finding.
const char* findings_text();
void clear_findings();

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

} // namespace emulator
