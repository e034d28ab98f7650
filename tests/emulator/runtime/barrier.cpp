// Block-wide barriers: __syncthreads, its votes, and named barriers.
#include <cstring>

#include "report.h"
#include "state.h"

namespace emulator {
namespace {

struct NamedBarrier {
  int expected = 0; // threads, set by the first to come
  int arrived = 0;  // those that do not wait included
  Message message;
};

constexpr int kNamedBarriers = 16;
int waiting = 0; // at __syncthreads
NamedBarrier named[kNamedBarriers];

bool same_place(Site a, Site b) { return a.line == b.line && strcmp(a.file, b.file) == 0; }

void release_block() {
  const Thread* first = nullptr;
  for (const Thread& t : threads) {
    if (t.state != State::at_barrier) continue;
    if (first == nullptr) first = &t;
    if (!same_place(t.site, first->site))
      fail("collective", {nullptr, t.site, &t}, "",
           format("the threads of the block meet at different __syncthreads: thread %u at %s:%d, thread %u at %s:%d",
                  t.linear, t.site.file, t.site.line, first->linear, first->site.file, first->site.line));
  }
  if (block.exited != 0)
    report("early-exit", {nullptr, first->site, first}, "",
           format("%d threads left the kernel instead of meeting the others at __syncthreads", block.exited));
  if (checking) synchronize_block();
  waiting = 0;
  for (Thread& t : threads)
    if (t.state == State::at_barrier) make_ready(t);
}

void release_block_if_complete() {
  if (waiting != 0 && waiting + block.exited == static_cast<int>(threads.size())) release_block();
}

} // namespace

void begin_barriers() {
  waiting = 0;
  for (NamedBarrier& b : named) b = NamedBarrier();
}

void barrier_thread_exited() { release_block_if_complete(); }

void block_barrier(Site site) {
  current->state = State::at_barrier;
  current->site = site;
  ++waiting;
  release_block_if_complete();
  wait_until_ready();
}

int block_barrier_vote(BlockVote vote, bool predicate, Site site) {
  current->vote = predicate;
  block_barrier(site);
  int yes = 0, all = 0;
  for (const Thread& t : threads) {
    if (t.state == State::exited) continue;
    ++all;
    yes += t.vote;
  }
  block_barrier(site); // nobody votes again before everyone has counted
  return vote == BlockVote::count ? yes : vote == BlockVote::all ? yes == all : yes != 0;
}

void named_barrier(int id, int count, bool wait, Site site) {
  if (id < 1 || id >= kNamedBarriers) // number 0 is __syncthreads
    fail("collective", {nullptr, site}, "", format("named barrier %d: the number must be 1 to 15", id));
  NamedBarrier& b = named[id];
  if (count <= 0 || count % 32 != 0 || count > static_cast<int>(threads.size()))
    fail("collective", {nullptr, site}, "",
         format("named barrier %d: %d threads, but the count must be a multiple of 32 within the block", id, count));
  if (b.expected != 0 && b.expected != count)
    fail("collective", {nullptr, site}, "",
         format("named barrier %d: this thread expects %d threads, an earlier one %d", id, count, b.expected));
  b.expected = count;
  ++b.arrived;
  if (checking) publish(b.message, *current);
  if (wait) {
    current->state = State::at_named_barrier;
    current->named_barrier = id;
    current->site = site;
  }
  if (b.arrived == count) {
    for (Thread& t : threads) {
      if (t.state != State::at_named_barrier || t.named_barrier != id) continue;
      if (checking) learn(t, b.message);
      make_ready(t);
    }
    b = NamedBarrier();
  }
  if (wait) wait_until_ready();
}

} // namespace emulator
