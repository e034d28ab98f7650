// accumulate: inout <- encode(decode(inout) + factor * x), in FP32 and in one pass (AGoQ, QuanGrad's storage step).
//
// codes uint8 [rows, row_bytes] and scales [rows, groups(, 2)] are read and written; x [rows, cols] is float32, float16
// or bfloat16. A thread owns the codes of the eight elements it decodes (octet.cuh), so no other thread reads what it
// overwrites. The scale of a group belongs to several lanes: a __syncwarp orders their reads before its replacement.
#include "decode.cuh"
#include "encode.cuh"
#include "kernels.h"

namespace agoq::cuda {
namespace {

// Four blocks a multiprocessor suffice for scalar kernels, whose registers spill otherwise; 0 asks for nothing.
template <Format F, bool Stochastic, bool Vec>
__global__ void __launch_bounds__(kBlockThreads, Vec ? 0 : 4) accumulate_kernel(AccumulateArgs a) {
  AGOQ_SHARED(float, table, [16]);
  const Decoder<F> decoder(table);
  if constexpr (F == Format::nf4) __syncthreads();
  const Octet o = locate_octet(a.inout);
  float x[kOctet], sum[kOctet] = {};
  load_octet<Vec>(a.x, o, x);
  if (o.stored) decode_octet<F>(a.inout, o, kFloatMax, decoder, sum);
#pragma unroll
  for (int i = 0; i < kOctet; ++i) sum[i] = i < o.valid ? add_rn(sum[i], mul_rn(x[i], a.factor)) : 0.0f;
  __syncwarp(); // all lanes of a group have read its scale before the first one replaces it: shuffles order no memory
  encode_octet<F, Stochastic>(sum, a.inout, o, a.rounding);
}

} // namespace

int launch_accumulate(const AccumulateArgs& args, void* stream) {
  AccumulateArgs a = args;
  if (a.inout.rows == 0 || a.inout.cols == 0) return 0;
  if (!codes_are_aligned(a.inout)) return kMisaligned;
  merge_rows(a.inout, a.x);
  const LaunchConfig config = octet_config(a.inout, stream);
  return with_format(a.inout.format, [&](auto f) {
    return with_bool(a.rounding.stochastic, [&](auto stochastic) {
      return with_bool(rows_are_aligned(a.x), [&](auto vec) {
        constexpr auto kernel =
            accumulate_kernel<decltype(f)::value, decltype(stochastic)::value, decltype(vec)::value>;
        return launch(kernel, config, a);
      });
    });
  });
}

} // namespace agoq::cuda
