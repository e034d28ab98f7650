// What the parts of the runtime share: the schedule, the launch under way, its block, and the block's threads.
//
// One fiber stands for one CUDA thread, blocks run one after the other, and everything happens on one thread of the
// operating system. So plain globals hold the state, and a thread gives up the processor only where it waits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "async.h"
#include "clocks.h"
#include "fiber.h"
#include "report.h"

namespace emulator {

// Whether every access of a kernel is checked: hooks.cpp sets it in the libraries that it is linked into.
extern bool checking;

inline constexpr unsigned kLanes = 32; // of a warp
inline constexpr int kMaxThreads = 1024;
inline constexpr size_t kMaxSharedBytes = 227 * 1024; // of one block on sm_90
inline constexpr size_t kSharedBytesWithoutAttribute = 48 * 1024;

enum class Order { forward, reverse, random };

struct Schedule {
  Order order = Order::forward;
  uint64_t random = 1;
  uint64_t next_random(); // xorshift64
};

enum class State : uint8_t { ready, at_barrier, at_named_barrier, in_collective, at_mbarrier, exited };

struct Thread {
  uint3 index{};
  unsigned linear = 0, lane = 0, warp = 0;
  Fiber fiber;
  State state = State::exited;
  Site site;                          // of the call in which it waits
  WarpCall* call = nullptr;           // while in_collective
  int named_barrier = 0;              // while at_named_barrier
  const uint64_t* mbarrier = nullptr; // while at_mbarrier
  unsigned parity = 0;
  bool vote = false; // of __syncthreads_count and its like
  Knowledge knows;
  AsyncCopies copies;
};

struct Block {
  uint3 index{};
  uint32_t serial = 0; // counts blocks of all launches from 1
  int exited = 0;
};

struct Launch {
  KernelLaunch config{};
  uint32_t first_serial = 1; // of its blocks
  bool aborted = false;
  uint64_t steps = 0;
};

extern Schedule schedule;
extern Launch launch_state;
extern Block block;
extern std::vector<Thread> threads; // of the block
extern Thread* current;             // the one whose fiber runs; null outside kernels

// --- scheduler.cpp ---
void make_ready(Thread& thread);
// Runs other threads until somebody has made `current` ready again.
void wait_until_ready();
// Gives up the launch: its fibers never run again.
[[noreturn]] void abort_launch();
// Counts an access or a wait. A launch that makes more than `step_limit` of them counts as endless.
void count_step(const Where& where);
extern uint64_t step_limit;

// --- barrier.cpp and warp.cpp: at the start of a block, and when a thread has exited ---
void begin_barriers();
void begin_warps();
void barrier_thread_exited();
void warp_thread_exited(const Thread& thread);
const char* name_of(WarpOp op);

} // namespace emulator
