// Decoding on the device: the FP32 values of an octet.
#pragma once

#include <type_traits>

#include "../cpp/core/scale.h"
#include "octet.cuh"

namespace agoq::cuda {

// nf4's values in shared memory: lanes index it at will, where constant memory would serialize them.
// The block must pass a barrier between the constructor and the first call.
template <Format F>
struct Decoder {
  __device__ __forceinline__ explicit Decoder(float* /*table*/) {}
  __device__ __forceinline__ float operator()(uint32_t code) const { return decode<F>(code); }
};

template <>
struct Decoder<Format::nf4> {
  const float* table;
  __device__ __forceinline__ explicit Decoder(float* shared) : table(shared) {
    static constexpr auto book = codebook<Format::nf4>();
#pragma unroll
    for (int i = 0; i < book.size; ++i)
      if (threadIdx.x == static_cast<unsigned>(i)) shared[i] = book.value[i];
  }
  __device__ __forceinline__ float operator()(uint32_t code) const { return table[code]; }
};

struct FourBitValues {
  float value[16];
};
template <Format F>
AGOQ_HD constexpr FourBitValues four_bit_values() {
  FourBitValues v{};
  for (uint32_t code = 0; code < 16; ++code) v.value[code] = decode<F>(code);
  return v;
}

// Any 4-bit format's values in a table as nf4's, others by a branch that all threads take alike: fewer kernels than
// with the format as template parameter, where decoding is a small part of the work.
template <int Bits>
struct BitsDecoder {
  Format format;
  const float* table;
  __device__ __forceinline__ BitsDecoder(Format f, float* shared) : format(f), table(shared) {
    if constexpr (Bits == 4) {
      // Static, hence in constant memory and not on the stack.
      static constexpr FourBitValues int4 = four_bit_values<Format::int4>(), uint4 = four_bit_values<Format::uint4>(),
                                     nf4 = four_bit_values<Format::nf4>(), e2m1 = four_bit_values<Format::fp4_e2m1>(),
                                     e3m0 = four_bit_values<Format::fp4_e3m0>();
      const uint32_t code = threadIdx.x;
      if (code >= 16) return;
      shared[code] = f == Format::int4       ? int4.value[code]
                     : f == Format::uint4    ? uint4.value[code]
                     : f == Format::nf4      ? nf4.value[code]
                     : f == Format::fp4_e2m1 ? e2m1.value[code]
                                             : e3m0.value[code];
    }
  }
  __device__ __forceinline__ float operator()(uint32_t code) const {
    if constexpr (Bits == 4) return table[code];
    if constexpr (Bits == 5) return decode<Format::int5>(code);
    if constexpr (Bits == 6) return decode<Format::int6>(code);
    return format == Format::int8       ? decode<Format::int8>(code)
           : format == Format::fp8_e4m3 ? decode<Format::fp8_e4m3>(code)
                                        : decode<Format::fp8_e5m2>(code);
  }
};

// Values of this thread's octet, saturated to `limit`; NaN if the group's scale (or uint4's min) is not finite.
template <int Bits, class CodeValue>
__device__ __forceinline__ void decode_octet_with(const CodeValue& value_of, bool has_min, const Packed& in,
                                                  const Octet& o, float limit, float (&v)[kOctet]) {
  float scale, min = 0.0f;
  if (has_min) {
    scale = load_scale(in, 2 * o.position);
    min = load_scale(in, 2 * o.position + 1);
  } else {
    scale = load_scale(in, o.position);
  }
  uint32_t codes[kOctet];
  load_codes<Bits>(in, o, codes);
  const bool finite = is_finite(scale) && is_finite(min);
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    const float product = mul_rn(value_of(codes[i]), scale);
    const float value = saturate(has_min ? add_rn(product, min) : product, limit);
    v[i] = finite ? value : bits_float(kFloatNan);
  }
}

template <Format F>
__device__ __forceinline__ void decode_octet(const Packed& in, const Octet& o, float limit, const Decoder<F>& decoder,
                                             float (&v)[kOctet]) {
  decode_octet_with<FormatTraits<F>::bits>(decoder, FormatTraits<F>::has_min, in, o, limit, v);
}
template <int Bits>
__device__ __forceinline__ void decode_octet(const Packed& in, const Octet& o, float limit,
                                             const BitsDecoder<Bits>& decoder, float (&v)[kOctet]) {
  decode_octet_with<Bits>(decoder, Bits == 4 && decoder.format == Format::uint4, in, o, limit, v);
}

// Calls f with an integral constant of the format's bits.
template <class Fn>
decltype(auto) with_bits(Format format, Fn&& f) {
  switch (kFormats[static_cast<int>(format)].bits) {
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    case 6: return f(std::integral_constant<int, 6>{});
    default: return f(std::integral_constant<int, 8>{});
  }
}

} // namespace agoq::cuda
