// The format table: widths and constants of every code, and dispatch from run-time values to templates.
#pragma once

#include "config.h"

namespace agoq {

enum class Format : int32_t { int8, int6, int5, int4, uint4, nf4, fp4_e2m1, fp4_e3m0, fp8_e4m3, fp8_e5m2 };
inline constexpr int kNumFormats = 10;

enum class DType : int32_t { float32, float16, bfloat16 };

// A row of codes is padded to a multiple of this many elements; every group size is a multiple of it too.
inline constexpr int kBlock = 32;
inline constexpr int kMaxGroup = 256;

struct FormatInfo {
  const char* name;
  int bits;
  float qmax;         // the largest code value
  uint32_t zero_code; // the stored pattern whose value is zero
};

inline constexpr FormatInfo kFormats[kNumFormats] = {
    {"int8", 8, 127.0f, 0},     {"int6", 6, 31.0f, 32},       {"int5", 5, 15.0f, 16},   {"int4", 4, 7.0f, 8},
    {"uint4", 4, 15.0f, 0},     {"nf4", 4, 1.0f, 7},          {"fp4_e2m1", 4, 6.0f, 0}, {"fp4_e3m0", 4, 1.0f, 0},
    {"fp8_e4m3", 8, 448.0f, 0}, {"fp8_e5m2", 8, 57344.0f, 0},
};

// Compile-time view of a format's row of the table.
template <Format F>
struct FormatTraits {
  static constexpr int bits = kFormats[static_cast<int>(F)].bits;
  static constexpr float qmax = kFormats[static_cast<int>(F)].qmax;
  static constexpr uint32_t zero_code = kFormats[static_cast<int>(F)].zero_code;
  static constexpr bool has_min = F == Format::uint4;
  static constexpr bool is_int = F == Format::int8 || F == Format::int6 || F == Format::int5 || F == Format::int4;
  static constexpr bool is_fp8 = F == Format::fp8_e4m3 || F == Format::fp8_e5m2;
};

template <Format F>
struct FormatTag {
  static constexpr Format value = F;
};
template <bool B>
struct BoolTag {
  static constexpr bool value = B;
};

// Calls f(FormatTag<F>{}) for the run-time `format`.
template <class Fn>
AGOQ_HD decltype(auto) with_format(Format format, Fn&& f) {
  switch (format) {
    case Format::int8: return f(FormatTag<Format::int8>{});
    case Format::int6: return f(FormatTag<Format::int6>{});
    case Format::int5: return f(FormatTag<Format::int5>{});
    case Format::int4: return f(FormatTag<Format::int4>{});
    case Format::uint4: return f(FormatTag<Format::uint4>{});
    case Format::nf4: return f(FormatTag<Format::nf4>{});
    case Format::fp4_e2m1: return f(FormatTag<Format::fp4_e2m1>{});
    case Format::fp4_e3m0: return f(FormatTag<Format::fp4_e3m0>{});
    case Format::fp8_e4m3: return f(FormatTag<Format::fp8_e4m3>{});
    default: return f(FormatTag<Format::fp8_e5m2>{});
  }
}

// Calls f(BoolTag<B>{}) for the run-time `value`.
template <class Fn>
AGOQ_HD decltype(auto) with_bool(bool value, Fn&& f) {
  return value ? f(BoolTag<true>{}) : f(BoolTag<false>{});
}

} // namespace agoq
