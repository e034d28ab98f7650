// row_norm_quantize: a norm's output and its packed input. x [rows, cols] -> y [rows, cols], codes and scales of x.
//
// row_norm.cuh has the formulas and tells which thread does what. x is read once, y, codes and scales are written once.
#include "kernels.h"
#include "row_norm.cuh"

namespace agoq::cuda {
namespace {

template <Format F>
__global__ void __launch_bounds__(kBlockThreads) row_norm_quantize_kernel(RowNormQuantizeArgs a, RowShape shape) {
  AGOQ_SHARED(float, warps, [kBlockThreads / 32]);
  AGOQ_DYNAMIC_SHARED(memory);
  const RowStore store = {reinterpret_cast<float*>(memory), shape.octets};
  for (int64_t row = blockIdx.x; row < a.out.rows; row += gridDim.x) {
    const auto load = [&](int index, const Octet& o, float (&v)[kOctet]) {
      load_elements(a.x, o, shape.aligned, v);
      if (shape.kept) store.put(index, v);
    };
    const auto again = [&](int index, const Octet& o, float (&v)[kOctet]) {
      if (shape.kept)
        store.get(index, v);
      else
        load_elements(a.x, o, shape.aligned, v);
    };
    const RowStatistics s = row_statistics(a.norm.centered, a.out, row, shape, a.norm.eps, warps, load, again);
    // Whole warps encode: the lanes of a group exchange its extremes.
    for (int start = 0; start < shape.octets; start += blockDim.x) {
      const int index = start + threadIdx.x;
      const Octet o = row_octet(a.out, row, index);
      float v[kOctet] = {}, weight[kOctet];
      if (index < shape.octets) again(index, o, v);
      load_vector(a.norm.weight, o, shape, 1.0f, weight);
      store_norm(v, weight, a.norm, s, a.x.dtype, a.y, o, shape);
      encode_nearest_octet<F>(v, a.out, o);
    }
  }
}

} // namespace

int launch_row_norm_quantize(const RowNormQuantizeArgs& a, void* stream) {
  if (a.out.rows == 0 || a.out.cols == 0) return 0;
  if (!codes_are_aligned(a.out)) return kMisaligned;
  if (!row_is_countable(a.out)) return cudaErrorInvalidValue;
  const bool aligned =
      rows_are_aligned(a.x) && rows_are_aligned(a.y) && starts_aligned(a.norm.weight) && starts_aligned(a.norm.bias);
  const RowShape shape = row_shape(a.out, 1, aligned);
  const LaunchConfig config = row_config(shape, 1, a.out.rows, stream);
  return with_format(a.out.format, [&](auto f) {
    constexpr auto kernel = row_norm_quantize_kernel<decltype(f)::value>;
    return launch(kernel, config, a, shape);
  });
}

} // namespace agoq::cuda
