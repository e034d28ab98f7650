// dequantize: value(code) * scale (uint4: + min) in FP32, saturated and rounded to the output's dtype
// (docs/formats.md).
//
// codes uint8 [rows, row_bytes], scales [rows, groups(, 2)] -> out [rows, cols] float32, float16 or bfloat16.
// A thread decodes eight consecutive elements (octet.cuh). One pass over memory.
#include "decode.cuh"
#include "kernels.h"

namespace agoq::cuda {
namespace {

template <Format F, bool Vec>
__global__ void __launch_bounds__(kBlockThreads) dequantize_kernel(DequantizeArgs a) {
  AGOQ_SHARED(float, table, [16]);
  const Decoder<F> decoder(table);
  if constexpr (F == Format::nf4) __syncthreads();
  const Octet o = locate_octet(a.in);
  if (o.valid == 0) return;
  float v[kOctet];
  decode_octet<F>(a.in, o, max_finite(a.out.dtype), decoder, v);
  store_octet<Vec>(v, a.out, o);
}

} // namespace

int launch_dequantize(const DequantizeArgs& args, void* stream) {
  DequantizeArgs a = args;
  if (a.in.rows == 0 || a.in.cols == 0) return 0;
  if (!codes_are_aligned(a.in)) return kMisaligned;
  merge_rows(a.in, a.out);
  const LaunchConfig config = octet_config(a.in, stream);
  return with_format(a.in.format, [&](auto f) {
    return with_bool(rows_are_aligned(a.out), [&](auto vec) {
      constexpr auto kernel = dequantize_kernel<decltype(f)::value, decltype(vec)::value>;
      return launch(kernel, config, a);
    });
  });
}

} // namespace agoq::cuda
