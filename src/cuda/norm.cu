// norm: the sum of squares of the decoded values, FP64, in the order of docs/formats.md ("Norm"), and whether it is
// NaN.
//
// First kernel: one warp a chunk of 16384 elements of a row. The lanes decode 256 elements at a time, eight each, into
// shared memory; then lane j adds the squares of elements j, j + 32, ... to its FP64 sum, and at the end of the chunk
// the lanes are added in halves. Second kernel: one warp does the same with the chunk sums. The square of an FP32
// number is exact in FP64, so an fma rounds as a multiplication and an addition would.
#include "decode.cuh"
#include "encode.cuh"
#include "kernels.h"

namespace agoq::cuda {
namespace {

inline constexpr int kWarps = kBlockThreads / 32;
inline constexpr int kStep = 32 * kOctet; // elements that a warp decodes at a time

// Lane 0 receives the sum: lane j of 32 adds lane j + 16, then j + 8, ...
__device__ __forceinline__ double add_lanes_in_halves(double value) {
  for (int half = kNormLanes / 2; half > 0; half /= 2) value += __shfl_down_sync(kFullWarp, value, half);
  return value;
}

template <Format F>
__global__ void __launch_bounds__(kBlockThreads) norm_kernel(NormArgs a) {
  AGOQ_SHARED(float, table, [16]);
  AGOQ_SHARED(float, values, [kWarps][kStep]);
  const Decoder<F> decoder(table);
  if constexpr (F == Format::nf4) __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row_chunks = ceil_div(a.in.cols, kNormChunk);
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (chunk >= a.in.rows * row_chunks) return; // a whole warp
  const int64_t row = chunk / row_chunks, first = (chunk - row * row_chunks) * kNormChunk;
  const int64_t groups = num_groups(a.in.cols, a.in.group_size);
  const int64_t last = first + kNormChunk < a.in.cols ? first + kNormChunk : a.in.cols;
  double sum = 0.0;
  for (int64_t start = first; start < last; start += kStep) {
    const int64_t col = start + lane * kOctet, left = last - col;
    const int valid = left <= 0 ? 0 : left < kOctet ? static_cast<int>(left) : kOctet;
    float v[kOctet] = {};
    if (valid > 0)
      decode_octet<F>(a.in, {row, row * groups + col / a.in.group_size, col, valid, true}, kFloatMax, decoder, v);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) values[warp][lane * kOctet + i] = i < valid ? v[i] : 0.0f;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const double value = values[warp][i * 32 + lane];
      sum += value * value;
    }
    __syncwarp();
  }
  sum = add_lanes_in_halves(sum);
  if (lane == 0) a.partial[chunk] = sum;
}

__global__ void __launch_bounds__(32)
    norm_total_kernel(const double* partial, int64_t count, double* sum, bool* nonfinite) {
  double lane_sum = 0.0;
  for (int64_t i = threadIdx.x; i < count; i += kNormLanes) lane_sum += partial[i];
  const double total = add_lanes_in_halves(lane_sum);
  if (threadIdx.x != 0) return;
  *nonfinite = total != total;
  *sum = total != total ? static_cast<double>(bits_float(kFloatNan)) : total;
}

} // namespace

int launch_norm(const NormArgs& a, double* sum, bool* nonfinite, void* stream) {
  const int64_t chunks = a.in.rows * ceil_div(a.in.cols, kNormChunk);
  if (chunks > 0) {
    if (!codes_are_aligned(a.in)) return kMisaligned;
    const LaunchConfig config = {dim3(static_cast<unsigned>(ceil_div(chunks, kWarps))), dim3(kBlockThreads), 0, stream};
    const int status = with_format(a.in.format, [&](auto f) {
      constexpr auto kernel = norm_kernel<decltype(f)::value>;
      return launch(kernel, config, a);
    });
    if (status != 0) return status;
  }
  const LaunchConfig config = {dim3(1), dim3(32), 0, stream};
  return launch(norm_total_kernel, config, a.partial, chunks, sum, nonfinite);
}

} // namespace agoq::cuda
