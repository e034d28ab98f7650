// Octets: eight consecutive elements of a row, what one thread holds; the lanes of a group lie next to each other.
//
// A group of 32, 64, 128 or 256 elements is 4, 8, 16 or 32 lanes, so a warp holds whole groups and reduces over one by
// butterfly shuffles among its lanes. Threads beyond the last group stay for the shuffles and store nothing.
// Vec kernels require 16-byte aligned rows of the dense tensor; octets at the end of a row go element by element.
#pragma once

#include "../cpp/core/args.h"
#include "../cpp/core/codec.h"
#include "../cpp/core/layout.h"
#include "ptx.cuh"

namespace agoq::cuda {

inline constexpr int kOctet = 8;
inline constexpr int kBlockThreads = 256;

struct Octet {
  int64_t row;
  int64_t position; // of its group's scale, in row-major [rows, groups]
  int64_t col;      // of its first element
  int valid;        // elements inside the row, 0 to 8
  bool stored;      // inside the padded row: its codes are written
};

// The octet of this thread; `lanes` is group_size / 8.
__device__ __forceinline__ Octet locate_octet(const Packed& p) {
  const int lanes = p.group_size / kOctet;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  const int64_t position = thread / lanes;
  const int64_t groups = num_groups(p.cols, p.group_size);
  const int64_t row = p.rows == 1 ? 0 : position / groups;
  const int64_t col = (position - row * groups) * p.group_size + (thread % lanes) * kOctet;
  const bool inside = position < p.rows * groups;
  const int64_t left = p.cols - col;
  const int valid = !inside || left <= 0 ? 0 : left < kOctet ? static_cast<int>(left) : kOctet;
  return {row, position, col, valid, inside && col < padded_cols(p.cols)};
}

inline LaunchConfig octet_config(const Packed& p, void* stream) {
  const int64_t threads = p.rows * num_groups(p.cols, p.group_size) * (p.group_size / kOctet);
  return {dim3(static_cast<unsigned>(ceil_div(threads, kBlockThreads))), dim3(kBlockThreads), 0, stream};
}

// Sees a tensor whose rows follow each other without gaps as one row: no thread then divides by the row length.
// Bit planes (5 and 6 bits) lie row by row, so those formats keep their rows.
inline void merge_rows(Packed& p, Dense& dense) {
  const int bits = kFormats[static_cast<int>(p.format)].bits;
  if (p.rows > 1 && dense.row_stride == p.cols && p.cols % p.group_size == 0 && (bits == 4 || bits == 8)) {
    p.cols *= p.rows;
    p.rows = 1;
    dense.row_stride = p.cols;
  }
}

inline bool rows_are_aligned(const Dense& dense) {
  return reinterpret_cast<uintptr_t>(dense.data) % 16 == 0 && dense.row_stride * dtype_bytes(dense.dtype) % 16 == 0;
}

// Codes are read and written by whole words of an octet; launchers refuse others with this status.
inline constexpr int kMisaligned = cudaErrorMisalignedAddress;
inline bool codes_are_aligned(const Packed& p, int64_t stride = 0) {
  const uintptr_t width = kFormats[static_cast<int>(p.format)].bits == 8 ? 8 : 4;
  return reinterpret_cast<uintptr_t>(p.codes) % width == 0 && static_cast<uintptr_t>(stride) % width == 0;
}
inline bool codes_are_aligned(const Shards& s) { return codes_are_aligned(s.first, s.count > 1 ? s.codes_stride : 0); }

// --- dense elements ------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// The dtype of a dense tensor is a run-time value, the same for every thread: a branch costs less than three kernels.
__device__ __forceinline__ float widen(uint16_t bits, DType dtype) {
  return dtype == DType::float16 ? half_to_float(bits) : bfloat_to_float(bits);
}

// Elements of an octet as FP32; those beyond the row are zero.
template <bool Vec>
__device__ __forceinline__ void load_octet(const Dense& x, const Octet& o, float (&v)[kOctet]) {
  const int64_t offset = o.row * x.row_stride + o.col;
  if (Vec && o.valid == kOctet) {
    if (x.dtype == DType::float32) {
      const float* p = static_cast<const float*>(x.data) + offset;
      const uint4 low = ptx::load16(p), high = ptx::load16(p + 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = bits_float(word_of(low, i));
        v[4 + i] = bits_float(word_of(high, i));
      }
    } else {
      const uint4 words = ptx::load16(static_cast<const uint16_t*>(x.data) + offset);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[2 * i] = widen(static_cast<uint16_t>(word_of(words, i)), x.dtype);
        v[2 * i + 1] = widen(static_cast<uint16_t>(word_of(words, i) >> 16), x.dtype);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    v[i] = 0.0f;
    if (i >= o.valid) continue;
    if (x.dtype == DType::float32)
      v[i] = static_cast<const float*>(x.data)[offset + i];
    else
      v[i] = widen(static_cast<const uint16_t*>(x.data)[offset + i], x.dtype);
  }
}

// Bits of `v` in `dtype`; NaN in its one pattern.
__device__ __forceinline__ uint32_t narrow(float v, DType dtype) {
  if (dtype == DType::float32) return v != v ? kFloatNan : float_bits(v);
  if (dtype == DType::float16) return float_to_half(v);
  return v != v ? kBfloatNan : float_to_bfloat(v);
}

template <bool Vec>
__device__ __forceinline__ void store_octet(const float (&v)[kOctet], const Dense& out, const Octet& o) {
  const int64_t offset = o.row * out.row_stride + o.col;
  uint32_t w[kOctet];
#pragma unroll
  for (int i = 0; i < kOctet; ++i) w[i] = narrow(v[i], out.dtype);
  if (Vec && o.valid == kOctet) {
    if (out.dtype == DType::float32) {
      float* p = static_cast<float*>(out.data) + offset;
      ptx::store16(p, make_uint4(w[0], w[1], w[2], w[3]));
      ptx::store16(p + 4, make_uint4(w[4], w[5], w[6], w[7]));
    } else {
      ptx::store16(static_cast<uint16_t*>(out.data) + offset,
                   make_uint4(w[0] | w[1] << 16, w[2] | w[3] << 16, w[4] | w[5] << 16, w[6] | w[7] << 16));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    if (i >= o.valid) continue;
    if (out.dtype == DType::float32)
      static_cast<uint32_t*>(out.data)[offset + i] = w[i];
    else
      static_cast<uint16_t*>(out.data)[offset + i] = static_cast<uint16_t>(w[i]);
  }
}

// --- codes ---------------------------------------------------------------------------------------------------

// Stores the eight patterns of an octet into its row's planes: rows of codes start at multiples of 4 bytes.
template <int Bits>
__device__ __forceinline__ void store_codes(const uint32_t (&codes)[kOctet], const Packed& p, const Octet& o) {
  uint8_t* row = p.codes + o.row * row_bytes(p.cols, Bits);
  const BlockOffsets at = block_offsets<Bits>(o.col / kBlock, padded_cols(p.cols));
  const int part = static_cast<int>(o.col % kBlock) / kOctet; // which quarter of the block of 32
  if constexpr (Bits == 8) {
    const uint32_t low = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24;
    const uint32_t high = codes[4] | codes[5] << 8 | codes[6] << 16 | codes[7] << 24;
    ptx::store8(row + at.low + part * 8, make_uint2(low, high));
  } else {
    uint32_t nibbles = 0, bit4 = 0, bit5 = 0;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      nibbles |= (codes[i] & 15u) << (4 * i);
      bit4 |= ((codes[i] >> 4) & 1u) << i;
      bit5 |= ((codes[i] >> 5) & 1u) << i;
    }
    ptx::store4(row + at.low + part * 4, nibbles);
    if constexpr (Bits >= 5) row[at.bit4 + part] = static_cast<uint8_t>(bit4);
    if constexpr (Bits >= 6) row[at.bit5 + part] = static_cast<uint8_t>(bit5);
  }
}

template <int Bits>
__device__ __forceinline__ void load_codes(const Packed& p, const Octet& o, uint32_t (&codes)[kOctet]) {
  const uint8_t* row = p.codes + o.row * row_bytes(p.cols, Bits);
  const BlockOffsets at = block_offsets<Bits>(o.col / kBlock, padded_cols(p.cols));
  const int part = static_cast<int>(o.col % kBlock) / kOctet;
  if constexpr (Bits == 8) {
    const uint2 words = ptx::load8(row + at.low + part * 8);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) codes[i] = ((i < 4 ? words.x : words.y) >> (8 * (i % 4))) & 0xFFu;
  } else {
    const uint32_t nibbles = ptx::load4(row + at.low + part * 4);
    const uint32_t bit4 = Bits >= 5 ? row[at.bit4 + part] : 0u;
    const uint32_t bit5 = Bits >= 6 ? row[at.bit5 + part] : 0u;
#pragma unroll
    for (int i = 0; i < kOctet; ++i)
      codes[i] = ((nibbles >> (4 * i)) & 15u) | ((bit4 >> i) & 1u) << 4 | ((bit5 >> i) & 1u) << 5;
  }
}

// --- scales --------------------------------------------------------------------------------------------------

__device__ __forceinline__ float load_scale(const Packed& p, int64_t i) {
  return p.scale_dtype == DType::float32 ? static_cast<const float*>(p.scales)[i]
                                         : bfloat_to_float(static_cast<const uint16_t*>(p.scales)[i]);
}

__device__ __forceinline__ void store_scale(const Packed& p, int64_t i, float value) {
  if (p.scale_dtype == DType::float32)
    static_cast<float*>(p.scales)[i] = value;
  else
    static_cast<uint16_t*>(p.scales)[i] = static_cast<uint16_t>(float_bits(value) >> 16);
}

} // namespace agoq::cuda
