// reduce: factor * (the sum of W shards in order, in FP32), stored dense or encoded again; the local step of a
// quantized all-reduce.
//
// Shards are codes and scales of equal [rows, cols] tensors, a fixed stride apart (the messages of a receive buffer).
// A thread sums its eight elements over all shards in registers (octet.cuh): every shard is read once.
#include "decode.cuh"
#include "encode.cuh"
#include "kernels.h"

namespace agoq::cuda {
namespace {

// The scaled sum of this thread's octet; zero beyond the row.
template <Format F>
__device__ __forceinline__ void sum_octet(const Shards& in, const Octet& o, float factor, const Decoder<F>& decoder,
                                          float (&sum)[kOctet]) {
  Packed shard = in.first;
  const int64_t scale_bytes = in.scales_stride * dtype_bytes(shard.scale_dtype);
  if (o.stored) decode_octet<F>(shard, o, kFloatMax, decoder, sum);
  for (int64_t w = 1; w < in.count; ++w) {
    shard.codes += in.codes_stride;
    shard.scales = static_cast<char*>(shard.scales) + scale_bytes;
    float v[kOctet];
    if (!o.stored) continue;
    decode_octet<F>(shard, o, kFloatMax, decoder, v);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) sum[i] = add_rn(sum[i], v[i]);
  }
#pragma unroll
  for (int i = 0; i < kOctet; ++i) sum[i] = i < o.valid ? mul_rn(sum[i], factor) : 0.0f;
}

template <Format F, bool Vec>
__global__ void __launch_bounds__(kBlockThreads) reduce_kernel(ReduceArgs a) {
  AGOQ_SHARED(float, table, [16]);
  const Decoder<F> decoder(table);
  if constexpr (F == Format::nf4) __syncthreads();
  const Octet o = locate_octet(a.in.first);
  float sum[kOctet] = {};
  sum_octet<F>(a.in, o, a.factor, decoder, sum);
  store_octet<Vec>(sum, a.out, o);
}

template <Format F, bool Stochastic>
__global__ void __launch_bounds__(kBlockThreads) reduce_quantize_kernel(ReduceQuantizeArgs a) {
  AGOQ_SHARED(float, table, [16]);
  const Decoder<F> decoder(table);
  if constexpr (F == Format::nf4) __syncthreads();
  const Octet o = locate_octet(a.out);
  float sum[kOctet] = {};
  sum_octet<F>(a.in, o, a.factor, decoder, sum);
  encode_octet<F, Stochastic>(sum, a.out, o, a.rounding);
}

} // namespace

int launch_reduce(const ReduceArgs& args, void* stream) {
  ReduceArgs a = args;
  if (a.in.first.rows == 0 || a.in.first.cols == 0) return 0;
  if (!codes_are_aligned(a.in)) return kMisaligned;
  merge_rows(a.in.first, a.out);
  const LaunchConfig config = octet_config(a.in.first, stream);
  return with_format(a.in.first.format, [&](auto f) {
    return with_bool(rows_are_aligned(a.out), [&](auto vec) {
      constexpr auto kernel = reduce_kernel<decltype(f)::value, decltype(vec)::value>;
      return launch(kernel, config, a);
    });
  });
}

int launch_reduce_quantize(const ReduceQuantizeArgs& a, void* stream) {
  if (a.out.rows == 0 || a.out.cols == 0) return 0;
  if (!codes_are_aligned(a.in) || !codes_are_aligned(a.out)) return kMisaligned;
  const LaunchConfig config = octet_config(a.out, stream);
  return with_format(a.out.format, [&](auto f) {
    return with_bool(a.rounding.stochastic, [&](auto stochastic) {
      constexpr auto kernel = reduce_quantize_kernel<decltype(f)::value, decltype(stochastic)::value>;
      return launch(kernel, config, a);
    });
  });
}

} // namespace agoq::cuda
