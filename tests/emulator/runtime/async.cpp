// Asynchronous copies: cp.async with its groups, mbarriers, and bulk copies that arrive on them.
//
// When a copy is delivered depends on the schedule: at once (forward), as late as the rules allow (reverse), or at a
// random moment between. Until a wait has covered it, no thread may touch its destination.
#include "async.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "checker.h"
#include "memory.h"
#include "state.h"

namespace emulator {
namespace {

constexpr int64_t kMaxPendingBytes = (1 << 20) - 1; // of an mbarrier

struct Mbarrier {
  unsigned arrivals = 0; // for each phase
  unsigned missing = 0;  // in this phase
  int64_t pending_bytes = 0;
  unsigned phase = 0;
  Message arriving, completed; // what the arrivals up to this phase, and up to the one before, have told
};
struct BulkCopy {
  AsyncCopy copy;
  uint64_t* barrier;
  Message issuer;
};

std::map<const uint64_t*, Mbarrier> mbarriers;
std::vector<BulkCopy> bulk_copies;

void check_copy(const void* p, unsigned bytes, Access access, Site site) {
  if (checking) check_access(*current, p, bytes, access, 1, {nullptr, site});
}

void set_in_flight(const AsyncCopy& c, bool in_flight) {
  if (!checking) return;
  uint8_t* flags = arena().flags + offset_of(c.to);
  for (unsigned i = 0; i < c.bytes; ++i) {
    if ((flags[i] & kAllocated) == 0) continue; // out of bounds, and reported
    flags[i] = static_cast<uint8_t>(in_flight ? flags[i] | kInFlight : flags[i] & ~kInFlight);
  }
}

void deliver(const AsyncCopy& c) {
  memcpy(c.to, c.from, c.source_bytes);
  memset(c.to + c.source_bytes, 0, c.bytes - c.source_bytes);
}

void require_shared_destination(const char* what, const AsyncCopy& c, unsigned alignment) {
  const size_t to = offset_of(c.to);
  if (!is_shared(to))
    fail("misuse", {nullptr, c.site}, "", format("%s: the destination is not in shared memory", what));
  if (to % alignment != 0 || reinterpret_cast<uintptr_t>(c.from) % alignment != 0)
    fail("misaligned", {nullptr, c.site}, describe(to).buffer,
         format("%s: source %p and destination must be multiples of %u", what, static_cast<const void*>(c.from),
                alignment));
}

// cp.async's part of delivery: the write counts as the issuing thread's, at its wait.
void complete_group(const AsyncGroup& group) {
  for (const AsyncCopy& c : group) {
    deliver(c);
    set_in_flight(c, false);
    check_copy(c.to, c.bytes, Access::write, c.site);
  }
}

Mbarrier& mbarrier_at(const uint64_t* barrier, Site site) {
  const auto it = mbarriers.find(barrier);
  if (it == mbarriers.end())
    fail("misuse", {nullptr, site}, describe(offset_of(barrier)).buffer, "the mbarrier has not been initialised");
  return it->second;
}

void finish_phase_if_complete(const uint64_t* address, Mbarrier& b) {
  if (b.missing != 0 || b.pending_bytes != 0) return;
  ++b.phase;
  b.missing = b.arrivals;
  b.completed = b.arriving;
  for (Thread& t : threads)
    if (t.state == State::at_mbarrier && t.mbarrier == address && (b.phase & 1) != t.parity) make_ready(t);
}

void complete_bulk_copy(size_t index) {
  const BulkCopy done = std::move(bulk_copies[index]);
  bulk_copies.erase(bulk_copies.begin() + static_cast<ptrdiff_t>(index));
  deliver(done.copy);
  set_in_flight(done.copy, false);
  Mbarrier& b = mbarriers.at(done.barrier);
  join(b.arriving, done.issuer);
  b.pending_bytes -= done.copy.bytes;
  finish_phase_if_complete(done.barrier, b);
}

} // namespace

void begin_async() {
  mbarriers.clear();
  bulk_copies.clear();
}

// --- cp.async ------------------------------------------------------------------------------------------------

void async_copy(void* to, const void* from, unsigned bytes, unsigned source_bytes, Site site) {
  const AsyncCopy c{static_cast<char*>(to), static_cast<const char*>(from), bytes, source_bytes, site};
  require_shared_destination("cp.async", c, bytes);
  check_copy(from, source_bytes, Access::read, site);
  check_copy(to, bytes, Access::write, site);
  const bool at_once =
      schedule.order == Order::forward || (schedule.order == Order::random && schedule.next_random() % 2 == 0);
  if (at_once) deliver(c);
  set_in_flight(c, true);
  current->copies.open.push_back(c);
}

void async_commit() {
  current->copies.groups.push_back(std::move(current->copies.open));
  current->copies.open.clear();
}

void async_wait(unsigned groups_left) {
  std::vector<AsyncGroup>& groups = current->copies.groups;
  while (groups.size() > groups_left) {
    complete_group(groups.front());
    groups.erase(groups.begin());
  }
}

void finish_copies(Thread& thread) {
  for (const AsyncGroup& group : thread.copies.groups) complete_group(group);
  complete_group(thread.copies.open);
  thread.copies = AsyncCopies();
}

// --- mbarriers and bulk copies -------------------------------------------------------------------------------

void mbarrier_init(uint64_t* barrier, unsigned arrivals, Site site) {
  if (checking) check_access(*current, barrier, sizeof *barrier, Access::write, sizeof *barrier, {nullptr, site});
  Mbarrier fresh;
  fresh.arrivals = fresh.missing = arrivals;
  mbarriers[barrier] = fresh;
}

void mbarrier_arrive(uint64_t* barrier, unsigned expected_bytes, Site site) {
  check_copy(barrier, sizeof *barrier, Access::read, site);
  Mbarrier& b = mbarrier_at(barrier, site);
  const std::string name = describe(offset_of(barrier)).buffer;
  if (b.missing == 0)
    fail("misuse", {nullptr, site}, name, format("more arrivals in one phase than the mbarrier's %u", b.arrivals));
  if (checking) publish(b.arriving, *current);
  b.pending_bytes += expected_bytes;
  if (b.pending_bytes > kMaxPendingBytes)
    fail("misuse", {nullptr, site}, name, "the mbarrier's pending bytes overflow");
  --b.missing;
  finish_phase_if_complete(barrier, b);
}

void mbarrier_wait(uint64_t* barrier, unsigned parity, Site site) {
  check_copy(barrier, sizeof *barrier, Access::read, site);
  if ((mbarrier_at(barrier, site).phase & 1) == parity) {
    current->state = State::at_mbarrier;
    current->site = site;
    current->mbarrier = barrier;
    current->parity = parity;
    wait_until_ready();
  }
  if (checking) learn(*current, mbarrier_at(barrier, site).completed);
}

void bulk_copy(void* to, const void* from, unsigned bytes, uint64_t* barrier, Site site) {
  const AsyncCopy c{static_cast<char*>(to), static_cast<const char*>(from), bytes, bytes, site};
  require_shared_destination("bulk copy", c, 16);
  if (bytes % 16 != 0)
    fail("misaligned", {nullptr, site}, describe(offset_of(to)).buffer,
         format("bulk copy: %u bytes are not a multiple of 16", bytes));
  mbarrier_at(barrier, site);
  check_copy(from, bytes, Access::read, site);
  check_copy(to, bytes, Access::write, site);
  set_in_flight(c, true);
  bulk_copies.push_back({c, barrier, {}});
  if (checking) publish(bulk_copies.back().issuer, *current);
  if (schedule.order == Order::forward) complete_bulk_copy(bulk_copies.size() - 1);
}

bool complete_some_bulk_copy(bool random) {
  if (bulk_copies.empty()) return false;
  complete_bulk_copy(random ? schedule.next_random() % bulk_copies.size() : 0);
  return true;
}

} // namespace emulator
