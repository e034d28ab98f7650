// Warp collectives: shuffles, votes, matches, reductions and __syncwarp.
//
// Every call names the lanes that take part; the last of them to arrive computes the result of all. There is no
// __activemask: no kernel may depend on which lanes happen to run together.
#pragma once

#include <cstring>

#include "site.h"
#include "types.h"

namespace emulator {

enum class WarpOp {
  sync,
  shuffle,
  shuffle_xor,
  shuffle_up,
  shuffle_down,
  ballot,
  match_any,
  match_all,
  reduce,
  load_matrix,
  multiply
};
enum class Reduction { add, min_signed, max_signed, min_unsigned, max_unsigned, bit_and, bit_or, bit_xor };

// One lane's part in a collective. Lives on the lane's stack until the call returns.
struct WarpCall {
  WarpOp op;
  uint32_t mask;
  Site site;
  uint64_t value = 0;      // in: this lane's value or predicate
  int operand = 0;         // in: a shuffle's lane, delta or xor mask; a Reduction
  int width = 32;          // in: lanes of a shuffle's segment
  void* payload = nullptr; // in: registers of a matrix instruction (ptx.h)
  uint64_t result = 0;     // out
};

// Waits for the other lanes of call.mask and fills call.result.
void warp_collective(WarpCall& call);

template <class T>
T shuffle(WarpOp op, unsigned mask, T value, int operand, int width, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  WarpCall call{op, mask, site};
  memcpy(&call.value, &value, sizeof value);
  call.operand = operand;
  call.width = width;
  warp_collective(call);
  memcpy(&value, &call.result, sizeof value);
  return value;
}

template <class T>
T reduce(Reduction reduction, unsigned mask, T value, Site site) {
  WarpCall call{WarpOp::reduce, mask, site};
  call.value = static_cast<uint32_t>(value);
  call.operand = static_cast<int>(reduction);
  warp_collective(call);
  return static_cast<T>(static_cast<uint32_t>(call.result));
}

inline unsigned ballot(unsigned mask, bool predicate, Site site) {
  WarpCall call{WarpOp::ballot, mask, site};
  call.value = predicate;
  warp_collective(call);
  return static_cast<unsigned>(call.result);
}

template <class T>
unsigned match(WarpOp op, unsigned mask, T value, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "matches compare 4 or 8 bytes");
  WarpCall call{op, mask, site};
  memcpy(&call.value, &value, sizeof value);
  warp_collective(call);
  return static_cast<unsigned>(call.result);
}

} // namespace emulator

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, emulator::Site site = emulator::Site::here()) {
  emulator::WarpCall call{emulator::WarpOp::sync, mask, site};
  emulator::warp_collective(call);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, emulator::Site site = emulator::Site::here()) {
  return emulator::shuffle(emulator::WarpOp::shuffle, mask, value, lane, width, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, emulator::Site site = emulator::Site::here()) {
  return emulator::shuffle(emulator::WarpOp::shuffle_xor, mask, value, lanes, width, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, emulator::Site site = emulator::Site::here()) {
  return emulator::shuffle(emulator::WarpOp::shuffle_up, mask, value, static_cast<int>(delta), width, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   emulator::Site site = emulator::Site::here()) {
  return emulator::shuffle(emulator::WarpOp::shuffle_down, mask, value, static_cast<int>(delta), width, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, emulator::Site site = emulator::Site::here()) {
  return emulator::ballot(mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, emulator::Site site = emulator::Site::here()) {
  return emulator::ballot(mask, predicate != 0, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, emulator::Site site = emulator::Site::here()) {
  return emulator::ballot(mask, predicate == 0, site) == 0;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, emulator::Site site = emulator::Site::here()) {
  return emulator::match(emulator::WarpOp::match_any, mask, value, site);
}
template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* predicate, emulator::Site site = emulator::Site::here()) {
  const unsigned lanes = emulator::match(emulator::WarpOp::match_all, mask, value, site);
  *predicate = lanes != 0;
  return lanes;
}

inline unsigned __reduce_add_sync(unsigned mask, unsigned v, emulator::Site site = emulator::Site::here()) {
  return emulator::reduce(emulator::Reduction::add, mask, v, site);
}
inline int __reduce_add_sync(unsigned mask, int v, emulator::Site site = emulator::Site::here()) {
  return emulator::reduce(emulator::Reduction::add, mask, v, site);
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v, emulator::Site site = emulator::Site::here()) {
  return emulator::reduce(emulator::Reduction::min_unsigned, mask, v, site);
}
inline int __reduce_min_sync(unsigned mask, int v, emulator::Site site = emulator::Site::here()) {
  return emulator::reduce(emulator::Reduction::min_signed, mask, v, site);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v, emulator::Site site = emulator::Site::here()) {
  return emulator::reduce(emulator::Reduction::max_unsigned, mask, v, site);
}
inline int __reduce_max_sync(unsigned mask, int v, emulator::Site site = emulator::Site::here()) {
  return emulator::reduce(emulator::Reduction::max_signed, mask, v, site);
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned v, emulator::Site site = emulator::Site::here()) {
  return emulator::reduce(emulator::Reduction::bit_and, mask, v, site);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned v, emulator::Site site = emulator::Site::here()) {
  return emulator::reduce(emulator::Reduction::bit_or, mask, v, site);
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned v, emulator::Site site = emulator::Site::here()) {
  return emulator::reduce(emulator::Reduction::bit_xor, mask, v, site);
}
