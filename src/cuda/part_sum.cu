// part_sum: out[c] = the sum over parts of partial [parts, cols], FP32, in a fixed order.
//
// A block takes 32 columns. Its eight slices of threads each sum an eighth of the parts in order; then the eight sums
// are added in order.
#include "kernels.h"
#include "octet.cuh"

namespace agoq::cuda {
namespace {

inline constexpr int kColumns = 32;
inline constexpr int kSlices = kBlockThreads / kColumns;

__global__ void __launch_bounds__(kBlockThreads) part_sum_kernel(PartSumArgs a) {
  AGOQ_SHARED(float, sums, [kSlices][kColumns]);
  const int column = threadIdx.x % kColumns, slice = threadIdx.x / kColumns;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kColumns + column;
  const int64_t height = ceil_div(a.parts, kSlices), begin = slice * height;
  const int64_t end = begin + height < a.parts ? begin + height : a.parts;
  float sum = 0.0f;
  if (col < a.cols)
    for (int64_t part = begin; part < end; ++part) sum = add_rn(sum, a.partial[part * a.cols + col]);
  sums[slice][column] = sum;
  __syncthreads();
  if (slice != 0 || col >= a.cols) return;
  for (int s = 1; s < kSlices; ++s) sum = add_rn(sum, sums[s][column]);
  a.out[col] = sum;
}

} // namespace

int launch_part_sum(const PartSumArgs& args, void* stream) {
  if (args.cols == 0) return 0;
  const LaunchConfig config = {dim3(static_cast<unsigned>(ceil_div(args.cols, kColumns))), dim3(kBlockThreads), 0,
                               stream};
  return launch(part_sum_kernel, config, args);
}

} // namespace agoq::cuda
