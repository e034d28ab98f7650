// Device code as a host compiler sees it: qualifiers, indices, shared memory, barriers, fences, intrinsics.
#pragma once

#include <math.h>

#include "site.h"
#include "types.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static_assert(false, "declare shared memory with AGOQ_SHARED or AGOQ_DYNAMIC_SHARED");
#define __constant__ static_assert(false, "constant memory is not emulated");

namespace emulator {

// The block's array that `key` identifies, the same for all its threads.
void* static_shared(const void* key, size_t bytes, size_t alignment, const char* name);
void* dynamic_shared();

enum class BlockVote { count, all, any };
void block_barrier(Site site);
int block_barrier_vote(BlockVote vote, bool predicate, Site site);

enum class Scope { block, device };
void fence(Scope scope);

} // namespace emulator

// Plain variables: the scheduler sets them whenever it resumes a thread.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

// The address of the key tells the arrays of different kernels apart, template instantiations included.
#define AGOQ_SHARED(type, name, dims)                           \
  static char name##_key;                                       \
  using name##_shared_type = type dims;                         \
  name##_shared_type& name = *static_cast<name##_shared_type*>( \
      ::emulator::static_shared(&name##_key, sizeof(name##_shared_type), alignof(name##_shared_type), #name))
#define AGOQ_DYNAMIC_SHARED(name) unsigned char* const name = static_cast<unsigned char*>(::emulator::dynamic_shared())

// --- barriers and fences -------------------------------------------------------------------------------------

inline void __syncthreads(emulator::Site site = emulator::Site::here()) { emulator::block_barrier(site); }
inline int __syncthreads_count(int predicate, emulator::Site site = emulator::Site::here()) {
  return emulator::block_barrier_vote(emulator::BlockVote::count, predicate != 0, site);
}
inline int __syncthreads_and(int predicate, emulator::Site site = emulator::Site::here()) {
  return emulator::block_barrier_vote(emulator::BlockVote::all, predicate != 0, site);
}
inline int __syncthreads_or(int predicate, emulator::Site site = emulator::Site::here()) {
  return emulator::block_barrier_vote(emulator::BlockVote::any, predicate != 0, site);
}
inline void __threadfence() { emulator::fence(emulator::Scope::device); }
inline void __threadfence_block() { emulator::fence(emulator::Scope::block); }

// --- intrinsics ----------------------------------------------------------------------------------------------

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
// Approximate on a GPU (2 ulp), exact to half an ulp here: compare results by tolerance.
inline float rsqrtf(float a) { return static_cast<float>(1.0 / sqrt(static_cast<double>(a))); }
inline float __expf(float a) { return expf(a); }

inline unsigned __float_as_uint(float f) { return __builtin_bit_cast(unsigned, f); }
inline int __float_as_int(float f) { return __builtin_bit_cast(int, f); }
inline float __uint_as_float(unsigned u) { return __builtin_bit_cast(float, u); }
inline float __int_as_float(int i) { return __builtin_bit_cast(float, i); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
inline int __ffs(int v) { return __builtin_ffs(v); }
