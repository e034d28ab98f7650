// quantize: t = x / scale, code = round(t), scale = amax(group) / qmax rounded up (docs/formats.md).
//
// x [rows, cols] float32, float16 or bfloat16 -> codes uint8 [rows, row_bytes], scales [rows, groups(, 2)].
// A thread holds eight consecutive elements (octet.cuh); the lanes of a group share its extremes by shuffles.
// One pass: x is read once, codes and scales are written once.
#include "encode.cuh"
#include "kernels.h"

namespace agoq::cuda {
namespace {

template <Format F, bool Stochastic, bool Vec>
__global__ void __launch_bounds__(kBlockThreads) quantize_kernel(QuantizeArgs a) {
  const Octet o = locate_octet(a.out);
  float v[kOctet];
  load_octet<Vec>(a.x, o, v);
  encode_octet<F, Stochastic>(v, a.out, o, a.rounding);
}

} // namespace

int launch_quantize(const QuantizeArgs& args, void* stream) {
  QuantizeArgs a = args;
  if (a.out.rows == 0 || a.out.cols == 0) return 0;
  if (!codes_are_aligned(a.out)) return kMisaligned;
  merge_rows(a.out, a.x);
  const LaunchConfig config = octet_config(a.out, stream);
  return with_format(a.out.format, [&](auto f) {
    return with_bool(a.rounding.stochastic, [&](auto stochastic) {
      return with_bool(rows_are_aligned(a.x), [&](auto vec) {
        constexpr auto kernel = quantize_kernel<decltype(f)::value, decltype(stochastic)::value, decltype(vec)::value>;
        return launch(kernel, config, a);
      });
    });
  });
}

} // namespace agoq::cuda
