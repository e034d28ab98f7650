// The checker: bounds, initialisation, inputs, copies in flight, races.
#include "checker.h"

#include <link.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "memory.h"
#include "state.h"

namespace emulator {
namespace {

// Who accessed a byte, when: the thread, its clock, and the block. Block 0 means nobody.
struct Stamp {
  uint32_t clock : 21;
  uint32_t atomic : 1;
  uint32_t thread : 10;
  uint32_t block;
};

// The last write of a byte, and of the reads since then the last one, the last one of another warp than its
// successor's, and the last one of another lane. That is enough for a later write to find most of the readers that
// it races with, and any of them under some schedule, at a fixed size.
struct Cell {
  Stamp write;
  Stamp read, read_by_other_warp, read_by_other_lane;
};

Cell* cells() {
  static Cell* const mapped = [] {
    void* p = mmap(nullptr, kArenaBytes * sizeof(Cell), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      perror("emulator: cells");
      abort();
    }
    return static_cast<Cell*>(p);
  }();
  return mapped;
}

// Reads of this library's own data are fine: constants, and the variables behind threadIdx.
bool is_library_data(uintptr_t address) {
  struct Range {
    uintptr_t probe, low, high;
  };
  static const Range range = [] {
    Range r{reinterpret_cast<uintptr_t>(&launch_state), 0, 0};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
          Range& r = *static_cast<Range*>(data);
          uintptr_t low = UINTPTR_MAX, high = 0;
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
            const uintptr_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            low = start < low ? start : low;
            high = start + info->dlpi_phdr[i].p_memsz > high ? start + info->dlpi_phdr[i].p_memsz : high;
          }
          if (r.probe < low || r.probe >= high) return 0;
          r.low = low;
          r.high = high;
          return 1;
        },
        &r);
    return r;
  }();
  return address >= range.low && address < range.high;
}

bool is_parameter(uintptr_t address) {
  const uintptr_t low = reinterpret_cast<uintptr_t>(launch_state.config.parameters);
  return address >= low && address < low + launch_state.config.parameters_bytes;
}

void check_outside_arena(const Thread& thread, const void* p, size_t bytes, Access access, const Where& where) {
  if (thread.fiber.holds(p)) return;
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  if (access == Access::read && (is_parameter(address) || is_library_data(address))) return;
  report(
      "wild-pointer", where, "",
      format("%s of %zu bytes at %p, which is not device memory", access == Access::read ? "read" : "write", bytes, p));
  abort_launch(); // the access itself might end the process
}

bool happened_before(const Stamp& earlier, const Thread& thread, bool shared, bool atomic) {
  if (earlier.block < launch_state.first_serial) return true; // of an earlier launch, or nobody's
  if (atomic && earlier.atomic) return true;
  if (earlier.block != block.serial)
    return shared || knows_of_block(thread, earlier.block, earlier.thread, earlier.clock);
  return earlier.thread == thread.linear || earlier.clock <= known_clock(thread, earlier.thread);
}

void report_race(const char* what, const Stamp& other, size_t offset, const Where& where) {
  const Place place = describe(offset);
  report("race", where, place.buffer,
         format("%s by thread %u%s, and nothing orders the two: %s", what, other.thread,
                other.block == block.serial ? "" : " of another block", place.text.c_str()));
}

void remember_read(Cell& cell, const Stamp& stamp) {
  const Stamp last = cell.read;
  if (last.block != 0 && (last.block != stamp.block || last.thread != stamp.thread)) {
    if (last.block != stamp.block || last.thread / 32 != stamp.thread / 32)
      cell.read_by_other_warp = last;
    else
      cell.read_by_other_lane = last;
  }
  cell.read = stamp;
}

// The first thing wrong with one byte; true if there was none.
bool check_byte(Thread& thread, size_t offset, size_t bytes, Access access, const Stamp& stamp, const Where& where) {
  uint8_t& flags = arena().flags[offset];
  const bool writes = access != Access::read, reads = access != Access::write, atomic = access == Access::atomic;
  const auto complain = [&](const char* kind, const std::string& what) {
    const Place place = describe(offset);
    report(kind, where, place.buffer, what + ": " + place.text);
    return false;
  };
  const char* verb = atomic ? "atomic" : writes ? "write" : "read";
  if ((flags & kAllocated) == 0) return complain("out-of-bounds", format("%s of %zu bytes", verb, bytes));
  if (flags & kInFlight)
    return complain("async", format("%s of bytes that an asynchronous copy has not delivered yet", verb));
  if (writes && (flags & kReadOnly)) return complain("input-write", format("%s to an input", verb));
  if (reads && (flags & kInitialised) == 0) return complain("uninitialised", format("%s of bytes nobody wrote", verb));
  if (flags & kReadOnly) return true;

  const bool shared = is_shared(offset);
  Cell& cell = cells()[offset];
  if (!happened_before(cell.write, thread, shared, atomic)) {
    report_race(writes ? "write after a write" : "read after a write", cell.write, offset, where);
    return false;
  }
  if (!writes) {
    remember_read(cell, stamp);
    return true;
  }
  for (const Stamp* read : {&cell.read, &cell.read_by_other_warp, &cell.read_by_other_lane}) {
    if (happened_before(*read, thread, shared, atomic)) continue;
    report_race("write after a read", *read, offset, where);
    return false;
  }
  cell = Cell{stamp, {}, {}, {}};
  flags |= kInitialised;
  return true;
}

} // namespace

void check_access(Thread& thread, const void* p, size_t bytes, Access access, unsigned alignment, const Where& where) {
  count_step(where);
  const size_t offset = offset_of(p);
  if (offset >= kArenaBytes) return check_outside_arena(thread, p, bytes, access, where);
  if (alignment > 1 && offset % alignment != 0) {
    const Place place = describe(offset); // ends a launch on a GPU too
    fail(
        "misaligned", where, place.buffer,
        format("%zu-byte access at an address that is not a multiple of %u: %s", bytes, alignment, place.text.c_str()));
  }
  Stamp stamp{};
  stamp.clock = thread.knows.own_clock;
  stamp.atomic = access == Access::atomic;
  stamp.thread = thread.linear;
  stamp.block = block.serial;
  for (size_t i = 0; i < bytes; ++i)
    if (!check_byte(thread, offset + i, bytes, access, stamp, where)) return;
}

} // namespace emulator
