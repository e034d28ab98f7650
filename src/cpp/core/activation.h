// exp, erf, tanh and the activations built on them: FP32, from named operations alone, so every device gets equal bits.
//
// exp and erf are within 2 units in the last place of the exact value (erf: of 1, absolutely); the polynomials are
// least maximum error fits. The formulas of the activations and their gradients are PyTorch's, in its order of
// operations.
#pragma once

#include "codec.h"

namespace agoq {

#if defined(__CUDA_ARCH__)
AGOQ_HD float sqrt_rn(float a) { return __fsqrt_rn(a); }
#else
AGOQ_HD float sqrt_rn(float a) { return __builtin_sqrtf(a); }
#endif

// `v` rounded to `D` and back; NaN in its one pattern.
template <DType D>
AGOQ_HD constexpr float rounded(float v) {
  if constexpr (D == DType::float32) return v;
  if constexpr (D == DType::float16) return half_to_float(float_to_half(v));
  return v != v ? bits_float(kFloatNan) : bfloat_to_float(float_to_bfloat(v));
}
AGOQ_HD constexpr float rounded(float v, DType dtype) {
  return dtype == DType::float32   ? v
         : dtype == DType::float16 ? rounded<DType::float16>(v)
                                   : rounded<DType::bfloat16>(v);
}

// --- elementary functions ------------------------------------------------------------------------------------

// c[0] + c[1] x + c[2] x^2 + ...
template <int N>
AGOQ_HD constexpr float polynomial(float x, const float (&c)[N]) {
  float y = c[N - 1];
  for (int i = N - 2; i >= 0; --i) y = add_rn(mul_rn(y, x), c[i]);
  return y;
}

// 2^m e^r = e^x with m = round(x / ln 2), so |r| <= ln(2) / 2 and e^r = 1 + r + r^2 q(r). Inf above 88.73, 0 below
// -104.
AGOQ_HD constexpr float exp_of(float x) {
  constexpr float kRounder = 12582912.0f; // 1.5 * 2^23: its ulp is 1
  const float limited = clamp(x, -104.0f, 89.0f);
  const float shifted = add_rn(mul_rn(limited, 1.44269502f), kRounder);
  const float n = sub_rn(shifted, kRounder);
  const int32_t m = static_cast<int32_t>(float_bits(shifted) - float_bits(kRounder));
  // ln 2 in two parts: n times the first, of nine bits, is exact.
  const float r = sub_rn(sub_rn(limited, mul_rn(n, 0.693359375f)), mul_rn(n, -2.12194440e-4f));
  const float q = polynomial(r, {0.499999934f, 0.1666651997f, 0.0416683958f, 0.0083687969f, 0.0013814432f});
  const float e = add_rn(1.0f, add_rn(r, mul_rn(mul_rn(r, r), q)));
  // Two factors, since 2^m alone may be no normal number. The bits are unsigned: m is arbitrary where x is NaN.
  const uint32_t half = static_cast<uint32_t>(m >> 1), rest = static_cast<uint32_t>(m) - half;
  return mul_rn(mul_rn(e, bits_float((half + 127u) << 23)), bits_float((rest + 127u) << 23));
}

// a p(a^2) below 1, 1 - exp(s(a)) from there on, with s(a) = log(1 - erf(a)).
AGOQ_HD constexpr float erf_of(float x) {
  const float a = bits_float(float_bits(x) & 0x7FFFFFFFu);
  const float small = mul_rn(a, polynomial(mul_rn(a, a), {1.1283789220f, -0.37611939021f, 0.11278064178f,
                                                          -0.026663809204f, 0.0048707023832f, -5.4629247866e-4f}));
  const float b = a > 4.0f ? 4.0f : a; // erf(4) rounds to 1
  const float s = polynomial(b, {-3.5370803685e-4f, -1.1270400837f, -0.63822559604f, -0.10303744116f, 0.02180535393f,
                                 -2.9396164483e-3f, 1.855749679e-4f});
  const float magnitude = a < 1.0f ? small : sub_rn(1.0f, exp_of(s));
  return bits_float(float_bits(magnitude) | (float_bits(x) & 0x80000000u));
}

AGOQ_HD constexpr float tanh_of(float x) { return sub_rn(1.0f, div_rn(2.0f, add_rn(1.0f, exp_of(mul_rn(2.0f, x))))); }

// 1 + exp(-x)
AGOQ_HD constexpr float sigmoid_denominator(float x) { return add_rn(1.0f, exp_of(-x)); }
AGOQ_HD constexpr float sigmoid(float x) { return div_rn(1.0f, sigmoid_denominator(x)); }

// --- activations ---------------------------------------------------------------------------------------------

AGOQ_HD constexpr float silu(float x) { return div_rn(x, sigmoid_denominator(x)); }

// dy * s * (1 + x (1 - s)) with s = sigmoid(x)
AGOQ_HD constexpr float silu_gradient(float dy, float x, float s) {
  return mul_rn(mul_rn(dy, s), add_rn(1.0f, mul_rn(x, sub_rn(1.0f, s))));
}

inline constexpr float kSqrtHalf = 0.707106781186547524f;
inline constexpr float kSqrtTwoOverPi = 0.797884560802865356f;
inline constexpr float kGeluCubic = 0.044715f;

// x Phi(x)
AGOQ_HD constexpr float gelu_erf(float x) {
  return mul_rn(mul_rn(x, 0.5f), add_rn(1.0f, erf_of(mul_rn(x, kSqrtHalf))));
}

// dy (Phi(x) + x phi(x))
AGOQ_HD constexpr float gelu_erf_gradient(float dy, float x) {
  const float cdf = mul_rn(0.5f, add_rn(1.0f, erf_of(mul_rn(x, kSqrtHalf))));
  const float pdf = mul_rn(exp_of(mul_rn(mul_rn(x, x), -0.5f)), 0.5f * kSqrtTwoOverPi);
  return mul_rn(dy, add_rn(cdf, mul_rn(x, pdf)));
}

// tanh(sqrt(2 / pi) (x + 0.044715 x^3))
AGOQ_HD constexpr float gelu_tanh_of(float x) {
  return tanh_of(mul_rn(kSqrtTwoOverPi, add_rn(x, mul_rn(kGeluCubic, mul_rn(mul_rn(x, x), x)))));
}

AGOQ_HD constexpr float gelu_tanh(float x) { return mul_rn(mul_rn(0.5f, x), add_rn(1.0f, gelu_tanh_of(x))); }

AGOQ_HD constexpr float gelu_tanh_gradient(float dy, float x) {
  const float t = gelu_tanh_of(x);
  const float inner = mul_rn(kSqrtTwoOverPi, add_rn(1.0f, mul_rn(3.0f * kGeluCubic, mul_rn(x, x))));
  const float right = mul_rn(mul_rn(mul_rn(0.5f, x), sub_rn(1.0f, mul_rn(t, t))), inner);
  return mul_rn(dy, add_rn(mul_rn(0.5f, add_rn(1.0f, t)), right));
}

} // namespace agoq
