// swiglu: h = round(silu(gate)) * up, and its gradients, fused with quantization of gate and up.
//
// gate, up [rows, cols] -> h in the dtype both promote to, codes and scales of each. Backward, from the codes:
// dup = dh act with act = round(silu(gate)), dgate = silu'(gate) round(dh up), and h again; each rounding is to the
// dtype of gate, as PyTorch rounds. A thread holds eight consecutive elements of each tensor (octet.cuh). One pass over
// memory.
#include "fused.cuh"
#include "kernels.h"

namespace agoq::cuda {
namespace {

__device__ __forceinline__ void multiply(const float (&x)[kOctet], const float (&y)[kOctet], float (&out)[kOctet]) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) out[i] = mul_rn(x[i], y[i]);
}

// Two blocks a multiprocessor suffice, so that registers need not spill.
template <Format F>
__global__ void __launch_bounds__(kBlockThreads, 2) swiglu_quantize_kernel(SwigluQuantizeArgs a, bool aligned) {
  const Octet o = locate_octet(a.gate_out);
  float gate[kOctet], up[kOctet], h[kOctet];
  load_elements(a.gate, o, aligned, gate);
  load_elements(a.up, o, aligned, up);
#pragma unroll
  for (int i = 0; i < kOctet; ++i) h[i] = mul_rn(rounded(silu(gate[i]), a.gate.dtype), up[i]);
  store_elements(h, a.h, o, aligned);
  const bool keep_up = a.up_out.codes != nullptr;
  Packed out = a.gate_out;
#pragma unroll 1 // one copy of the encoder
  for (int k = 0; k < (keep_up ? 2 : 1); ++k) {
    encode_nearest_octet<F>(gate, out, o);
    out = a.up_out;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) gate[i] = up[i];
  }
}

template <int Bits>
__global__ void __launch_bounds__(kBlockThreads) swiglu_backward_kernel(SwigluBackwardArgs a, bool aligned) {
  AGOQ_SHARED(float, table, [16]);
  const BitsDecoder<Bits> decoder(a.gate.format, table);
  if constexpr (Bits == 4) __syncthreads();
  const Octet o = locate_octet(a.gate);
  if (o.valid == 0) return;
  float gate[kOctet], up[kOctet] = {}, act[kOctet], dh[kOctet], out[kOctet];
  decode_octet(a.gate, o, max_finite(a.gate_dtype), decoder, gate);
  if (a.up.codes != nullptr) decode_octet(a.up, o, max_finite(a.up_dtype), decoder, up);
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    gate[i] = rounded(gate[i], a.gate_dtype);
    up[i] = rounded(up[i], a.up_dtype);
    act[i] = rounded(silu(gate[i]), a.gate_dtype);
  }
  if (a.h.data != nullptr) {
    multiply(act, up, out);
    store_elements(out, a.h, o, aligned);
  }
  if (a.dh.data == nullptr) return;
  load_elements(a.dh, o, aligned, dh);
  if (a.dup.data != nullptr) {
    multiply(dh, act, out);
    store_elements(out, a.dup, o, aligned);
  }
  if (a.dgate.data != nullptr) {
    multiply(dh, up, out);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) out[i] = silu_gradient(rounded(out[i], a.gate_dtype), gate[i], sigmoid(gate[i]));
    store_elements(out, a.dgate, o, aligned);
  }
}

} // namespace

int launch_swiglu_quantize(const SwigluQuantizeArgs& a, void* stream) {
  if (a.gate_out.rows == 0 || a.gate_out.cols == 0) return 0;
  if (!codes_are_aligned(a.gate_out) || !codes_are_aligned(a.up_out)) return kMisaligned;
  const LaunchConfig config = octet_config(a.gate_out, stream);
  const bool aligned = rows_are_aligned(a.gate) && rows_are_aligned(a.up) && rows_are_aligned(a.h);
  return with_format(a.gate_out.format, [&](auto f) {
    constexpr auto kernel = swiglu_quantize_kernel<decltype(f)::value>;
    return launch(kernel, config, a, aligned);
  });
}

int launch_swiglu_backward(const SwigluBackwardArgs& a, void* stream) {
  if (a.gate.rows == 0 || a.gate.cols == 0) return 0;
  if (!codes_are_aligned(a.gate) || !codes_are_aligned(a.up)) return kMisaligned;
  const LaunchConfig config = octet_config(a.gate, stream);
  const bool aligned =
      rows_are_aligned(a.dh) && rows_are_aligned(a.dgate) && rows_are_aligned(a.dup) && rows_are_aligned(a.h);
  return with_bits(a.gate.format, [&](auto bits) {
    constexpr auto kernel = swiglu_backward_kernel<decltype(bits)::value>;
    return launch(kernel, config, a, aligned);
  });
}

} // namespace agoq::cuda
