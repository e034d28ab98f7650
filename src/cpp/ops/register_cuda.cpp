// The CUDA implementations of the ops; their schemas are in register_cpu.cpp.
#include "backend_cuda.h"
#include "codec_ops.h"

namespace agoq::ops {

STABLE_TORCH_LIBRARY_IMPL(agoq, CUDA, m) {
  m.impl("quantize", AGOQ_BOX(&quantize<CudaBackend>));
  m.impl("quantize_out", AGOQ_BOX(&quantize_out<CudaBackend>));
  m.impl("dequantize", AGOQ_BOX(&dequantize<CudaBackend>));
  m.impl("dequantize_out", AGOQ_BOX(&dequantize_out<CudaBackend>));
  m.impl("accumulate_", AGOQ_BOX(&accumulate_<CudaBackend>));
  m.impl("reduce", AGOQ_BOX(&reduce<CudaBackend>));
  m.impl("reduce_quantize_out", AGOQ_BOX(&reduce_quantize_out<CudaBackend>));
  m.impl("norm", AGOQ_BOX(&norm<CudaBackend>));
}

}  // namespace agoq::ops
