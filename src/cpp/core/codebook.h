// Code books: the values of nf4 and of the 4-bit floats' magnitudes, and the thresholds of nearest rounding.
#pragma once

#include "config.h"
#include "formats.h"

namespace agoq {

// Ascending FP32 values. threshold[i] is the largest FP32 number that rounds to value[i] rather than value[i + 1],
// so the index of the nearest value is the number of thresholds below t: exact distances, ties to the even index.
template <int N>
struct Codebook {
  static constexpr int size = N;
  float value[N];
  float threshold[N - 1];
};

template <int N>
AGOQ_HD constexpr Codebook<N> make_codebook(const float (&values)[N]) {
  Codebook<N> book{};
  for (int i = 0; i < N; ++i) book.value[i] = values[i];
  for (int i = 0; i + 1 < N; ++i) {
    const double middle = (static_cast<double>(values[i]) + static_cast<double>(values[i + 1])) / 2; // exact
    const float nearest = static_cast<float>(middle);
    const bool tie_goes_up = i % 2 == 1;
    const bool lower = static_cast<double>(nearest) > middle || (static_cast<double>(nearest) == middle && tie_goes_up);
    const uint32_t bits = float_bits(nearest);
    book.threshold[i] = lower ? bits_float(nearest > 0.0f ? bits - 1u : bits + 1u) : nearest;
  }
  return book;
}

// The code book of a format: nf4's values, or the magnitudes of a 4-bit float (the index is the pattern without its
// sign). A function, called into a local constexpr, because device code may not index a host constant.
template <Format F>
AGOQ_HD constexpr auto codebook() {
  if constexpr (F == Format::nf4) {
    // QLoRA's NormalFloat, from quantiles of the normal distribution with an exact zero (arXiv 2305.14314).
    // clang-format off
    return make_codebook<16>({
        -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
        -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
        0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
        0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
    });
    // clang-format on
  } else if constexpr (F == Format::fp4_e2m1) {
    return make_codebook<8>({0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f});
  } else {
    static_assert(F == Format::fp4_e3m0, "this format has no code book");
    return make_codebook<8>({0.0f, 0.015625f, 0.03125f, 0.0625f, 0.125f, 0.25f, 0.5f, 1.0f});
  }
}

} // namespace agoq
