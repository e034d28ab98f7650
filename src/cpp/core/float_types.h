// bfloat16 and float16 as bit patterns: exact widening, and narrowing with round-to-nearest-even.
#pragma once

#include "config.h"
#include "formats.h"

namespace agoq {

inline constexpr uint32_t kFloatInf = 0x7F800000u;
inline constexpr uint32_t kFloatNan = 0x7FC00000u; // the one NaN that decoding writes
inline constexpr uint16_t kHalfNan = 0x7E00u;
inline constexpr uint16_t kBfloatNan = 0x7FC0u;

inline constexpr float kFloatMax = 3.40282346638528859812e+38f;
inline constexpr float kHalfMax = 65504.0f;
inline constexpr float kBfloatMax = 3.38953138925153547590e+38f;

AGOQ_HD constexpr float max_finite(DType dtype) {
  return dtype == DType::float32 ? kFloatMax : dtype == DType::float16 ? kHalfMax : kBfloatMax;
}
AGOQ_HD constexpr int dtype_bytes(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

AGOQ_HD constexpr float bfloat_to_float(uint16_t x) { return bits_float(static_cast<uint32_t>(x) << 16); }

// Nearest bfloat16 of a value that is not NaN.
AGOQ_HD constexpr uint16_t float_to_bfloat(float x) {
  const uint32_t bits = float_bits(x);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

AGOQ_HD constexpr float half_to_float(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  const uint32_t magnitude = x & 0x7FFFu;
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 5.9604644775390625e-8f; // 2^-24
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = kFloatInf | (magnitude << 13);
  const uint32_t bits = magnitude < 0x400u ? float_bits(subnormal) : magnitude < 0x7C00u ? normal : special;
  return bits_float(sign | bits);
}

// Nearest float16; beyond the range it is Inf, and every NaN is the one that decoding writes.
AGOQ_HD constexpr uint16_t float_to_half(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Below 2^-14 the spacing is 2^-24: adding 0.5, whose ulp that is, lets FP32 addition do the rounding.
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
  const uint32_t normal = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  const uint32_t half = magnitude < 0x38800000u ? subnormal : magnitude >= 0x477FF000u ? 0x7C00u : normal;
  if (magnitude > kFloatInf) return kHalfNan;
  return static_cast<uint16_t>(sign | half);
}

// `x` limited to +-limit; NaN stays NaN.
AGOQ_HD constexpr float saturate(float x, float limit) {
  const float low = x < -limit ? -limit : x;
  return low > limit ? limit : low;
}

} // namespace agoq
