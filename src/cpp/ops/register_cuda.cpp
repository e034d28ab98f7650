// The CUDA implementations of the ops; their schemas are in register_cpu.cpp.
#include "backend_cuda.h"
#include "codec_ops.h"
#include "fused_ops.h"

namespace agoq::ops {

STABLE_TORCH_LIBRARY_IMPL(agoq, CUDA, m) {
  m.impl("quantize", AGOQ_BOX(&quantize<CudaBackend>));
  m.impl("quantize_out", AGOQ_BOX(&quantize_out<CudaBackend>));
  m.impl("dequantize", AGOQ_BOX(&dequantize<CudaBackend>));
  m.impl("dequantize_out", AGOQ_BOX(&dequantize_out<CudaBackend>));
  m.impl("accumulate_", AGOQ_BOX(&accumulate_<CudaBackend>));
  m.impl("reduce", AGOQ_BOX(&reduce<CudaBackend>));
  m.impl("reduce_out", AGOQ_BOX(&reduce_out<CudaBackend>));
  m.impl("reduce_quantize_out", AGOQ_BOX(&reduce_quantize_out<CudaBackend>));
  m.impl("norm", AGOQ_BOX(&norm<CudaBackend>));
  m.impl("rms_norm_quantize", AGOQ_BOX(&rms_norm_quantize<CudaBackend>));
  m.impl("rms_norm_dequantize", AGOQ_BOX(&rms_norm_dequantize<CudaBackend>));
  m.impl("rms_norm_backward", AGOQ_BOX(&rms_norm_backward<CudaBackend>));
  m.impl("layer_norm_quantize", AGOQ_BOX(&layer_norm_quantize<CudaBackend>));
  m.impl("layer_norm_dequantize", AGOQ_BOX(&layer_norm_dequantize<CudaBackend>));
  m.impl("layer_norm_backward", AGOQ_BOX(&layer_norm_backward<CudaBackend>));
  m.impl("swiglu_quantize", AGOQ_BOX(&swiglu_quantize<CudaBackend>));
  m.impl("swiglu_dequantize", AGOQ_BOX(&swiglu_dequantize<CudaBackend>));
  m.impl("swiglu_backward", AGOQ_BOX(&swiglu_backward<CudaBackend>));
  m.impl("gelu_quantize", AGOQ_BOX(&gelu_quantize<CudaBackend>));
  m.impl("gelu_dequantize", AGOQ_BOX(&gelu_dequantize<CudaBackend>));
  m.impl("gelu_backward", AGOQ_BOX(&gelu_backward<CudaBackend>));
}

} // namespace agoq::ops
