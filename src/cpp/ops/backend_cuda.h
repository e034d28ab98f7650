// The CUDA backend: sets the device, finds the current stream, and checks the status of each launch.
#pragma once

#include <cuda_runtime.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "../../cuda/kernels.h"
#include "box.h"

namespace agoq::ops {

struct CudaBackend {
  torch::stable::accelerator::DeviceGuard guard;
  void* stream = nullptr;

  explicit CudaBackend(const torch::stable::Tensor& x) : guard(x.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  }

  static void check(const char* op, int status) {
    STD_TORCH_CHECK(status != cudaErrorMisalignedAddress, op,
                    ": packed and its shards must start at multiples of 8 bytes on CUDA");
    STD_TORCH_CHECK(status == 0, op, ": CUDA launch failed: ", cudaGetErrorString(static_cast<cudaError_t>(status)));
  }

  void quantize(const QuantizeArgs& a) const { check("quantize", cuda::launch_quantize(a, stream)); }
  void dequantize(const DequantizeArgs& a) const { check("dequantize", cuda::launch_dequantize(a, stream)); }
  void accumulate(const AccumulateArgs& a) const { check("accumulate_", cuda::launch_accumulate(a, stream)); }
  void reduce(const ReduceArgs& a) const { check("reduce", cuda::launch_reduce(a, stream)); }
  void reduce_quantize(const ReduceQuantizeArgs& a) const {
    check("reduce_quantize_out", cuda::launch_reduce_quantize(a, stream));
  }
  void norm(const NormArgs& a, double* sum, bool* nonfinite) const {
    check("norm", cuda::launch_norm(a, sum, nonfinite, stream));
  }

  // Parts of the rows over which gradients of a norm's parameters are summed: one block each.
  static constexpr int64_t kRowParts = 512;

  void row_norm_quantize(const char* op, const RowNormQuantizeArgs& a) const {
    check(op, cuda::launch_row_norm_quantize(a, stream));
  }
  void row_norm_backward(const char* op, const RowNormBackwardArgs& a) const {
    check(op, cuda::launch_row_norm_backward(a, stream));
  }
  void part_sum(const char* op, const PartSumArgs& a) const { check(op, cuda::launch_part_sum(a, stream)); }
  void swiglu_quantize(const SwigluQuantizeArgs& a) const {
    check("swiglu_quantize", cuda::launch_swiglu_quantize(a, stream));
  }
  void swiglu_backward(const char* op, const SwigluBackwardArgs& a) const {
    check(op, cuda::launch_swiglu_backward(a, stream));
  }
  void gelu_quantize(const GeluQuantizeArgs& a) const { check("gelu_quantize", cuda::launch_gelu_quantize(a, stream)); }
  void gelu_backward(const char* op, const GeluBackwardArgs& a) const {
    check(op, cuda::launch_gelu_backward(a, stream));
  }
};

} // namespace agoq::ops
