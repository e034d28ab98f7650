// Parts that the fused kernels share: dense octets by run-time alignment, and encoding without stochastic rounding.
//
// Alignment is a run-time value here: the same for all threads of a launch, it costs one branch an octet, and the code
// of the scalar path exists anyway for the ends of rows. It halves the number of kernels.
#pragma once

#include "../cpp/core/activation.h"
#include "decode.cuh"
#include "encode.cuh"

namespace agoq::cuda {

// Elements of an octet as FP32; those beyond the row are zero.
__device__ __forceinline__ void load_elements(const Dense& x, const Octet& o, bool aligned, float (&v)[kOctet]) {
  if (aligned && o.valid == kOctet)
    load_octet<true>(x, o, v);
  else
    load_octet<false>(x, o, v);
}

__device__ __forceinline__ void store_elements(const float (&v)[kOctet], const Dense& out, const Octet& o,
                                               bool aligned) {
  if (aligned && o.valid == kOctet)
    store_octet<true>(v, out, o);
  else
    store_octet<false>(v, out, o);
}

// Every lane of the warp must call it.
template <Format F>
__device__ __forceinline__ void encode_nearest_octet(const float (&v)[kOctet], const Packed& out, const Octet& o) {
  encode_octet<F, false>(v, out, o, Rounding{false, nullptr, 0});
}

} // namespace agoq::cuda
