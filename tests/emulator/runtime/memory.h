// Emulated device memory: one arena for the buffers of a test and the shared memory of the running block.
//
// Every byte has flags. Buffers and shared arrays lie apart, with unallocated guard bytes between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace emulator {

inline constexpr size_t kGlobalBytes = size_t{64} << 20;
inline constexpr size_t kSharedBytes = size_t{1} << 20;
inline constexpr size_t kArenaBytes = kGlobalBytes + kSharedBytes;

enum class Role { input, output, inout };

enum Flag : uint8_t {
  kAllocated = 1,
  kInitialised = 2,
  kReadOnly = 4,
  kInFlight = 8, // an asynchronous copy writes it
};

struct Arena {
  char* bytes;
  uint8_t* flags;
};
const Arena& arena();

// Offset in the arena; kArenaBytes or more for other addresses.
inline size_t offset_of(const void* p) { return static_cast<size_t>(static_cast<const char*>(p) - arena().bytes); }
inline bool is_shared(size_t offset) { return offset >= kGlobalBytes && offset < kArenaBytes; }

// The buffer or shared array at an offset, or the nearest one, and the offset's place in words.
struct Place {
  std::string buffer, text;
};
Place describe(size_t offset);

// --- buffers of a test ---
// `misalignment` is the address of the first byte modulo 256. Null if the arena is full.
void* allocate_buffer(const char* name, size_t bytes, size_t misalignment, Role role);
// Takes bytes out of a buffer: the gaps between the rows of a view.
void forbid(void* p, size_t bytes);
void report_unwritten_outputs();
void clear_buffers();

// --- shared memory of a block ---
void begin_shared_memory(size_t dynamic_bytes);

} // namespace emulator
