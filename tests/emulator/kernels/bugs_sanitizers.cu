// Planted bugs that only the compiler's sanitizers see: local arrays and undefined arithmetic, and one out-of-bounds
// access of global memory that both the checker and Address Sanitizer see. Mended, each kernel copies its input.
#include "plant.h"

namespace {

template <bool Bug>
__global__ void local_past_end(Probe p) {
  uint32_t last[4] = {};
  const unsigned i = threadIdx.x;
  last[i % 4 + (Bug && i == 63 ? 1 : 0)] = p.in[i]; // FOUND local_past_end
  p.out[i] = last[i % 4];
}
PLANT(local_past_end, 1, 64, 0)

template <bool Bug>
__global__ void shift_too_far(Probe p) {
  const unsigned i = threadIdx.x;
  const unsigned bits = Bug ? i : i % 32;
  p.out[i] = p.in[i] ^ (1u << bits) ^ (1u << i % 32); // FOUND shift_too_far
}
PLANT(shift_too_far, 1, 64, 0)

template <bool Bug>
__global__ void signed_overflow(Probe p) {
  const int v = static_cast<int>(p.in[threadIdx.x]);
  const int more = Bug ? v + 0x7FFFFF00 : v; // FOUND signed_overflow
  p.out[threadIdx.x] = static_cast<uint32_t>(more);
}
PLANT(signed_overflow, 1, 64, 0)

template <bool Bug>
__global__ void global_past_end(Probe p) {
  const unsigned i = threadIdx.x;
  p.out[i] = p.in[i];
  if (Bug && i == 0) p.out[64] = 0; // FOUND global_past_end
}
PLANT(global_past_end, 1, 64, 0)

} // namespace
