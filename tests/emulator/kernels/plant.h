// Kernels with a planted bug: a template <bool Bug>, launched as it is and with the bug mended.
//
// The line where the emulator has to find the bug ends in the comment "FOUND kernel_name"; kernels that share their
// code have "FOUND bulk_*" on every line of it that may come up.
#pragma once

#include "cuda/ptx.cuh"

#if defined(__CUDACC__)
#define EMULATOR_KERNEL(name, Args, launcher) [[maybe_unused]] static const auto registered_##name = &launcher;
#else
#include "registry.h"
#endif

// What every such kernel gets: n words in, n words out, and 64 words of scratch, zero at first.
struct Probe {
  const uint32_t* in;
  uint32_t* out;
  uint32_t* scratch;
  int64_t n;
};

namespace ptx = agoq::ptx;

inline constexpr unsigned kFull = 0xFFFFFFFFu;

__device__ __forceinline__ int64_t my_index() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

// `name` and `name_fixed`, launched with these blocks, threads and bytes of dynamic shared memory.
#define PLANT(name, blocks, threads, dynamic_bytes)                                                  \
  static int launch_##name(const Probe& p, void* stream) {                                           \
    return agoq::cuda::launch(name<true>, {dim3(blocks), dim3(threads), dynamic_bytes, stream}, p);  \
  }                                                                                                  \
  static int launch_##name##_fixed(const Probe& p, void* stream) {                                   \
    return agoq::cuda::launch(name<false>, {dim3(blocks), dim3(threads), dynamic_bytes, stream}, p); \
  }                                                                                                  \
  EMULATOR_KERNEL(name, Probe, launch_##name)                                                        \
  EMULATOR_KERNEL(name##_fixed, Probe, launch_##name##_fixed)

// A kernel without a bug.
#define SOUND(name, blocks, threads, dynamic_bytes)                               \
  static int launch_##name(const Probe& p, void* stream) {                        \
    return agoq::cuda::launch(name, {blocks, threads, dynamic_bytes, stream}, p); \
  }                                                                               \
  EMULATOR_KERNEL(name, Probe, launch_##name)
