// The few CUDA primitives that kernels use: launches and shared memory. nvcc compiles them as they stand.
//
// Kernels include this header and ptx.cuh and use nothing of CUDA beyond them, warp collectives, barriers and atomics.
// So the same sources run on the emulator of tests/emulator too, which has a cuda_runtime.h of its own
// (docs/testing-cuda.md).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

// Shared memory of a kernel, static and dynamic (of the size that its launch asks for, 1024-byte aligned):
//   AGOQ_SHARED(float, table, [16]);
//   AGOQ_DYNAMIC_SHARED(tiles);  // unsigned char* tiles
#if defined(__CUDACC__)
#define AGOQ_SHARED(type, name, dims) __shared__ type name dims
#define AGOQ_DYNAMIC_SHARED(name)                                               \
  extern __shared__ __align__(1024) unsigned char agoq_dynamic_shared_memory[]; \
  unsigned char* const name = agoq_dynamic_shared_memory
#endif // elsewhere cuda_runtime.h defines both

namespace agoq::cuda {

struct LaunchConfig {
  dim3 grid, block;
  size_t dynamic_shared_bytes = 0;
  void* stream = nullptr;
};

// Starts `kernel(args...)` and returns the cudaError_t of the launch as int; 0 is success.
template <class... Params, class... Args>
int launch(void (*kernel)(Params...), const LaunchConfig& config, Args... args) {
  if (config.dynamic_shared_bytes > 48 * 1024) {
    const cudaError_t status =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(config.dynamic_shared_bytes));
    if (status != cudaSuccess) return status;
  }
  cudaLaunchConfig_t c = {};
  c.gridDim = config.grid;
  c.blockDim = config.block;
  c.dynamicSmemBytes = config.dynamic_shared_bytes;
  c.stream = static_cast<cudaStream_t>(config.stream);
  return cudaLaunchKernelEx(&c, kernel, Params(args)...);
}

} // namespace agoq::cuda
