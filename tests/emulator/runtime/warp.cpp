// Warp collectives: the last lane to arrive computes the results of all.
#include <algorithm>

#include "report.h"
#include "state.h"
#include "tensor_core.h"

namespace emulator {
namespace {

constexpr uint32_t kFullMask = 0xFFFFFFFFu;

struct Warp {
  uint32_t live = 0;    // lanes that have not exited
  uint32_t waiting = 0; // lanes in a collective
};
std::vector<Warp> warps;

Thread& lane_of(unsigned warp, unsigned lane) { return threads[warp * kLanes + lane]; }

// The lane that `lane` reads from.
int shuffle_source(const WarpCall& call, int lane) {
  const int first = lane & ~(call.width - 1), last = first + call.width - 1;
  switch (call.op) {
    case WarpOp::shuffle: return first + (call.operand & (call.width - 1));
    case WarpOp::shuffle_xor: return (lane ^ call.operand) > last ? lane : lane ^ call.operand;
    case WarpOp::shuffle_up: return lane - call.operand < first ? lane : lane - call.operand;
    default: return lane + call.operand > last ? lane : lane + call.operand;
  }
}

uint64_t reduced(Reduction reduction, uint64_t a, uint64_t b) {
  const auto ua = static_cast<uint32_t>(a), ub = static_cast<uint32_t>(b);
  const auto sa = static_cast<int32_t>(ua), sb = static_cast<int32_t>(ub);
  switch (reduction) {
    case Reduction::add: return ua + ub;
    case Reduction::min_signed: return static_cast<uint32_t>(std::min(sa, sb));
    case Reduction::max_signed: return static_cast<uint32_t>(std::max(sa, sb));
    case Reduction::min_unsigned: return std::min(ua, ub);
    case Reduction::max_unsigned: return std::max(ua, ub);
    case Reduction::bit_and: return ua & ub;
    case Reduction::bit_or: return ua | ub;
    default: return ua ^ ub;
  }
}

// Fills the results of the lanes in `calls`; null entries do not take part.
void compute(unsigned warp, WarpCall* const (&calls)[kLanes], uint32_t lanes) {
  const WarpCall& any = *calls[__builtin_ctz(lanes)];
  uint64_t common = 0;
  switch (any.op) {
    case WarpOp::sync:
      if (checking) synchronize_lanes(warp, lanes); // shuffles and votes order no memory
      return;
    case WarpOp::load_matrix: return load_matrices(warp, calls);
    case WarpOp::multiply: return multiply_matrices(calls);
    case WarpOp::shuffle:
    case WarpOp::shuffle_xor:
    case WarpOp::shuffle_up:
    case WarpOp::shuffle_down:
      for (unsigned lane = 0; lane < kLanes; ++lane) {
        if (calls[lane] == nullptr) continue;
        const int source = shuffle_source(*calls[lane], static_cast<int>(lane));
        if (calls[source] == nullptr)
          fail("collective", {nullptr, calls[lane]->site, &lane_of(warp, lane)}, "",
               format("lane %u reads lane %d, which is not in the mask %08x or has exited", lane, source, any.mask));
        calls[lane]->result = calls[source]->value;
      }
      return;
    case WarpOp::match_any:
      for (WarpCall* call : calls)
        for (unsigned lane = 0; call != nullptr && lane < kLanes; ++lane)
          if (calls[lane] != nullptr && calls[lane]->value == call->value) call->result |= uint64_t{1} << lane;
      return;
    case WarpOp::match_all:
      common = lanes;
      for (const WarpCall* call : calls)
        if (call != nullptr && call->value != any.value) common = 0;
      break;
    case WarpOp::ballot:
      for (unsigned lane = 0; lane < kLanes; ++lane)
        if (calls[lane] != nullptr && calls[lane]->value != 0) common |= uint64_t{1} << lane;
      break;
    case WarpOp::reduce:
      common = any.value;
      for (const WarpCall* call : calls)
        if (call != nullptr && call != &any) common = reduced(static_cast<Reduction>(any.operand), common, call->value);
      break;
  }
  for (WarpCall* call : calls)
    if (call != nullptr) call->result = common;
}

void check_agreement(const Thread& thread, unsigned first_lane, const WarpCall& first) {
  const WarpCall& call = *thread.call;
  if (call.op == first.op && call.mask == first.mask && call.site.line == first.site.line) return;
  fail(
      "collective", {nullptr, call.site, &thread}, "",
      format("lane %u is in %s with mask %08x at line %d while lane %u is in %s with mask %08x at line %d", thread.lane,
             name_of(call.op), call.mask, call.site.line, first_lane, name_of(first.op), first.mask, first.site.line));
}

// Carries out every collective of the warp whose live lanes have all arrived.
void complete_collectives(unsigned warp_index) {
  Warp& warp = warps[warp_index];
  for (uint32_t left = warp.waiting; left != 0;) {
    const auto first_lane = static_cast<unsigned>(__builtin_ctz(left));
    const WarpCall& first = *lane_of(warp_index, first_lane).call;
    left &= ~(first.mask | 1u << first_lane);
    const uint32_t lanes = first.mask & warp.live;
    if ((lanes & ~warp.waiting) != 0) continue; // a live lane is still on its way
    WarpCall* calls[kLanes] = {};
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      if (!(lanes >> lane & 1)) continue;
      calls[lane] = lane_of(warp_index, lane).call;
      check_agreement(lane_of(warp_index, lane), first_lane, first);
    }
    if (lanes != first.mask)
      report("early-exit", {nullptr, first.site, &lane_of(warp_index, first_lane)}, "",
             format("the mask %08x of %s names lanes %08x, which have exited or never existed", first.mask,
                    name_of(first.op), first.mask & ~warp.live));
    const bool whole_warp = first.op == WarpOp::load_matrix || first.op == WarpOp::multiply;
    if (whole_warp && lanes != kFullMask)
      fail("collective", {nullptr, first.site, &lane_of(warp_index, first_lane)}, "",
           format("%s needs all 32 lanes, and has %08x", name_of(first.op), lanes));
    compute(warp_index, calls, lanes);
    warp.waiting &= ~lanes;
    for (unsigned lane = 0; lane < kLanes; ++lane)
      if (lanes >> lane & 1) make_ready(lane_of(warp_index, lane));
  }
}

} // namespace

const char* name_of(WarpOp op) {
  static constexpr const char* names[] = {
      "__syncwarp", "__shfl_sync",      "__shfl_xor_sync",  "__shfl_up_sync",  "__shfl_down_sync",
      "a vote",     "__match_any_sync", "__match_all_sync", "a __reduce_sync", "ldmatrix",
      "mma"};
  return names[static_cast<int>(op)];
}

void begin_warps() {
  warps.assign((threads.size() + kLanes - 1) / kLanes, Warp());
  for (const Thread& t : threads) warps[t.warp].live |= 1u << t.lane;
}

void warp_thread_exited(const Thread& thread) {
  warps[thread.warp].live &= ~(1u << thread.lane);
  complete_collectives(thread.warp);
}

void warp_collective(WarpCall& call) {
  if (!(call.mask >> current->lane & 1))
    fail("collective", {nullptr, call.site}, "",
         format("lane %u calls %s with the mask %08x, which does not name it", current->lane, name_of(call.op),
                call.mask));
  current->state = State::in_collective;
  current->site = call.site;
  current->call = &call;
  warps[current->warp].waiting |= 1u << current->lane;
  complete_collectives(current->warp);
  wait_until_ready();
}

void matrix_collective(WarpOp op, void* payload, Site site) {
  WarpCall call{op, kFullMask, site};
  call.payload = payload;
  warp_collective(call);
}

} // namespace emulator
