// Vector clocks: see clocks.h.
#include "clocks.h"

#include <algorithm>

#include "state.h"

namespace emulator {
namespace {

// What the atomics on one address have published.
struct Published {
  BlockClocks to_own_block; // by fences of any scope
  BlockClocks to_all;       // by device-wide fences
};
std::map<const void*, Published> published;

void raise(Clocks& into, const Clocks& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

void raise(BlockClocks& into, const BlockClocks& from) {
  for (const auto& [serial, clocks] : from) raise(into[serial], clocks);
}

void learn_of_blocks(Thread& thread, const BlockClocks& clocks) {
  if (clocks.empty()) return;
  auto merged = thread.knows.other_blocks ? *thread.knows.other_blocks : BlockClocks();
  raise(merged, clocks);
  thread.knows.other_blocks = std::make_shared<const BlockClocks>(std::move(merged));
}

// Raises `into` to what `thread` knows, its own past included. Then the thread's clock has to advance.
void raise_to(Clocks& into, const Thread& thread) {
  if (into.size() < threads.size()) into.resize(threads.size());
  if (thread.knows.block) raise(into, *thread.knows.block);
  const unsigned first = thread.warp * kLanes;
  for (unsigned lane = 0; lane < kLanes && first + lane < into.size(); ++lane)
    into[first + lane] = std::max(into[first + lane], thread.knows.warp[lane]);
  into[thread.linear] = std::max(into[thread.linear], thread.knows.own_clock);
}

void learn_clocks(Thread& thread, const Clocks& clocks) {
  Clocks merged = clocks;
  raise_to(merged, thread);
  thread.knows.block = std::make_shared<const Clocks>(std::move(merged));
  thread.knows.warp.fill(0);
}

// Everyone learns what anyone knows of other blocks; usually nobody knows anything.
void share_other_blocks(const Participants& participants) {
  const std::shared_ptr<const BlockClocks>& first = participants.front()->knows.other_blocks;
  const bool same = std::all_of(participants.begin(), participants.end(),
                                [&](const Thread* t) { return t->knows.other_blocks == first; });
  if (same) return;
  BlockClocks merged;
  for (const Thread* t : participants)
    if (t->knows.other_blocks) raise(merged, *t->knows.other_blocks);
  const auto shared = std::make_shared<const BlockClocks>(std::move(merged));
  for (Thread* t : participants) t->knows.other_blocks = shared;
}

void set_knowledge(const Participants& participants, Clocks clocks) {
  const auto shared = std::make_shared<const Clocks>(std::move(clocks));
  for (Thread* t : participants) {
    t->knows.block = shared;
    t->knows.warp.fill(0);
    ++t->knows.own_clock;
  }
}

void synchronize(const Participants& participants) {
  Clocks clocks(threads.size());
  for (const Thread* t : participants) raise_to(clocks, *t);
  share_other_blocks(participants);
  set_knowledge(participants, std::move(clocks));
}

} // namespace

uint32_t known_clock(const Thread& thread, unsigned other) {
  const Knowledge& knows = thread.knows;
  const uint32_t known = knows.block ? (*knows.block)[other] : 0;
  return other / kLanes == thread.warp ? std::max(known, knows.warp[other % kLanes]) : known;
}

bool knows_of_block(const Thread& thread, uint32_t serial, unsigned other, uint32_t clock) {
  if (!thread.knows.other_blocks) return false;
  const auto it = thread.knows.other_blocks->find(serial);
  return it != thread.knows.other_blocks->end() && other < it->second.size() && it->second[other] >= clock;
}

void publish(Message& message, Thread& thread) {
  raise_to(message.block, thread);
  if (thread.knows.other_blocks) raise(message.other_blocks, *thread.knows.other_blocks);
  ++thread.knows.own_clock;
}

void join(Message& into, const Message& message) {
  raise(into.block, message.block);
  raise(into.other_blocks, message.other_blocks);
}

void learn(Thread& thread, const Message& message) {
  learn_clocks(thread, message.block);
  learn_of_blocks(thread, message.other_blocks);
}

void synchronize_block() {
  // With all threads present, their own clocks are the latest of each.
  Clocks clocks(threads.size());
  Participants all;
  for (Thread& t : threads) {
    clocks[t.linear] = t.knows.own_clock;
    all.push_back(&t);
  }
  share_other_blocks(all);
  set_knowledge(all, std::move(clocks));
}

void synchronize_lanes(unsigned warp, uint32_t lanes) {
  Participants participants;
  for (unsigned lane = 0; lane < kLanes; ++lane)
    if (lanes >> lane & 1) participants.push_back(&threads[warp * kLanes + lane]);
  const auto& block = participants.front()->knows.block;
  const bool same_block =
      std::all_of(participants.begin(), participants.end(), [&](const Thread* t) { return t->knows.block == block; });
  if (!same_block) return synchronize(participants);
  // The common case: only knowledge of each other is new, and it fits into the warp's part.
  std::array<uint32_t, kLanes> newest{};
  for (const Thread* t : participants) {
    for (unsigned i = 0; i < kLanes; ++i) newest[i] = std::max(newest[i], t->knows.warp[i]);
    newest[t->lane] = std::max(newest[t->lane], t->knows.own_clock);
  }
  share_other_blocks(participants);
  for (Thread* t : participants) {
    t->knows.warp = newest;
    ++t->knows.own_clock;
  }
}

void note_fence(Thread& thread, Scope scope) {
  Fence fence;
  raise_to(fence.own_block, thread);
  fence.other_blocks = thread.knows.other_blocks;
  ++thread.knows.own_clock; // later accesses are not covered
  thread.knows.block_fence = std::make_shared<const Fence>(std::move(fence));
  if (scope == Scope::device) thread.knows.device_fence = thread.knows.block_fence;
}

void note_atomic(Thread& thread, const void* address) {
  Published& here = published[address];
  learn_of_blocks(thread, here.to_all);
  if (const auto it = here.to_own_block.find(block.serial); it != here.to_own_block.end())
    learn_clocks(thread, it->second);
  if (const auto& fence = thread.knows.block_fence) raise(here.to_own_block[block.serial], fence->own_block);
  if (const auto& fence = thread.knows.device_fence) {
    raise(here.to_all[block.serial], fence->own_block);
    if (fence->other_blocks) raise(here.to_all, *fence->other_blocks);
  }
}

void begin_launch_clocks() { published.clear(); }

} // namespace emulator
