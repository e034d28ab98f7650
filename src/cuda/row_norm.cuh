// What the kernels of norms share: RMS norm and LayerNorm (centered) over the rows of [rows, cols].
//
//   statistics  mean = sum(x) / cols (centered, else 0), rstd = 1 / sqrt(sum((x - mean)^2) / cols + eps)
//   output      RMS norm: n = round(x rstd) to x's dtype, y = weight n
//               centered: n = (x - mean) rstd, y = n weight + bias
//
// A block takes a row at a time, thread t the octets t, t + threads, ... (octet.cuh). They stay in shared memory,
// element by element (banks: neighbouring threads, neighbouring words), from the first pass to the last; rows that do
// not fit are read again. Sums: each thread over its octets, then the warp's lanes by butterfly, then the warps.
// Whether a norm is centered is a run-time value, the same for all threads: half as many kernels.
#pragma once

#include "fused.cuh"

namespace agoq::cuda {

// Shared memory of a block at most: every architecture offers it, and two blocks fit on the larger ones.
inline constexpr size_t kMostRowBytes = 96 * 1024;

// How a launch looks at rows.
struct RowShape {
  int octets;   // of a row, with whole groups
  bool aligned; // dense tensors may be read by vectors
  bool kept;    // in shared memory
};

// Octet `index` of a row.
__device__ __forceinline__ Octet row_octet(const Packed& p, int64_t row, int index) {
  const int64_t col = static_cast<int64_t>(index) * kOctet, left = p.cols - col;
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
  int octets;
  __device__ __forceinline__ void put(int index, const float (&v)[kOctet]) const {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) at[i * octets + index] = v[i];
  }
  __device__ __forceinline__ void get(int index, float (&v)[kOctet]) const {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = at[i * octets + index];
  }
};

struct RowStatistics {
  float mean, rstd;
};

// Statistics of a row. In the first pass over it load(index, octet, v) gives a thread's elements, then again(...) does.
template <class Load, class Again>
__device__ __forceinline__ RowStatistics row_statistics(bool centered, const Packed& p, int64_t row,
                                                        const RowShape& shape, float eps, float* warps,
                                                        const Load& load, const Again& again) {
  const float cols = static_cast<float>(p.cols);
  float mean = 0.0f;
  float v[kOctet];
  if (centered) {
    float sum = 0.0f;
    for (int index = threadIdx.x; index < shape.octets; index += blockDim.x) {
      const Octet o = row_octet(p, row, index);
      load(index, o, v);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) sum = add_rn(sum, i < o.valid ? v[i] : 0.0f);
    }
    mean = div_rn(block_sum(sum, warps), cols);
  }
  float squares = 0.0f;
  for (int index = threadIdx.x; index < shape.octets; index += blockDim.x) {
    const Octet o = row_octet(p, row, index);
    if (centered)
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
__device__ __forceinline__ float normalized(bool centered, float x, const RowStatistics& s, DType dtype) {
  const float n = mul_rn(sub_rn(x, s.mean), s.rstd); // of an RMS norm the mean is 0, and the subtraction exact
  return centered ? n : rounded(n, dtype);
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

__device__ __forceinline__ void store_norm(const float (&v)[kOctet], const float (&weight)[kOctet], const RowNorm& norm,
                                           const RowStatistics& s, DType dtype, const Dense& y, const Octet& o,
                                           const RowShape& shape) {
  float out[kOctet];
#pragma unroll
  for (int i = 0; i < kOctet; ++i) out[i] = mul_rn(weight[i], normalized(norm.centered, v[i], s, dtype));
  if (norm.bias.data != nullptr) {
    float bias[kOctet];
    load_vector(norm.bias, o, shape, 0.0f, bias);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) out[i] = add_rn(out[i], bias[i]);
  }
  store_elements(out, y, o, shape.aligned);
}

// --- launches ------------------------------------------------------------------------------------------------

inline bool starts_aligned(const Dense& vector) { return reinterpret_cast<uintptr_t>(vector.data) % 16 == 0; }

// Whether an int counts the octets of a row.
inline bool row_is_countable(const Packed& p) { return p.cols <= INT32_MAX; }

// `floats` are kept in shared memory for each element of a row.
inline RowShape row_shape(const Packed& p, int floats, bool aligned) {
  const int64_t octets = num_groups(p.cols, p.group_size) * (p.group_size / kOctet);
  const bool kept = octets * kOctet * floats <= static_cast<int64_t>(kMostRowBytes / sizeof(float));
  return {static_cast<int>(octets), aligned, kept};
}

inline LaunchConfig row_config(const RowShape& shape, int floats, int64_t blocks, void* stream) {
  constexpr int64_t kMostBlocks = 0x7FFFFFFF;
  unsigned threads = 32;
  while (threads < kBlockThreads && static_cast<int>(threads) < shape.octets) threads *= 2;
  const size_t bytes = shape.kept ? static_cast<size_t>(shape.octets) * kOctet * floats * sizeof(float) : 0;
  return {dim3(static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks)), dim3(threads), bytes, stream};
}

} // namespace agoq::cuda
