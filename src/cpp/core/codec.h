// The codecs: FP32 quotient t = x / scale to a stored pattern, and back to the code's FP32 value.
//
// One scalar definition serves the CPU kernels (loops over 32 elements that compilers vectorize, hence no branches)
// and the CUDA kernels. Rounding rules are those of docs/formats.md: "nearest" decides on exact distances, ties to
// the even code; "stochastic" compares a uniform u with the position of t between its two neighbouring code values.
#pragma once

#include "codebook.h"
#include "float_types.h"
#include "formats.h"

namespace agoq {

AGOQ_HD constexpr float clamp(float x, float low, float high) {
  const float y = x < low ? low : x;
  return y > high ? high : y;
}

// Nearest integer of |t| < 2^22, ties to even: at 1.5 * 2^23 an ulp is 1, so the addition rounds.
AGOQ_HD constexpr int32_t round_to_int(float t) {
  return static_cast<int32_t>(float_bits(add_rn(t, 12582912.0f))) - 0x4B400000;
}

// floor(t), plus 1 with probability t - floor(t).
AGOQ_HD constexpr int32_t round_stochastic_to_int(float t, float u) {
  const int32_t truncated = static_cast<int32_t>(t);
  const int32_t low = truncated - (static_cast<float>(truncated) > t ? 1 : 0);
  return low + (u < sub_rn(t, static_cast<float>(low)) ? 1 : 0);
}

// --- code books ----------------------------------------------------------------------------------------------

struct Neighbours {
  uint32_t low; // code of v0; v1 is the value of the next code
  float v0, v1;
};

// Index of the value of F's code book nearest to t.
template <Format F>
AGOQ_HD constexpr uint32_t nearest_in(float t) {
  constexpr auto book = codebook<F>();
  uint32_t code = 0;
  for (int i = 0; i + 1 < book.size; ++i) code += t > book.threshold[i] ? 1u : 0u;
  return code;
}

// The neighbouring values v0 <= t < v1 of F's code book; at its last value, the last two.
template <Format F>
AGOQ_HD constexpr Neighbours neighbours_in(float t) {
  constexpr auto book = codebook<F>();
  Neighbours n = {0, book.value[0], book.value[1]};
  for (int i = 1; i + 1 < book.size; ++i) {
    const bool above = t >= book.value[i];
    n.low = above ? static_cast<uint32_t>(i) : n.low;
    n.v0 = above ? book.value[i] : n.v0;
    n.v1 = above ? book.value[i + 1] : n.v1;
  }
  return n;
}

// --- fp8: magnitudes are bit patterns of a small float with M mantissa bits and exponent bias B ---------------

template <int M, int B>
AGOQ_HD constexpr float small_float_value(uint32_t code) {
  constexpr float unit = bits_float(static_cast<uint32_t>(127 + 1 - B - M) << 23); // the subnormal spacing
  const uint32_t normal = (code << (23 - M)) + (static_cast<uint32_t>(127 - B) << 23);
  return code < (1u << M) ? static_cast<float>(static_cast<int32_t>(code)) * unit : bits_float(normal);
}

// Pattern nearest to a magnitude `a` within the format's range.
template <int M, int B>
AGOQ_HD constexpr uint32_t small_float_nearest(float a) {
  constexpr float smallest_normal = bits_float(static_cast<uint32_t>(128 - B) << 23);
  constexpr float rounder = bits_float(static_cast<uint32_t>(127 + 24 - B - M) << 23); // its ulp is the spacing
  const uint32_t bits = float_bits(a);
  const uint32_t even = (bits >> (23 - M)) & 1u;
  const uint32_t normal = ((bits + (1u << (22 - M)) - 1u + even) >> (23 - M)) - (static_cast<uint32_t>(127 - B) << M);
  const uint32_t subnormal = float_bits(add_rn(a, rounder)) - float_bits(rounder);
  return a < smallest_normal ? subnormal : normal;
}

// Largest pattern whose value does not exceed `a`.
template <int M, int B>
AGOQ_HD constexpr uint32_t small_float_floor(float a) {
  constexpr float smallest_normal = bits_float(static_cast<uint32_t>(128 - B) << 23);
  constexpr float units = bits_float(static_cast<uint32_t>(127 - 1 + B + M) << 23);
  const uint32_t normal = (float_bits(a) >> (23 - M)) - (static_cast<uint32_t>(127 - B) << M);
  const uint32_t subnormal = static_cast<uint32_t>(static_cast<int32_t>(mul_rn(a, units)));
  return a < smallest_normal ? subnormal : normal;
}

template <Format F>
struct SmallFloat;
template <>
struct SmallFloat<Format::fp8_e4m3> {
  static constexpr int mantissa = 3, bias = 7;
  static constexpr uint32_t top = 0x7E;
};
template <>
struct SmallFloat<Format::fp8_e5m2> {
  static constexpr int mantissa = 2, bias = 15;
  static constexpr uint32_t top = 0x7B;
};

// --- magnitudes of the sign-magnitude formats (fp4, fp8) -----------------------------------------------------

template <Format F>
AGOQ_HD constexpr uint32_t magnitude_nearest(float a) {
  if constexpr (FormatTraits<F>::is_fp8) {
    return small_float_nearest<SmallFloat<F>::mantissa, SmallFloat<F>::bias>(a);
  } else {
    return nearest_in<F>(a);
  }
}

// The neighbouring magnitudes v0 <= a < v1; at the largest code, the last two.
template <Format F>
AGOQ_HD constexpr Neighbours magnitude_neighbours(float a) {
  if constexpr (FormatTraits<F>::is_fp8) {
    constexpr int M = SmallFloat<F>::mantissa, B = SmallFloat<F>::bias;
    const uint32_t floor = small_float_floor<M, B>(a);
    const uint32_t low = floor < SmallFloat<F>::top ? floor : SmallFloat<F>::top - 1;
    return {low, small_float_value<M, B>(low), small_float_value<M, B>(low + 1)};
  } else {
    return neighbours_in<F>(a);
  }
}

template <Format F>
AGOQ_HD constexpr uint32_t with_sign(uint32_t magnitude, uint32_t t_bits) {
  const uint32_t sign = (t_bits >> 31) << (FormatTraits<F>::bits - 1);
  if constexpr (F == Format::fp4_e3m0) return magnitude == 0 ? 0u : magnitude | sign; // no minus zero
  return magnitude | sign;
}

// --- encode --------------------------------------------------------------------------------------------------

// The stored pattern of an integer code.
template <Format F>
AGOQ_HD constexpr uint32_t store_int(int32_t q) {
  if constexpr (F == Format::int8) return static_cast<uint32_t>(q) & 0xFFu;
  return static_cast<uint32_t>(q) + FormatTraits<F>::zero_code; // uint4's zero code is 0
}

template <Format F>
AGOQ_HD constexpr uint32_t encode_nearest(float t) {
  constexpr float qmax = FormatTraits<F>::qmax;
  if constexpr (FormatTraits<F>::is_int) {
    return store_int<F>(round_to_int(clamp(t, -qmax, qmax)));
  } else if constexpr (F == Format::uint4) {
    return store_int<F>(round_to_int(clamp(t, 0.0f, qmax)));
  } else if constexpr (F == Format::nf4) {
    return nearest_in<F>(t);
  } else {
    const float a = clamp(bits_float(float_bits(t) & 0x7FFFFFFFu), 0.0f, qmax);
    return with_sign<F>(magnitude_nearest<F>(a), float_bits(t));
  }
}

template <Format F>
AGOQ_HD constexpr uint32_t encode_stochastic(float t, float u) {
  constexpr float qmax = FormatTraits<F>::qmax;
  if constexpr (FormatTraits<F>::is_int) {
    return store_int<F>(round_stochastic_to_int(clamp(t, -qmax, qmax), u));
  } else if constexpr (F == Format::uint4) {
    return store_int<F>(round_stochastic_to_int(clamp(t, 0.0f, qmax), u));
  } else if constexpr (F == Format::nf4) {
    const float x = clamp(t, -1.0f, 1.0f);
    const Neighbours n = neighbours_in<F>(x);
    return n.low + (u < div_rn(sub_rn(x, n.v0), sub_rn(n.v1, n.v0)) ? 1u : 0u);
  } else {
    const float a = clamp(bits_float(float_bits(t) & 0x7FFFFFFFu), 0.0f, qmax);
    const bool negative = (float_bits(t) >> 31) != 0;
    const Neighbours n = magnitude_neighbours<F>(a);
    // In increasing order the neighbours are (v0, v1) above zero and (-v1, -v0) below it.
    const float position = div_rn(negative ? sub_rn(n.v1, a) : sub_rn(a, n.v0), sub_rn(n.v1, n.v0));
    const bool higher = u < position;
    return with_sign<F>(n.low + (higher != negative ? 1u : 0u), float_bits(t));
  }
}

// --- decode --------------------------------------------------------------------------------------------------

// FP32 value of a stored pattern; NaN for the fp8 patterns that are not finite numbers.
template <Format F>
AGOQ_HD constexpr float decode(uint32_t code) {
  if constexpr (F == Format::int8) {
    return static_cast<float>(static_cast<int32_t>(static_cast<int8_t>(code)));
  } else if constexpr (FormatTraits<F>::is_int || F == Format::uint4) {
    return static_cast<float>(static_cast<int32_t>(code) - static_cast<int32_t>(FormatTraits<F>::zero_code));
  } else if constexpr (F == Format::nf4) {
    constexpr auto book = codebook<F>();
    return book.value[code];
  } else if constexpr (FormatTraits<F>::is_fp8) {
    const uint32_t magnitude = code & 0x7Fu;
    const float value = small_float_value<SmallFloat<F>::mantissa, SmallFloat<F>::bias>(magnitude);
    const uint32_t sign = (code & 0x80u) << 24;
    return bits_float(magnitude > SmallFloat<F>::top ? kFloatNan : float_bits(value) | sign);
  } else {
    const uint32_t magnitude = code & 7u;
    const uint32_t sign = (code & 8u) << 28;
    if constexpr (F == Format::fp4_e2m1) {
      const uint32_t normal = (magnitude << 22) + (126u << 23);
      return bits_float(sign | (magnitude == 0 ? 0u : magnitude == 1 ? float_bits(0.5f) : normal));
    } else {
      return bits_float(magnitude == 0 ? 0u : sign | ((magnitude + 120u) << 23)); // minus zero reads as zero
    }
  }
}

// The value of a code in its group: saturated to `limit`, the largest finite value of the output's dtype.
template <Format F>
AGOQ_HD constexpr float decode_scaled(uint32_t code, float scale, float min, float limit) {
  const float product = mul_rn(decode<F>(code), scale);
  return saturate(FormatTraits<F>::has_min ? add_rn(product, min) : product, limit);
}

} // namespace agoq
