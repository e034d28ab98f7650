// RMS norm fused with quantization of its input; row_norm.cuh holds the kernels.
#include "row_norm.cuh"

namespace agoq::cuda {

int launch_rms_norm_quantize(const RowNormQuantizeArgs& args, void* stream) {
  return launch_row_norm_quantize<false>(args, stream);
}

int launch_rms_norm_backward(const RowNormBackwardArgs& args, void* stream) {
  return launch_row_norm_backward<false>(args, stream);
}

} // namespace agoq::cuda
