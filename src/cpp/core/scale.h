// From a group's extremes to its stored scale (docs/formats.md, "Scales").
#pragma once

#include "float_types.h"
#include "formats.h"

namespace agoq {

// What a group stores beside its codes, already rounded to the scale's dtype; `min` is used by uint4 only.
struct GroupScale {
  float scale;
  float min;
};

// The next bfloat16 away from zero, unless `x` is one; as FP32, possibly Inf.
AGOQ_HD constexpr float magnitude_up_to_bfloat(float x) { return bits_float((float_bits(x) + 0xFFFFu) & 0xFFFF0000u); }
AGOQ_HD constexpr float magnitude_down_to_bfloat(float x) { return bits_float(float_bits(x) & 0xFFFF0000u); }

// amax / qmax rounded up to the scale's dtype, clamped to its largest finite value; NaN if amax is NaN or Inf.
AGOQ_HD float symmetric_scale(float amax, float qmax, DType scale_dtype) {
  if (!(amax <= kFloatMax)) return bits_float(kFloatNan);
  float scale = div_rn(amax, qmax);
  // The exact remainder tells whether the quotient was rounded down: then the next float is the one above it.
  if (fma_rn(-scale, qmax, amax) > 0.0f) scale = bits_float(float_bits(scale) + 1u);
  if (scale_dtype == DType::bfloat16) scale = magnitude_up_to_bfloat(scale);
  return saturate(scale, max_finite(scale_dtype));
}

// uint4's (scale, min) of a group that spans [low, high]; (NaN, 0) if `finite` is false.
AGOQ_HD GroupScale asymmetric_scale(float low, float high, bool finite, DType scale_dtype) {
  if (!finite) return {bits_float(kFloatNan), 0.0f};
  const bool narrow = scale_dtype == DType::bfloat16;
  const float limit = max_finite(scale_dtype);
  if (low == high) {
    const float value = narrow ? bfloat_to_float(float_to_bfloat(saturate(low, limit))) : low;
    return {0.0f, add_rn(value, 0.0f)}; // adding zero turns minus zero into zero
  }
  float min = low;
  if (narrow) min = low < 0.0f ? magnitude_up_to_bfloat(low) : magnitude_down_to_bfloat(low);
  min = saturate(min, limit);
  float scale = sub_rn(div_rn(high, 15.0f), div_rn(min, 15.0f));
  if (narrow) scale = magnitude_up_to_bfloat(scale);
  return {saturate(scale, limit), add_rn(min, 0.0f)};
}

// Whether the codes of a group with this scale carry values; otherwise all of them are the zero code.
AGOQ_HD constexpr bool scale_is_usable(float scale) { return scale > 0.0f && scale <= kFloatMax; }
AGOQ_HD constexpr bool is_finite(float x) { return (float_bits(x) & kFloatInf) != kFloatInf; }

} // namespace agoq
