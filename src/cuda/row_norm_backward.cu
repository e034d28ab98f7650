// row_norm_backward: from codes and scales of x [rows, cols] the norm's output, and for dy its gradients.
//
//   RMS norm  h = round(dy weight): dx = h rstd + (-1/2 sum(h x) rstd^3 / cols) 2 x
//             dweight = sum over rows of dy n, each product rounded to the dtype of both
//   centered  h = dy weight: dx = rstd (h - mean(h) - n mean(h n)), dweight = sum of dy n, dbias = sum of dy
//
// A block takes the rows of one part in order (row_norm.cuh) and sums their dweight and dbias in shared memory, each
// thread for its own columns, or in the output where rows are too long; part_sum adds the parts.
#include "kernels.h"
#include "row_norm.cuh"

namespace agoq::cuda {
namespace {

// A thread's columns of one part's dweight or dbias: in shared memory, element by element, or in the output itself.
struct ColumnSums {
  float* at; // null where not wanted
  int element_stride, octet_stride;

  __device__ __forceinline__ float& operator()(int index, int i) const {
    return at[static_cast<int64_t>(index) * octet_stride + static_cast<int64_t>(i) * element_stride];
  }
  __device__ __forceinline__ void add(int index, const Octet& o, bool first, const float (&v)[kOctet]) const {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (i >= o.valid) continue;
      float& sum = (*this)(index, i);
      sum = first ? v[i] : add_rn(sum, v[i]);
    }
  }
};

__device__ __forceinline__ ColumnSums column_sums(float* output, const RowShape& shape, int64_t cols, float*& memory) {
  if (output == nullptr) return {nullptr, 0, 0};
  if (!shape.kept) return {output + blockIdx.x * cols, 1, kOctet};
  float* at = memory;
  memory += shape.octets * kOctet;
  return {at, shape.octets, 1};
}

// Two blocks a multiprocessor suffice, so that registers need not spill.
template <int Bits>
__global__ void __launch_bounds__(kBlockThreads, 2) row_norm_backward_kernel(RowNormBackwardArgs a, RowShape shape) {
  AGOQ_SHARED(float, warps, [kBlockThreads / 32]);
  AGOQ_SHARED(float, table, [16]);
  AGOQ_DYNAMIC_SHARED(bytes);
  const BitsDecoder<Bits> decoder(a.in.format, table);
  if constexpr (Bits == 4) __syncthreads();
  float* memory = reinterpret_cast<float*>(bytes);
  const RowStore store = {memory, shape.octets};
  if (shape.kept) memory += shape.octets * kOctet;
  const ColumnSums dweight = column_sums(a.dweight, shape, a.in.cols, memory);
  const ColumnSums dbias = column_sums(a.dbias, shape, a.in.cols, memory);
  const DType product_dtype = a.dy.dtype == a.dtype ? a.dtype : DType::float32;
  const float cols = static_cast<float>(a.in.cols);
  const bool centered = a.norm.centered;

  const int64_t height = rows_per_part(a.in.rows, a.parts), begin = blockIdx.x * height;
  const int64_t end = begin + height < a.in.rows ? begin + height : a.in.rows;
  for (int64_t row = begin; row < end; ++row) {
    const auto load = [&](int index, const Octet& o, float (&v)[kOctet]) {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) v[i] = 0.0f;
      if (o.valid > 0) decode_octet(a.in, o, kFloatMax, decoder, v);
      if (shape.kept) store.put(index, v);
    };
    const auto again = [&](int index, const Octet& o, float (&v)[kOctet]) {
      if (shape.kept)
        store.get(index, v);
      else if (o.valid > 0)
        decode_octet(a.in, o, kFloatMax, decoder, v);
    };
    const RowStatistics s = row_statistics(centered, a.in, row, shape, a.norm.eps, warps, load, again);
    // The gradient of n, as the roundings of the forward leave it.
    const auto gradient = [&](float dy, float weight) {
      const float h = mul_rn(dy, weight);
      return centered ? h : rounded(h, a.dtype);
    };

    float sum = 0.0f, slope = 0.0f; // of h, and of h x (centered: h n)
    if (a.dx.data != nullptr) {
      for (int index = threadIdx.x; index < shape.octets; index += blockDim.x) {
        const Octet o = row_octet(a.in, row, index);
        float v[kOctet] = {}, dy[kOctet], weight[kOctet];
        again(index, o, v);
        load_elements(a.dy, o, shape.aligned, dy);
        load_vector(a.norm.weight, o, shape, 1.0f, weight);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
          if (i >= o.valid) continue;
          const float h = gradient(dy[i], weight[i]);
          slope = fma_rn(h, centered ? normalized(centered, v[i], s, a.dtype) : v[i], slope);
          if (centered) sum = add_rn(sum, h);
        }
      }
      slope = block_sum(slope, warps);
      if (centered) {
        sum = div_rn(block_sum(sum, warps), cols);
        slope = div_rn(slope, cols);
      } else {
        const float cubed = mul_rn(mul_rn(s.rstd, s.rstd), s.rstd);
        slope = div_rn(mul_rn(mul_rn(-0.5f, slope), cubed), cols);
      }
    }

    for (int index = threadIdx.x; index < shape.octets; index += blockDim.x) {
      const Octet o = row_octet(a.in, row, index);
      if (o.valid == 0) continue;
      float v[kOctet], weight[kOctet];
      again(index, o, v);
      load_vector(a.norm.weight, o, shape, 1.0f, weight);
      if (a.y.data != nullptr) store_norm(v, weight, a.norm, s, a.dtype, a.y, o, shape);
      if (a.dy.data == nullptr) continue;
      float dy[kOctet], out[kOctet];
      load_elements(a.dy, o, shape.aligned, dy);
      if (dbias.at != nullptr) dbias.add(index, o, row == begin, dy);
      if (dweight.at != nullptr) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
          const float product = mul_rn(dy[i], normalized(centered, v[i], s, a.dtype));
          out[i] = centered ? product : rounded(product, product_dtype);
        }
        dweight.add(index, o, row == begin, out);
      }
      if (a.dx.data == nullptr) continue;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const float h = gradient(dy[i], weight[i]);
        if (centered) {
          const float n = normalized(centered, v[i], s, a.dtype);
          out[i] = mul_rn(s.rstd, sub_rn(sub_rn(h, sum), mul_rn(n, slope)));
        } else {
          out[i] = add_rn(mul_rn(h, s.rstd), mul_rn(slope, mul_rn(2.0f, v[i])));
        }
      }
      store_elements(out, a.dx, o, shape.aligned);
    }
  }

  if (!shape.kept) return;
  for (int index = threadIdx.x; index < shape.octets; index += blockDim.x) {
    const Octet o = row_octet(a.in, 0, index);
    const int64_t at = blockIdx.x * a.in.cols + o.col;
    for (int i = 0; i < o.valid; ++i) {
      if (dweight.at != nullptr) a.dweight[at + i] = dweight(index, i);
      if (dbias.at != nullptr) a.dbias[at + i] = dbias(index, i);
    }
  }
}

} // namespace

int launch_row_norm_backward(const RowNormBackwardArgs& a, void* stream) {
  if (a.in.rows == 0 || a.in.cols == 0) return 0;
  if (!codes_are_aligned(a.in)) return kMisaligned;
  if (!row_is_countable(a.in)) return cudaErrorInvalidValue;
  const bool aligned = rows_are_aligned(a.dy) && rows_are_aligned(a.dx) && rows_are_aligned(a.y) &&
                       starts_aligned(a.norm.weight) && starts_aligned(a.norm.bias);
  const int floats = 1 + (a.dweight != nullptr) + (a.dbias != nullptr);
  const RowShape shape = row_shape(a.in, floats, aligned);
  const LaunchConfig config = row_config(shape, floats, a.parts, stream);
  return with_bits(a.in.format, [&](auto bits) {
    constexpr auto kernel = row_norm_backward_kernel<decltype(bits)::value>;
    return launch(kernel, config, a, shape);
  });
}

} // namespace agoq::cuda
