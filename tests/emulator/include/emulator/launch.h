// The launch API of CUDA's runtime, as far as src/cuda/launch.cuh uses it.
#pragma once

#include <type_traits>

#include "types.h"

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorMisalignedAddress = 716,
  cudaErrorLaunchFailure = 719
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
using cudaStream_t = struct CUstream_st*;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace emulator {

struct KernelLaunch {
  const void* kernel; // its address, for its name
  dim3 grid, block;
  size_t dynamic_shared_bytes;
  void (*run)(const void* parameters); // calls the kernel once, as one thread
  const void* parameters;
  size_t parameters_bytes;
};

// Runs every thread of every block. cudaErrorLaunchFailure if a finding made it impossible to go on.
cudaError_t launch(const KernelLaunch& launch);
cudaError_t allow_dynamic_shared(const void* kernel, int bytes);

} // namespace emulator

inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  return emulator::allow_dynamic_shared(kernel, value);
}

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  const auto call = [kernel, ... args = static_cast<Params>(args)] { kernel(args...); };
  const auto run = [](const void* parameters) {
    (*static_cast<const std::remove_cvref_t<decltype(call)>*>(parameters))();
  };
  return emulator::launch({reinterpret_cast<const void*>(kernel), config->gridDim, config->blockDim,
                           config->dynamicSmemBytes, run, &call, sizeof call});
}
