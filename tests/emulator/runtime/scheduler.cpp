// Runs a launch: its blocks one after the other, the threads of a block in turns, in the order that the schedule says.
#include <algorithm>
#include <cstdlib>

#include "memory.h"
#include "report.h"
#include "state.h"

// What kernels see as CUDA's built-in variables.
uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {

bool checking = false;
Schedule schedule;
uint64_t step_limit = uint64_t{1} << 27;
Launch launch_state;
Block block;
std::vector<Thread> threads;
Thread* current = nullptr;

namespace {

Fiber host;
std::vector<Thread*> ready;
size_t ready_from = 0;                                             // those before have been taken
std::vector<std::pair<const void*, size_t>> dynamic_shared_limits; // from cudaFuncSetAttribute

bool nobody_ready() { return ready_from == ready.size(); }
void clear_ready() {
  ready.clear();
  ready_from = 0;
}

// The next thread to run; null if none can.
Thread* pick() {
  const bool random = schedule.order == Order::random;
  if (random && schedule.next_random() % 4 == 0) complete_some_bulk_copy(true);
  while (nobody_ready() && complete_some_bulk_copy(random)) continue;
  if (nobody_ready()) {
    clear_ready();
    return nullptr;
  }
  if (schedule.order == Order::forward) return ready[ready_from++];
  if (random) std::swap(ready.back(), ready[ready_from + schedule.next_random() % (ready.size() - ready_from)]);
  Thread* next = ready.back();
  ready.pop_back();
  return next;
}

// Resumes `next`, or the host if it is null.
void resume(Thread* next) {
  Fiber& from = current == nullptr ? host : current->fiber;
  current = next;
  if (next != nullptr) threadIdx = next->index;
  switch_fiber(from, next == nullptr ? host : next->fiber);
}

// What every fiber runs: its thread of one block after another.
void run_threads() {
  fiber_started();
  for (;;) {
    launch_state.config.run(launch_state.config.parameters);
    finish_copies(*current);
    current->state = State::exited;
    ++block.exited;
    barrier_thread_exited();
    warp_thread_exited(*current);
    resume(pick());
  }
}

const char* waiting_text(const Thread& t) {
  switch (t.state) {
    case State::at_barrier: return "at __syncthreads";
    case State::at_named_barrier: return "at a named barrier";
    case State::at_mbarrier: return "at an mbarrier";
    case State::in_collective: return name_of(t.call->op);
    default: return "ready";
  }
}

// No thread can go on: says who waits where.
void report_deadlock() {
  struct Group {
    std::string what;
    int count;
    unsigned first;
  };
  std::vector<Group> groups;
  const Thread* first = nullptr;
  for (const Thread& t : threads) {
    std::string what = "have exited";
    if (t.state != State::exited) {
      what = format("wait %s, %s:%d", waiting_text(t), t.site.file, t.site.line);
      if (first == nullptr) first = &t;
    }
    const auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.what == what; });
    if (group == groups.end())
      groups.push_back({what, 1, t.linear});
    else
      ++group->count;
  }
  std::string message;
  for (const Group& g : groups)
    message +=
        format("%s%d threads (the first is %u) %s", message.empty() ? "" : "; ", g.count, g.first, g.what.c_str());
  report("deadlock", {nullptr, first->site, first}, "", message);
}

void make_threads(const dim3& size) {
  const size_t count = size_t{size.x} * size.y * size.z;
  static std::vector<Fiber> fibers; // mapped once, and kept from launch to launch
  threads.assign(count, Thread());
  for (size_t i = 0; i < count; ++i) {
    if (i == fibers.size()) {
      fibers.emplace_back();
      map_stack(fibers.back(), static_cast<int>(i));
    }
    Thread& t = threads[i];
    t.fiber = fibers[i];
    prepare_fiber(t.fiber, static_cast<int>(i), run_threads);
    t.linear = static_cast<unsigned>(i);
    t.lane = t.linear % 32;
    t.warp = t.linear / 32;
    t.index = {t.linear % size.x, t.linear / size.x % size.y, t.linear / size.x / size.y};
  }
}

void run_block(size_t linear) {
  const dim3& grid = launch_state.config.grid;
  ++block.serial;
  block.exited = 0;
  const auto x = static_cast<unsigned>(linear % grid.x), y = static_cast<unsigned>(linear / grid.x % grid.y);
  block.index = blockIdx = {x, y, static_cast<unsigned>(linear / grid.x / grid.y)};
  begin_shared_memory(launch_state.config.dynamic_shared_bytes);
  begin_barriers();
  begin_warps();
  begin_async();
  clear_ready();
  for (Thread& t : threads) {
    t.knows = Knowledge();
    t.copies = AsyncCopies();
    make_ready(t);
  }
  resume(pick());
  if (launch_state.aborted || block.exited == static_cast<int>(threads.size())) return;
  report_deadlock();
  launch_state.aborted = true;
}

std::vector<size_t> block_order(size_t blocks) {
  std::vector<size_t> order(blocks);
  for (size_t i = 0; i < blocks; ++i) order[i] = i;
  if (schedule.order == Order::reverse) std::reverse(order.begin(), order.end());
  if (schedule.order == Order::random)
    for (size_t i = blocks; i > 1; --i) std::swap(order[i - 1], order[schedule.next_random() % i]);
  return order;
}

bool is_valid(const KernelLaunch& l) {
  const uint64_t block_threads = uint64_t{l.block.x} * l.block.y * l.block.z;
  const uint64_t grid_blocks = uint64_t{l.grid.x} * l.grid.y * l.grid.z;
  return block_threads >= 1 && block_threads <= kMaxThreads && l.block.z <= 64 && grid_blocks >= 1 &&
         l.grid.x <= 0x7FFFFFFFu && l.grid.y <= 65535 && l.grid.z <= 65535;
}

} // namespace

uint64_t Schedule::next_random() {
  random ^= random << 13;
  random ^= random >> 7;
  random ^= random << 17;
  return random;
}

void make_ready(Thread& thread) {
  thread.state = State::ready;
  ready.push_back(&thread);
}

void wait_until_ready() {
  Thread* const me = current;
  count_step({nullptr, me->site});
  Thread* const next = pick();
  if (next != me) resume(next);
}

void abort_launch() {
  launch_state.aborted = true;
  clear_ready();
  resume(nullptr);
  abort(); // never: the launch is over
}

void count_step(const Where& where) {
  if (++launch_state.steps <= step_limit) return;
  fail("endless", where, "",
       format("the launch has made %llu accesses and waits: a loop that never ends, or that spins until "
              "another thread writes",
              static_cast<unsigned long long>(step_limit)));
}

cudaError_t allow_dynamic_shared(const void* kernel, int bytes) {
  if (bytes < 0 || static_cast<size_t>(bytes) > kMaxSharedBytes) return cudaErrorInvalidValue;
  dynamic_shared_limits.emplace_back(kernel, static_cast<size_t>(bytes));
  return cudaSuccess;
}

cudaError_t launch(const KernelLaunch& config) {
  launch_state.config = config;
  launch_state.first_serial = block.serial + 1;
  launch_state.aborted = false;
  launch_state.steps = 0;
  size_t allowed = kSharedBytesWithoutAttribute;
  for (const auto& [kernel, limit] : dynamic_shared_limits)
    if (kernel == config.kernel) allowed = limit; // the latest counts
  if (!is_valid(config) || config.dynamic_shared_bytes > allowed) {
    const dim3 &g = config.grid, &b = config.block;
    report("launch", {}, "",
           format("invalid configuration: grid %u x %u x %u, block %u x %u x %u, %zu bytes of dynamic shared memory",
                  g.x, g.y, g.z, b.x, b.y, b.z, config.dynamic_shared_bytes));
    return cudaErrorInvalidConfiguration;
  }
  blockDim = config.block;
  gridDim = config.grid;
  host = Fiber();
  begin_launch_clocks();
  make_threads(config.block);
  for (const size_t linear : block_order(size_t{config.grid.x} * config.grid.y * config.grid.z)) {
    run_block(linear);
    if (launch_state.aborted) return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}

} // namespace emulator
