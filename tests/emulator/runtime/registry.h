// The kernels that tests can launch by name.
#pragma once

#include <cstddef>

namespace emulator {

struct Kernel {
  const char* name;
  size_t args_bytes;
  int (*launch)(const void* args);
};
struct Registration {
  explicit Registration(const Kernel& kernel);
};

} // namespace emulator

// EMULATOR_KERNEL(quantize, agoq::QuantizeArgs, agoq::cuda::launch_quantize): a launcher of src/cuda/kernels.h.
#define EMULATOR_KERNEL(name, Args, launcher)            \
  static const emulator::Registration registered_##name( \
      {#name, sizeof(Args), [](const void* args) { return launcher(*static_cast<const Args*>(args), nullptr); }});
