// Happens-before: vector clocks of the threads of a block, and of what fences and atomics carry between blocks.
//
// Each thread has a clock that advances whenever the thread tells others what it has done. An access is stamped with
// its thread's clock; it happened before another one if the other's thread knows of that clock.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace emulator {

struct Thread;
enum class Scope;

using Clocks = std::vector<uint32_t>;           // one for each thread of a block
using BlockClocks = std::map<uint32_t, Clocks>; // block serial -> clocks of its threads
using Participants = std::vector<Thread*>;

// What a fence publishes through the thread's later atomics.
struct Fence {
  Clocks own_block;
  std::shared_ptr<const BlockClocks> other_blocks;
};

struct Knowledge {
  uint32_t own_clock = 1;
  std::shared_ptr<const Clocks> block;                    // null: nothing yet
  std::array<uint32_t, 32> warp{};                        // newer clocks of this warp's lanes, from __syncwarp
  std::shared_ptr<const BlockClocks> other_blocks;        // null: nothing
  std::shared_ptr<const Fence> block_fence, device_fence; // null: no fence of that scope yet
};

// The clock of thread `other` of the same block up to which `thread` sees its effects.
uint32_t known_clock(const Thread& thread, unsigned other);
bool knows_of_block(const Thread& thread, uint32_t serial, unsigned other, uint32_t clock);

// What threads have told whoever waits: at a barrier, or through an mbarrier.
struct Message {
  Clocks block;
  BlockClocks other_blocks;
};
// Adds all that `thread` has done and knows.
void publish(Message& message, Thread& thread);
void join(Message& into, const Message& message);
void learn(Thread& thread, const Message& message);

// Barriers among threads that all wait: everyone knows what anyone knew.
void synchronize_block();
void synchronize_lanes(unsigned warp, uint32_t lanes);

// Fences and atomics: an atomic takes over what earlier atomics on its address published, then publishes what the
// thread's fences cover.
void note_fence(Thread& thread, Scope scope);
void note_atomic(Thread& thread, const void* address);
void begin_launch_clocks();

} // namespace emulator
