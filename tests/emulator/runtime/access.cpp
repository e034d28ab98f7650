// Accesses that reach the runtime by themselves rather than by a call-out: vectors and atomics.
#include <algorithm>
#include <cstring>

#include "checker.h"
#include "memory.h"
#include "state.h"

namespace emulator {
namespace {

void require_global(const void* p, Site site) {
  const size_t at = offset_of(p);
  if (is_shared(at))
    fail("misuse", {nullptr, site}, describe(at).buffer, "an access of global memory at a shared address");
}

void check_vector(const void* p, unsigned bytes, Access access, Site site) {
  if (checking) return check_access(*current, p, bytes, access, bytes, {nullptr, site});
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0)
    fail("misaligned", {nullptr, site}, describe(offset_of(p)).buffer, format("%u-byte access at %p", bytes, p));
}

template <class T>
T combine(AtomicOp op, T old, T operand, T compare) {
  switch (op) {
    case AtomicOp::add: return static_cast<T>(old + operand);
    case AtomicOp::min: return std::min(old, operand);
    case AtomicOp::max: return std::max(old, operand);
    case AtomicOp::exchange: return operand;
    case AtomicOp::compare_exchange: return old == compare ? operand : old;
    case AtomicOp::increment: return old >= operand ? T(0) : static_cast<T>(old + 1);
    default: break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == AtomicOp::bit_and) return old & operand;
    if (op == AtomicOp::bit_or) return old | operand;
    return old ^ operand;
  }
  return operand; // bit operations on floats do not compile on a GPU
}

template <class T>
uint64_t apply(AtomicOp op, void* p, uint64_t operand, uint64_t compare, Site site) {
  check_vector(p, sizeof(T), Access::atomic, site);
  if (checking) note_atomic(*current, p);
  T old, value, expected;
  memcpy(&old, p, sizeof(T));
  memcpy(&value, &operand, sizeof(T));
  memcpy(&expected, &compare, sizeof(T));
  value = combine(op, old, value, expected);
  memcpy(p, &value, sizeof(T));
  uint64_t bits = 0;
  memcpy(&bits, &old, sizeof(T));
  return bits;
}

} // namespace

void vector_load(void* value, const void* p, unsigned bytes, Site site) {
  require_global(p, site);
  check_vector(p, bytes, Access::read, site);
  memcpy(value, p, bytes);
}

void vector_store(void* p, const void* value, unsigned bytes, Site site) {
  require_global(p, site);
  check_vector(p, bytes, Access::write, site);
  memcpy(p, value, bytes);
}

uint64_t atomic(AtomicOp op, AtomicType type, void* p, uint64_t operand, uint64_t compare, Site site) {
  switch (type) {
    case AtomicType::int32: return apply<int32_t>(op, p, operand, compare, site);
    case AtomicType::uint32: return apply<uint32_t>(op, p, operand, compare, site);
    case AtomicType::uint64: return apply<uint64_t>(op, p, operand, compare, site);
    case AtomicType::float32: return apply<float>(op, p, operand, compare, site);
    default: return apply<double>(op, p, operand, compare, site);
  }
}

void fence(Scope scope) {
  if (checking) note_fence(*current, scope);
}

} // namespace emulator
