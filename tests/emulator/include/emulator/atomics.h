// Atomics. They never race with each other; after a fence they also hand over what the thread wrote before it.
#pragma once

#include <cstring>
#include <type_traits>

#include "site.h"
#include "types.h"

namespace emulator {

enum class AtomicOp { add, min, max, exchange, compare_exchange, increment, bit_and, bit_or, bit_xor };
enum class AtomicType { int32, uint32, uint64, float32, float64 };

// Performs the operation and returns the old bits. `compare` is used by compare_exchange only.
uint64_t atomic(AtomicOp op, AtomicType type, void* p, uint64_t operand, uint64_t compare, Site site);

template <class T>
T atomic_on(AtomicOp op, T* p, T operand, T compare, Site site) {
  constexpr AtomicType type = std::is_same_v<T, int>                  ? AtomicType::int32
                              : std::is_same_v<T, unsigned>           ? AtomicType::uint32
                              : std::is_same_v<T, unsigned long long> ? AtomicType::uint64
                              : std::is_same_v<T, float>              ? AtomicType::float32
                                                                      : AtomicType::float64;
  static_assert(type != AtomicType::float64 || std::is_same_v<T, double>, "no atomics on this type");
  uint64_t bits = 0, expected = 0;
  memcpy(&bits, &operand, sizeof(T));
  memcpy(&expected, &compare, sizeof(T));
  bits = atomic(op, type, p, bits, expected, site);
  memcpy(&operand, &bits, sizeof(T));
  return operand;
}

} // namespace emulator

template <class T>
T atomicAdd(T* p, std::type_identity_t<T> v, emulator::Site site = emulator::Site::here()) {
  return emulator::atomic_on(emulator::AtomicOp::add, p, v, T(), site);
}
template <class T>
T atomicMin(T* p, std::type_identity_t<T> v, emulator::Site site = emulator::Site::here()) {
  return emulator::atomic_on(emulator::AtomicOp::min, p, v, T(), site);
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> v, emulator::Site site = emulator::Site::here()) {
  return emulator::atomic_on(emulator::AtomicOp::max, p, v, T(), site);
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> v, emulator::Site site = emulator::Site::here()) {
  return emulator::atomic_on(emulator::AtomicOp::exchange, p, v, T(), site);
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> compare, std::type_identity_t<T> v,
            emulator::Site site = emulator::Site::here()) {
  return emulator::atomic_on(emulator::AtomicOp::compare_exchange, p, v, compare, site);
}
inline unsigned atomicInc(unsigned* p, unsigned limit, emulator::Site site = emulator::Site::here()) {
  return emulator::atomic_on(emulator::AtomicOp::increment, p, limit, 0u, site);
}
template <class T>
T atomicAnd(T* p, std::type_identity_t<T> v, emulator::Site site = emulator::Site::here()) {
  return emulator::atomic_on(emulator::AtomicOp::bit_and, p, v, T(), site);
}
template <class T>
T atomicOr(T* p, std::type_identity_t<T> v, emulator::Site site = emulator::Site::here()) {
  return emulator::atomic_on(emulator::AtomicOp::bit_or, p, v, T(), site);
}
template <class T>
T atomicXor(T* p, std::type_identity_t<T> v, emulator::Site site = emulator::Site::here()) {
  return emulator::atomic_on(emulator::AtomicOp::bit_xor, p, v, T(), site);
}
