// Decoding on the device: the FP32 values of an octet.
#pragma once

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

// Values of this thread's octet, saturated to `limit`; NaN if the group's scale (or uint4's min) is not finite.
template <Format F>
__device__ __forceinline__ void decode_octet(const Packed& in, const Octet& o, float limit, const Decoder<F>& decoder,
                                             float (&v)[kOctet]) {
  float scale, min = 0.0f;
  if constexpr (FormatTraits<F>::has_min) {
    scale = load_scale(in, 2 * o.position);
    min = load_scale(in, 2 * o.position + 1);
  } else {
    scale = load_scale(in, o.position);
  }
  uint32_t codes[kOctet];
  load_codes<FormatTraits<F>::bits>(in, o, codes);
  const bool finite = is_finite(scale) && is_finite(min);
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    const float product = mul_rn(decoder(codes[i]), scale);
    const float value = saturate(FormatTraits<F>::has_min ? add_rn(product, min) : product, limit);
    v[i] = finite ? value : bits_float(kFloatNan);
  }
}

}  // namespace agoq::cuda
