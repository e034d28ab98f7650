// Encoding on the device: a group's extremes over its lanes, its scale, and the codes of each lane's octet.
#pragma once

#include "../cpp/core/philox.h"
#include "../cpp/core/scale.h"
#include "octet.cuh"

namespace agoq::cuda {

inline constexpr unsigned kFullWarp = 0xFFFFFFFFu;

// The largest of `value` over the `lanes` neighbouring lanes of a group (a power of two).
__device__ __forceinline__ int32_t group_max(int32_t value, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    const int32_t other = __shfl_xor_sync(kFullWarp, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

// Order-preserving map between FP32 bits and signed integers.
__device__ __forceinline__ int32_t ordered(float v) {
  const int32_t bits = static_cast<int32_t>(float_bits(v));
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}
__device__ __forceinline__ float from_ordered(int32_t key) {
  return bits_float(static_cast<uint32_t>(key ^ ((key >> 31) & 0x7FFFFFFF)));
}

// The scale of this lane's group. Every lane of the warp must call it.
template <Format F>
__device__ __forceinline__ GroupScale group_scale(const float (&v)[kOctet], int valid, int lanes, DType scale_dtype) {
  int32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) { // elements beyond the row are zero
    const int32_t magnitude = static_cast<int32_t>(float_bits(v[i]) & 0x7FFFFFFFu);
    amax = magnitude > amax ? magnitude : amax;
  }
  amax = group_max(amax, lanes);
  if constexpr (FormatTraits<F>::has_min) {
    int32_t high = INT32_MIN, low = INT32_MIN; // `low` holds the complement of the smallest key
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (i >= valid) continue;
      const int32_t key = ordered(v[i]);
      high = key > high ? key : high;
      low = ~key > low ? ~key : low;
    }
    high = group_max(high, lanes);
    low = group_max(low, lanes);
    const bool finite = static_cast<uint32_t>(amax) < kFloatInf;
    return asymmetric_scale(from_ordered(~low), from_ordered(high), finite, scale_dtype);
  }
  return {symmetric_scale(bits_float(static_cast<uint32_t>(amax)), FormatTraits<F>::qmax, scale_dtype), 0.0f};
}

// Uniforms of the eight elements from index `first` on.
__device__ __forceinline__ void octet_uniforms(uint64_t seed, uint64_t first, float (&u)[kOctet]) {
  if (first % 4 == 0) {
    const PhiloxWords low = philox(seed, first / 4), high = philox(seed, first / 4 + 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u[i] = uniform(low.word[i]);
      u[4 + i] = uniform(high.word[i]);
    }
  } else { // rows of odd lengths: each element finds its own counter
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const PhiloxWords words = philox(seed, (first + i) / 4);
      const uint32_t k = static_cast<uint32_t>((first + i) % 4);
      u[i] = uniform(k < 2 ? (k == 0 ? words.word[0] : words.word[1]) : (k == 2 ? words.word[2] : words.word[3]));
    }
  }
}

// Encodes this lane's octet: the group's first lane stores the scale, every lane its codes.
// Every lane of the warp must call it.
template <Format F, bool Stochastic>
__device__ __forceinline__ void encode_octet(const float (&v)[kOctet], const Packed& out, const Octet& o,
                                             const Rounding& rounding) {
  const int lanes = out.group_size / kOctet;
  const GroupScale s = group_scale<F>(v, o.valid, lanes, out.scale_dtype);
  if (!o.stored) return;
  if (threadIdx.x % lanes == 0) {
    if constexpr (FormatTraits<F>::has_min) {
      store_scale(out, 2 * o.position, s.scale);
      store_scale(out, 2 * o.position + 1, s.min);
    } else {
      store_scale(out, o.position, s.scale);
    }
  }
  float u[kOctet];
  if constexpr (Stochastic) {
    const uint64_t first = static_cast<uint64_t>(rounding.element_offset + o.row * out.cols + o.col);
    octet_uniforms(static_cast<uint64_t>(*rounding.seed), first, u);
  }
  const bool usable = scale_is_usable(s.scale);
  uint32_t codes[kOctet];
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    const float t = div_rn(FormatTraits<F>::has_min ? sub_rn(v[i], s.min) : v[i], s.scale);
    uint32_t code;
    if constexpr (Stochastic)
      code = encode_stochastic<F>(t, u[i]);
    else
      code = encode_nearest<F>(t);
    codes[i] = usable && i < o.valid ? code : FormatTraits<F>::zero_code;
  }
  store_codes<FormatTraits<F>::bits>(codes, out, o);
}

} // namespace agoq::cuda
