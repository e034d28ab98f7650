// gelu: y = x Phi(x), by erf or by PyTorch's tanh approximation, and its gradient, fused with quantization of x.
//
// x [rows, cols] -> y in x's dtype, codes and scales. Backward, from the codes: dx = dy gelu'(x), and y again.
// A thread holds eight consecutive elements (octet.cuh). One pass over memory.
#include "fused.cuh"
#include "kernels.h"

namespace agoq::cuda {
namespace {

template <Format F>
__global__ void __launch_bounds__(kBlockThreads) gelu_quantize_kernel(GeluQuantizeArgs a, bool aligned) {
  const Octet o = locate_octet(a.out);
  float x[kOctet], y[kOctet];
  load_elements(a.x, o, aligned, x);
#pragma unroll
  for (int i = 0; i < kOctet; ++i) y[i] = a.tanh ? gelu_tanh(x[i]) : gelu_erf(x[i]);
  store_elements(y, a.y, o, aligned);
  encode_nearest_octet<F>(x, a.out, o);
}

template <int Bits>
__global__ void __launch_bounds__(kBlockThreads) gelu_backward_kernel(GeluBackwardArgs a, bool aligned) {
  AGOQ_SHARED(float, table, [16]);
  const BitsDecoder<Bits> decoder(a.in.format, table);
  if constexpr (Bits == 4) __syncthreads();
  const Octet o = locate_octet(a.in);
  if (o.valid == 0) return;
  float x[kOctet], out[kOctet];
  decode_octet(a.in, o, max_finite(a.dtype), decoder, x);
#pragma unroll
  for (int i = 0; i < kOctet; ++i) x[i] = rounded(x[i], a.dtype);
  if (a.y.data != nullptr) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) out[i] = a.tanh ? gelu_tanh(x[i]) : gelu_erf(x[i]);
    store_elements(out, a.y, o, aligned);
  }
  if (a.dy.data == nullptr) return;
  load_elements(a.dy, o, aligned, out);
#pragma unroll
  for (int i = 0; i < kOctet; ++i) out[i] = a.tanh ? gelu_tanh_gradient(out[i], x[i]) : gelu_erf_gradient(out[i], x[i]);
  store_elements(out, a.dx, o, aligned);
}

} // namespace

int launch_gelu_quantize(const GeluQuantizeArgs& a, void* stream) {
  if (a.out.rows == 0 || a.out.cols == 0) return 0;
  if (!codes_are_aligned(a.out)) return kMisaligned;
  const LaunchConfig config = octet_config(a.out, stream);
  const bool aligned = rows_are_aligned(a.x) && rows_are_aligned(a.y);
  return with_format(a.out.format, [&](auto f) {
    constexpr auto kernel = gelu_quantize_kernel<decltype(f)::value>;
    return launch(kernel, config, a, aligned);
  });
}

int launch_gelu_backward(const GeluBackwardArgs& a, void* stream) {
  if (a.in.rows == 0 || a.in.cols == 0) return 0;
  if (!codes_are_aligned(a.in)) return kMisaligned;
  const LaunchConfig config = octet_config(a.in, stream);
  const bool aligned = rows_are_aligned(a.dy) && rows_are_aligned(a.dx) && rows_are_aligned(a.y);
  return with_bits(a.in.format, [&](auto bits) {
    constexpr auto kernel = gelu_backward_kernel<decltype(bits)::value>;
    return launch(kernel, config, a, aligned);
  });
}

} // namespace agoq::cuda
