// Every launcher of src/cuda/kernels.h, registered for the tests. A new kernel adds one line here.
#include "cuda/kernels.h"

#include "registry.h"

namespace {

// norm's results are pointers beside its struct.
struct NormCall {
  agoq::NormArgs args;
  double* sum;
  bool* nonfinite;
};
int launch_norm(const NormCall& call, void* stream) {
  return agoq::cuda::launch_norm(call.args, call.sum, call.nonfinite, stream);
}

} // namespace

EMULATOR_KERNEL(quantize, agoq::QuantizeArgs, agoq::cuda::launch_quantize)
EMULATOR_KERNEL(dequantize, agoq::DequantizeArgs, agoq::cuda::launch_dequantize)
EMULATOR_KERNEL(accumulate, agoq::AccumulateArgs, agoq::cuda::launch_accumulate)
EMULATOR_KERNEL(reduce, agoq::ReduceArgs, agoq::cuda::launch_reduce)
EMULATOR_KERNEL(reduce_quantize, agoq::ReduceQuantizeArgs, agoq::cuda::launch_reduce_quantize)
EMULATOR_KERNEL(norm, NormCall, launch_norm)
EMULATOR_KERNEL(row_norm_quantize, agoq::RowNormQuantizeArgs, agoq::cuda::launch_row_norm_quantize)
EMULATOR_KERNEL(row_norm_backward, agoq::RowNormBackwardArgs, agoq::cuda::launch_row_norm_backward)
EMULATOR_KERNEL(part_sum, agoq::PartSumArgs, agoq::cuda::launch_part_sum)
EMULATOR_KERNEL(swiglu_quantize, agoq::SwigluQuantizeArgs, agoq::cuda::launch_swiglu_quantize)
EMULATOR_KERNEL(swiglu_backward, agoq::SwigluBackwardArgs, agoq::cuda::launch_swiglu_backward)
EMULATOR_KERNEL(gelu_quantize, agoq::GeluQuantizeArgs, agoq::cuda::launch_gelu_quantize)
EMULATOR_KERNEL(gelu_backward, agoq::GeluBackwardArgs, agoq::cuda::launch_gelu_backward)
