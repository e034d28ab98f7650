// The C interface that tests/emulator/emulator.py loads with ctypes.
#include <string>

#include "memory.h"
#include "registry.h"
#include "report.h"
#include "sanitizer.h"
#include "state.h"

#define EMULATOR_API extern "C" __attribute__((visibility("default")))

namespace emulator {
namespace {

std::vector<Kernel>& registry() {
  static std::vector<Kernel> kernels;
  return kernels;
}

} // namespace

Registration::Registration(const Kernel& kernel) { registry().push_back(kernel); }

EMULATOR_API const char* emulator_flavour() { return checking ? "check" : has_address_sanitizer() ? "asan" : "fast"; }

// Names of the registered kernels, each on a line.
EMULATOR_API const char* emulator_kernels() {
  static std::string names;
  names.clear();
  for (const Kernel& k : registry()) names += std::string(k.name) + '\n';
  return names.c_str();
}

EMULATOR_API void emulator_schedule(int order, uint64_t seed) {
  schedule.order = static_cast<Order>(order);
  schedule.random = seed * 0x9E3779B97F4A7C15u + 1;
}

EMULATOR_API void emulator_step_limit(uint64_t steps) { step_limit = steps; }

EMULATOR_API void* emulator_allocate(const char* name, size_t bytes, size_t misalignment, int role) {
  return allocate_buffer(name, bytes, misalignment, static_cast<Role>(role));
}

EMULATOR_API void emulator_forbid(void* p, size_t bytes) { forbid(p, bytes); }

// Calls a kernel's launcher with its argument struct: the launcher's status, -1 if no kernel has this name, -2 if the
// struct has another size than `bytes`.
EMULATOR_API int emulator_launch(const char* name, const void* args, size_t bytes) {
  for (const Kernel& k : registry()) {
    if (std::string(k.name) != name) continue;
    return k.args_bytes == bytes ? k.launch(args) : -2;
  }
  return -1;
}

// To be called after the last launch that writes the outputs.
EMULATOR_API void emulator_check_outputs() { report_unwritten_outputs(); }

EMULATOR_API int emulator_findings_count() { return findings_count(); }
EMULATOR_API const char* emulator_findings() { return findings_text(); }

// Forgets buffers and findings.
EMULATOR_API void emulator_clear() {
  clear_buffers();
  clear_findings();
}

} // namespace emulator
