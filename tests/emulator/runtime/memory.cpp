// The arena: see memory.h.
#include "memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "report.h"
#include "sanitizer.h"
#include "state.h"

namespace emulator {
namespace {

constexpr size_t kGuardBytes = 1024;      // between buffers
constexpr size_t kBufferAlignment = 256;  // cudaMalloc's
constexpr size_t kSharedGuardBytes = 128; // between shared arrays
constexpr size_t kDynamicAlignment = 1024;

struct Buffer {
  std::string name;
  size_t offset, bytes;
  Role role;
};
struct SharedArray {
  const void* key; // null: the dynamic one
  std::string name;
  size_t offset, bytes;
};

std::vector<Buffer> buffers;
size_t buffers_end = 0;
std::vector<SharedArray> shared_arrays;
size_t shared_end = kGlobalBytes;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void* map(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    perror("emulator: arena");
    abort();
  }
  return p;
}

template <class Array>
const Array* nearest(const std::vector<Array>& arrays, size_t offset) {
  const Array* best = nullptr;
  size_t best_distance = SIZE_MAX;
  for (const Array& a : arrays) {
    const size_t end = a.offset + a.bytes;
    const size_t distance = offset < a.offset ? a.offset - offset : offset >= end ? offset - end + 1 : 0;
    if (distance < best_distance) {
      best_distance = distance;
      best = &a;
    }
  }
  return best;
}

template <class Array>
Place place_in(const char* space, const std::vector<Array>& arrays, size_t offset) {
  const Array* a = nearest(arrays, offset);
  if (a == nullptr) return {"", format("%s memory, where nothing is allocated", space)};
  return {a->name,
          format("byte %td of %s '%s' (%zu bytes)", static_cast<ptrdiff_t>(offset) - static_cast<ptrdiff_t>(a->offset),
                 space, a->name.c_str(), a->bytes)};
}

char* allocate_shared(const void* key, const char* name, size_t bytes, size_t alignment) {
  const size_t offset = round_up(shared_end + kSharedGuardBytes, alignment);
  size_t static_bytes = key == nullptr ? 0 : bytes, total = bytes;
  for (const SharedArray& a : shared_arrays) {
    total += a.bytes;
    if (a.key != nullptr) static_bytes += a.bytes;
  }
  if (total > kMaxSharedBytes || static_bytes > kSharedBytesWithoutAttribute)
    fail("launch", {}, name,
         format("the block needs %zu bytes of shared memory, %zu of them static", total, static_bytes));
  char* const p = arena().bytes + offset;
  unpoison(p, bytes);
  memset(arena().flags + offset, kAllocated, bytes);
  // What an earlier block may have left: NaN everywhere, or anything.
  for (size_t i = 0; i < bytes; ++i)
    p[i] = schedule.order == Order::random ? static_cast<char>(schedule.next_random()) : static_cast<char>(0xFF);
  shared_arrays.push_back({key, name, offset, bytes});
  shared_end = offset + bytes;
  return p;
}

} // namespace

const Arena& arena() {
  static const Arena mapped = [] {
    Arena a{static_cast<char*>(map(kArenaBytes)), static_cast<uint8_t*>(map(kArenaBytes))};
    poison(a.bytes, kArenaBytes);
    return a;
  }();
  return mapped;
}

Place describe(size_t offset) {
  return is_shared(offset) ? place_in("shared", shared_arrays, offset) : place_in("global", buffers, offset);
}

void* allocate_buffer(const char* name, size_t bytes, size_t misalignment, Role role) {
  const size_t offset = round_up(buffers_end + kGuardBytes, kBufferAlignment) + misalignment;
  if (offset + bytes + kGuardBytes > kGlobalBytes) return nullptr;
  buffers_end = offset + bytes;
  buffers.push_back({name, offset, bytes, role});
  char* const p = arena().bytes + offset;
  unpoison(p, bytes);
  memset(p, 0xFF, bytes);
  const int flags = role == Role::input    ? kAllocated | kInitialised | kReadOnly
                    : role == Role::output ? kAllocated
                                           : kAllocated | kInitialised;
  memset(arena().flags + offset, flags, bytes);
  return p;
}

void forbid(void* p, size_t bytes) {
  memset(arena().flags + offset_of(p), 0, bytes);
  poison(p, bytes);
}

void report_unwritten_outputs() {
  if (!checking) return;
  for (const Buffer& b : buffers) {
    if (b.role != Role::output) continue;
    size_t unwritten = 0, first = 0;
    for (size_t i = b.bytes; i-- > 0;) {
      const uint8_t flags = arena().flags[b.offset + i];
      if ((flags & kAllocated) == 0 || (flags & kInitialised) != 0) continue;
      ++unwritten;
      first = i;
    }
    if (unwritten != 0)
      report("unwritten-output", {}, b.name,
             format("%zu of %zu bytes were never written, the first is byte %zu", unwritten, b.bytes, first));
  }
}

void clear_buffers() {
  memset(arena().flags, 0, buffers_end);
  poison(arena().bytes, buffers_end);
  buffers.clear();
  buffers_end = 0;
}

void begin_shared_memory(size_t dynamic_bytes) {
  memset(arena().flags + kGlobalBytes, 0, shared_end - kGlobalBytes);
  poison(arena().bytes + kGlobalBytes, shared_end - kGlobalBytes);
  shared_arrays.clear();
  shared_end = kGlobalBytes;
  allocate_shared(nullptr, "dynamic", dynamic_bytes, kDynamicAlignment); // empty if the launch asks for none
}

void* static_shared(const void* key, size_t bytes, size_t alignment, const char* name) {
  for (const SharedArray& a : shared_arrays)
    if (a.key == key) return arena().bytes + a.offset;
  return allocate_shared(key, name, bytes, alignment < 16 ? 16 : alignment);
}

void* dynamic_shared() { return arena().bytes + shared_arrays.front().offset; }

} // namespace emulator
