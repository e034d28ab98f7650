// Launchers of the CUDA kernels: an argument struct and a stream in, the launch's cudaError_t (0 is success) out.
//
// Pointers in the structs are device pointers. Launches of empty tensors do nothing. Nothing here synchronizes.
#pragma once

#include "../cpp/core/args.h"

namespace agoq::cuda {

int launch_quantize(const QuantizeArgs& args, void* stream);
int launch_dequantize(const DequantizeArgs& args, void* stream);
int launch_accumulate(const AccumulateArgs& args, void* stream);
int launch_reduce(const ReduceArgs& args, void* stream);
int launch_reduce_quantize(const ReduceQuantizeArgs& args, void* stream);
// The total into `sum`, and whether it is NaN into `nonfinite`; both device pointers.
int launch_norm(const NormArgs& args, double* sum, bool* nonfinite, void* stream);

// Fused with quantization. Weight, bias and dense tensors that are absent have null data.
int launch_row_norm_quantize(const RowNormQuantizeArgs& args, void* stream);
int launch_row_norm_backward(const RowNormBackwardArgs& args, void* stream); // a block for each part
int launch_part_sum(const PartSumArgs& args, void* stream);
int launch_swiglu_quantize(const SwigluQuantizeArgs& args, void* stream);
int launch_swiglu_backward(const SwigluBackwardArgs& args, void* stream);
int launch_gelu_quantize(const GeluQuantizeArgs& args, void* stream);
int launch_gelu_backward(const GeluBackwardArgs& args, void* stream);

} // namespace agoq::cuda
