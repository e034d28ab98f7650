// Norms of rows, fused with quantization: RMS norm and, with Centered, LayerNorm. x is [rows, cols], weight and bias
// [cols].
//
//   statistics  mean = sum(x) / cols (Centered, else 0), rstd = 1 / sqrt(sum((x - mean)^2) / cols + eps)
//   RMS norm    n = round(x rstd) to x's dtype, y = weight n;  Centered: n = (x - mean) rstd, y = n weight + bias
//   backward    RMS norm, h = round(dy weight): dx = h rstd + (-1/2 sum(h x) rstd^3 / cols) 2 x
//               Centered, h = dy weight: dx = rstd (h - mean(h) - n mean(h n))
//               dweight = sum over rows of dy n (RMS norm: each product rounded to their common dtype), dbias = of dy
//
// A block takes a row at a time, thread t the octets t, t + threads, ... (octet.cuh). They stay in shared memory,
// element by element (banks: neighbouring threads, neighbouring words), from the first pass to the last; rows that do
// not fit are read again. Sums: each thread over its octets, then the warp's lanes by butterfly, then the warps, in
// this fixed order. In backward a block takes the rows of one part and sums their dweight and dbias in shared memory
// too (else in the output), each thread for its own columns.
#pragma once

#include "fused.cuh"
#include "kernels.h"

namespace agoq::cuda {

// Shared memory of a block at most: every architecture offers it, and two blocks fit on the larger ones.
inline constexpr size_t kMostRowBytes = 96 * 1024;

// How a launch looks at rows.
struct RowShape {
  int64_t octets; // of a row, with whole groups
  bool aligned;   // dense tensors may be read by vectors
  bool kept;      // in shared memory
};

// Octet `index` of a row.
__device__ __forceinline__ Octet row_octet(const Packed& p, int64_t row, int64_t index) {
  const int64_t col = index * kOctet, left = p.cols - col;
  const int shift = __ffs(p.group_size) - 1;
  const int valid = left <= 0 ? 0 : left < kOctet ? static_cast<int>(left) : kOctet;
  return {row, row * num_groups(p.cols, p.group_size) + (col >> shift), col, valid, col < padded_cols(p.cols)};
}

// The sum over the block, the same bits in every thread. `warps` holds a float for each warp.
__device__ __forceinline__ float block_sum(float value, float* warps) {
  for (int distance = 16; distance > 0; distance /= 2)
    value = add_rn(value, __shfl_xor_sync(kFullWarp, value, distance));
  __syncthreads(); // the last sum has been read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = warps[0];
  for (unsigned w = 1; w < blockDim.x / 32; ++w) sum = add_rn(sum, warps[w]);
  return sum;
}

// A thread's octets of a row in shared memory.
struct RowStore {
  float* at;
  int64_t octets;
  __device__ __forceinline__ void put(int64_t index, const float (&v)[kOctet]) const {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) at[i * octets + index] = v[i];
  }
  __device__ __forceinline__ void get(int64_t index, float (&v)[kOctet]) const {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = at[i * octets + index];
  }
};

struct RowStatistics {
  float mean, rstd;
};

// Statistics of a row. In the first pass over it load(index, octet, v) gives a thread's elements, then again(...) does.
template <bool Centered, class Load, class Again>
__device__ __forceinline__ RowStatistics row_statistics(const Packed& p, int64_t row, const RowShape& shape, float eps,
                                                        float* warps, const Load& load, const Again& again) {
  const float cols = static_cast<float>(p.cols);
  float mean = 0.0f;
  float v[kOctet];
  if constexpr (Centered) {
    float sum = 0.0f;
    for (int64_t index = threadIdx.x; index < shape.octets; index += blockDim.x) {
      const Octet o = row_octet(p, row, index);
      load(index, o, v);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) sum = add_rn(sum, i < o.valid ? v[i] : 0.0f);
    }
    mean = div_rn(block_sum(sum, warps), cols);
  }
  float squares = 0.0f;
  for (int64_t index = threadIdx.x; index < shape.octets; index += blockDim.x) {
    const Octet o = row_octet(p, row, index);
    if constexpr (Centered)
      again(index, o, v);
    else
      load(index, o, v);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const float d = i < o.valid ? sub_rn(v[i], mean) : 0.0f;
      squares = fma_rn(d, d, squares);
    }
  }
  const float variance = div_rn(block_sum(squares, warps), cols);
  return {mean, div_rn(1.0f, sqrt_rn(add_rn(variance, eps)))};
}

// An element of x, normalized.
template <bool Centered>
__device__ __forceinline__ float normalized(float x, const RowStatistics& s, DType dtype) {
  if constexpr (Centered) return mul_rn(sub_rn(x, s.mean), s.rstd);
  return rounded(mul_rn(x, s.rstd), dtype);
}

// Elements of weight or bias above an octet; `absent` where there is none.
__device__ __forceinline__ void load_vector(const Dense& vector, const Octet& o, const RowShape& shape, float absent,
                                            float (&v)[kOctet]) {
  if (vector.data != nullptr) {
    load_elements(vector, {0, 0, o.col, o.valid, false}, shape.aligned, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < kOctet; ++i) v[i] = absent;
}

template <bool Centered>
__device__ __forceinline__ void store_norm(const float (&v)[kOctet], const float (&weight)[kOctet], const RowNorm& norm,
                                           const RowStatistics& s, DType dtype, const Dense& y, const Octet& o,
                                           const RowShape& shape) {
  float out[kOctet];
#pragma unroll
  for (int i = 0; i < kOctet; ++i) out[i] = mul_rn(weight[i], normalized<Centered>(v[i], s, dtype));
  if constexpr (Centered) {
    if (norm.bias.data != nullptr) {
      float bias[kOctet];
      load_vector(norm.bias, o, shape, 0.0f, bias);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) out[i] = add_rn(out[i], bias[i]);
    }
  }
  store_elements(out, y, o, shape.aligned);
}

// --- forward -------------------------------------------------------------------------------------------------

template <Format F, bool Centered>
__global__ void __launch_bounds__(kBlockThreads) row_norm_quantize_kernel(RowNormQuantizeArgs a, RowShape shape) {
  AGOQ_SHARED(float, warps, [kBlockThreads / 32]);
  AGOQ_DYNAMIC_SHARED(memory);
  const RowStore store = {reinterpret_cast<float*>(memory), shape.octets};
  for (int64_t row = blockIdx.x; row < a.out.rows; row += gridDim.x) {
    const auto load = [&](int64_t index, const Octet& o, float (&v)[kOctet]) {
      load_elements(a.x, o, shape.aligned, v);
      if (shape.kept) store.put(index, v);
    };
    const auto again = [&](int64_t index, const Octet& o, float (&v)[kOctet]) {
      if (shape.kept)
        store.get(index, v);
      else
        load_elements(a.x, o, shape.aligned, v);
    };
    const RowStatistics s = row_statistics<Centered>(a.out, row, shape, a.norm.eps, warps, load, again);
    // Whole warps encode: the lanes of a group exchange its extremes.
    for (int64_t start = 0; start < shape.octets; start += blockDim.x) {
      const int64_t index = start + threadIdx.x;
      const Octet o = row_octet(a.out, row, index);
      float v[kOctet] = {}, weight[kOctet];
      if (index < shape.octets) again(index, o, v);
      load_vector(a.norm.weight, o, shape, 1.0f, weight);
      store_norm<Centered>(v, weight, a.norm, s, a.x.dtype, a.y, o, shape);
      encode_nearest_octet<F>(v, a.out, o);
    }
  }
}

// --- backward ------------------------------------------------------------------------------------------------

// A thread's columns of one part's dweight or dbias: in shared memory, element by element, or in the output itself.
struct ColumnSums {
  float* at; // null where not wanted
  int64_t element_stride, octet_stride;

  __device__ __forceinline__ float& operator()(int64_t index, int i) const {
    return at[index * octet_stride + i * element_stride];
  }
  __device__ __forceinline__ void add(int64_t index, const Octet& o, bool first, const float (&v)[kOctet]) const {
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

template <int Bits, bool Centered>
__global__ void __launch_bounds__(kBlockThreads) row_norm_backward_kernel(RowNormBackwardArgs a, RowShape shape) {
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

  const int64_t height = rows_per_part(a.in.rows, a.parts), begin = blockIdx.x * height;
  const int64_t end = begin + height < a.in.rows ? begin + height : a.in.rows;
  for (int64_t row = begin; row < end; ++row) {
    const auto load = [&](int64_t index, const Octet& o, float (&v)[kOctet]) {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) v[i] = 0.0f;
      if (o.valid > 0) decode_octet(a.in, o, kFloatMax, decoder, v);
      if (shape.kept) store.put(index, v);
    };
    const auto again = [&](int64_t index, const Octet& o, float (&v)[kOctet]) {
      if (shape.kept)
        store.get(index, v);
      else if (o.valid > 0)
        decode_octet(a.in, o, kFloatMax, decoder, v);
    };
    const RowStatistics s = row_statistics<Centered>(a.in, row, shape, a.norm.eps, warps, load, again);
    // The gradient of n, as the roundings of the forward leave it.
    const auto gradient = [&](float dy, float weight) {
      const float h = mul_rn(dy, weight);
      return Centered ? h : rounded(h, a.dtype);
    };

    float sum = 0.0f, slope = 0.0f; // of h, and of h x (Centered: h n)
    if (a.dx.data != nullptr) {
      for (int64_t index = threadIdx.x; index < shape.octets; index += blockDim.x) {
        const Octet o = row_octet(a.in, row, index);
        float v[kOctet] = {}, dy[kOctet], weight[kOctet];
        again(index, o, v);
        load_elements(a.dy, o, shape.aligned, dy);
        load_vector(a.norm.weight, o, shape, 1.0f, weight);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
          if (i >= o.valid) continue;
          const float h = gradient(dy[i], weight[i]);
          slope = fma_rn(h, Centered ? normalized<Centered>(v[i], s, a.dtype) : v[i], slope);
          if constexpr (Centered) sum = add_rn(sum, h);
        }
      }
      slope = block_sum(slope, warps);
      if constexpr (Centered) {
        sum = div_rn(block_sum(sum, warps), cols);
        slope = div_rn(slope, cols);
      } else {
        const float cubed = mul_rn(mul_rn(s.rstd, s.rstd), s.rstd);
        slope = div_rn(mul_rn(mul_rn(-0.5f, slope), cubed), cols);
      }
    }

    for (int64_t index = threadIdx.x; index < shape.octets; index += blockDim.x) {
      const Octet o = row_octet(a.in, row, index);
      if (o.valid == 0) continue;
      float v[kOctet], weight[kOctet];
      again(index, o, v);
      load_vector(a.norm.weight, o, shape, 1.0f, weight);
      if (a.y.data != nullptr) store_norm<Centered>(v, weight, a.norm, s, a.dtype, a.y, o, shape);
      if (a.dy.data == nullptr) continue;
      float dy[kOctet], out[kOctet];
      load_elements(a.dy, o, shape.aligned, dy);
      if (dbias.at != nullptr) dbias.add(index, o, row == begin, dy);
      if (dweight.at != nullptr) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
          const float product = mul_rn(dy[i], normalized<Centered>(v[i], s, a.dtype));
          out[i] = Centered ? product : rounded(product, product_dtype);
        }
        dweight.add(index, o, row == begin, out);
      }
      if (a.dx.data == nullptr) continue;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const float h = gradient(dy[i], weight[i]);
        if constexpr (Centered) {
          const float n = normalized<Centered>(v[i], s, a.dtype);
          out[i] = mul_rn(s.rstd, sub_rn(sub_rn(h, sum), mul_rn(n, slope)));
        } else {
          out[i] = add_rn(mul_rn(h, s.rstd), mul_rn(slope, mul_rn(2.0f, v[i])));
        }
      }
      store_elements(out, a.dx, o, shape.aligned);
    }
  }

  if (!shape.kept) return;
  for (int64_t index = threadIdx.x; index < shape.octets; index += blockDim.x) {
    const Octet o = row_octet(a.in, 0, index);
    const int64_t at = blockIdx.x * a.in.cols + o.col;
    for (int i = 0; i < o.valid; ++i) {
      if (dweight.at != nullptr) a.dweight[at + i] = dweight(index, i);
      if (dbias.at != nullptr) a.dbias[at + i] = dbias(index, i);
    }
  }
}

// --- launches ------------------------------------------------------------------------------------------------

inline bool starts_aligned(const Dense& vector) { return reinterpret_cast<uintptr_t>(vector.data) % 16 == 0; }

// `floats` are kept in shared memory for each element of a row.
inline RowShape row_shape(const Packed& p, int floats, bool aligned) {
  const int64_t octets = num_groups(p.cols, p.group_size) * (p.group_size / kOctet);
  const bool kept = octets * kOctet * floats <= static_cast<int64_t>(kMostRowBytes / sizeof(float));
  return {octets, aligned, kept};
}

inline LaunchConfig row_config(const RowShape& shape, int floats, int64_t blocks, void* stream) {
  constexpr int64_t kMostBlocks = 0x7FFFFFFF;
  unsigned threads = 32;
  while (threads < kBlockThreads && threads < shape.octets) threads *= 2;
  const size_t bytes = shape.kept ? static_cast<size_t>(shape.octets) * kOctet * floats * sizeof(float) : 0;
  return {dim3(static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks)), dim3(threads), bytes, stream};
}

template <bool Centered>
int launch_row_norm_quantize(const RowNormQuantizeArgs& a, void* stream) {
  if (a.out.rows == 0 || a.out.cols == 0) return 0;
  const bool aligned =
      rows_are_aligned(a.x) && rows_are_aligned(a.y) && starts_aligned(a.norm.weight) && starts_aligned(a.norm.bias);
  const RowShape shape = row_shape(a.out, 1, aligned);
  const LaunchConfig config = row_config(shape, 1, a.out.rows, stream);
  return with_format(a.out.format, [&](auto f) {
    constexpr auto kernel = row_norm_quantize_kernel<decltype(f)::value, Centered>;
    return AGOQ_LAUNCH(kernel, config, a, shape);
  });
}

template <bool Centered>
int launch_row_norm_backward(const RowNormBackwardArgs& a, void* stream) {
  if (a.in.rows == 0 || a.in.cols == 0) return 0;
  const bool aligned = rows_are_aligned(a.dy) && rows_are_aligned(a.dx) && rows_are_aligned(a.y) &&
                       starts_aligned(a.norm.weight) && starts_aligned(a.norm.bias);
  const int floats = 1 + (a.dweight != nullptr) + (a.dbias != nullptr);
  const RowShape shape = row_shape(a.in, floats, aligned);
  const LaunchConfig config = row_config(shape, floats, a.parts, stream);
  return with_bits(a.in.format, [&](auto bits) {
    constexpr auto kernel = row_norm_backward_kernel<decltype(bits)::value, Centered>;
    return AGOQ_LAUNCH(kernel, config, a, shape);
  });
}

} // namespace agoq::cuda
