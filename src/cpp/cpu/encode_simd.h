// Encoding of a block in vector registers: nearest rounding of x / scale, the bits of core/codec.h's encode_nearest.

// --- quotients -----------------------------------------------------------------------------------------------

// t = x / scale (uint4: (x - min) / scale), such that rounding t to a code gives what the IEEE quotient gives.
//
// An ordinary scale is divided by with its reciprocal r = fl(1 / scale): q = fl(x r), then t = fl(q + r fl(x - q
// scale)), the fused steps of Markstein's division. Rounding compares the quotient with boundaries B (between two
// codes; at most 24 bits), so t must only lie on the same side of B as the IEEE quotient, or on B with it:
// - q is within 1.5 ulp of x / scale and r within 2^-24 of 1 / scale, so t is x / scale with a relative error below
//   2^-46, rounded to nearest. It can differ from fl(x / scale) only if x / scale is that close to a midpoint of two
//   floats, and its side of B only at the two midpoints next to B.
// - Only the floats x next to scale * midpoint come that close. For each of the 2^23 mantissas of a scale, each
//   boundary of every format and its two midpoints, t was compared with fl(x / scale) at these x: never different.
//   (test_codecs_isa.py repeats this through the kernels, for a sample of mantissas or for all.)
// - Exponents do not matter while nothing under- or overflows: with 2^-85 <= scale <= 2^100 the remainder of a quotient
//   of at least 2^-18, half the smallest boundary, is a multiple of 2^-149. Smaller quotients stay below all
//   boundaries.
// Other scales are divided by, and the quotient is limited to the codes (it may exceed them where a scale was clamped).
template <Format F>
struct Quotients {
  // nf4 is looked up by sixteenths of its range: quotients come multiplied by 16, which changes no rounding.
  static constexpr float kFactor = F == Format::nf4 ? 16.0f : 1.0f;

  Floats scale, inverse, min, divisor;
  bool ordinary;

  AGOQ_HD explicit Quotients(const Divisor& d)
      : scale(splat(d.scale / kFactor)),
        inverse(splat(d.inverse * kFactor)),
        min(splat(d.min)),
        divisor(splat(d.scale)),
        ordinary(d.ordinary) {}

  AGOQ_HD Values operator()(Values x) const {
    constexpr float qmax = FormatTraits<F>::qmax * kFactor;
    if constexpr (FormatTraits<F>::has_min) {
#pragma GCC unroll 8
      for (int i = 0; i < kVecs; ++i) x.v[i] = sub(x.v[i], min);
    }
    if (__builtin_expect(ordinary, 1)) {
#pragma GCC unroll 8
      for (int i = 0; i < kVecs; ++i) {
        const Floats q = mul(x.v[i], inverse);
        x.v[i] = fma(fnma(q, scale, x.v[i]), inverse, q);
      }
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < kVecs; ++i) {
        const Floats q = mul(div(x.v[i], divisor), splat(kFactor));
        x.v[i] = min_of(max_of(q, splat(FormatTraits<F>::has_min ? 0.0f : -qmax)), splat(qmax));
      }
    }
    return x;
  }
};

// Quotients of bfloat16 elements by an ordinary bfloat16 scale, to multiples of 2^-12, for codes that are integers.
//
// Significands of 8 bits make x / scale either a boundary between two codes, a multiple of 1/2, or at least
// 1 / (4 * 255) away from it. x r, rounded once to a multiple of 2^-12, is within 2^-12 of it: on the same side, and
// on the boundary if the quotient is.
template <Format F>
inline constexpr bool kCoarseQuotientsDo = FormatTraits<F>::is_int;
template <Format F>
struct CoarseQuotients {
  Floats inverse;

  AGOQ_HD explicit CoarseQuotients(const Divisor& d) : inverse(splat(d.inverse)) {}
  AGOQ_HD Values operator()(Values x) const {
    const Floats rounder = splat(0x1.8p11f); // up to 2^10 away from it an ulp is 2^-12
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) x.v[i] = sub(fma(x.v[i], inverse, rounder), rounder);
    return x;
  }
};

// --- from quotients to codes ---------------------------------------------------------------------------------

// Nearest magnitude pattern of a small float with M mantissa bits and exponent bias B (fp8, fp4_e2m1), t in its range.
// Adding a power of two whose ulp is the spacing at t lets FP32 addition round to even; below the smallest normal
// number the spacing stays. What the addition leaves in the low bits counts spacings, 2^M of them for each step of the
// exponent.
template <int M, int B>
AGOQ_HD Ints small_float_nearest(Ints bits) {
  constexpr int32_t smallest_normal = (128 - B) << 23, to_spacing = (23 - M) << 23;
  const Ints magnitude = both(bits, splat_int(0x7FFFFFFF));
  const Ints exponent = max_of(both(bits, splat_int(0x7F800000)), splat_int(smallest_normal));
  const Ints rounder = add(exponent, splat_int(to_spacing));
  const Ints count = sub(bits_of(add(floats_of(magnitude), floats_of(rounder))), rounder);
  return add(count, sub(shift_right<23 - M>(exponent), splat_int((128 - B) << M)));
}

// fp4_e3m0: a power of two. Adding half the spacing less one, plus one at odd exponents, rounds ties to the even code.
AGOQ_HD Ints power_nearest(Ints bits) {
  const Ints magnitude = both(bits, splat_int(0x7FFFFFFF));
  const Ints odd = both(shift_right<23>(bits), splat_int(1));
  const Ints code = sub(shift_right<23>(add(add(magnitude, odd), splat_int(0x3FFFFF))), splat_int(120));
  // Between 2^-7, the boundary of zero, and the smallest value 2^-6 the exponent is below that of any code.
  const Ints is_zero_or_minus_one = greater(floats_of(magnitude), splat(0.0078125f));
  return max_of(code, sub(splat_int(0), is_zero_or_minus_one));
}

// Elements in the order that is cheapest to load, in which they are encoded: BF16 is widened with one operation where
// it lies, which parts even elements from odd ones.
template <DType D>
AGOQ_HD Values load_to_encode(const char* block) {
  if constexpr (D != DType::bfloat16) {
    return load_values<D>(block);
  } else {
    Ints pairs[kVecs / 2];
    load_pairs(block, pairs);
    Values x;
#pragma GCC unroll 4
    for (int i = 0; i < kVecs / 2; ++i) {
      x.v[2 * i] = floats_of(shift_left<16>(pairs[i]));
      x.v[2 * i + 1] = floats_of(both(pairs[i], splat_int(static_cast<int32_t>(0xFFFF0000u))));
    }
    return x;
  }
}
template <DType D>
AGOQ_HD __m256i pack_in_order(const Ints (&v)[kVecs]) {
  return D == DType::bfloat16 ? pack_pairs_to_bytes(v) : in_order(pack_to_bytes(v));
}

// What nearest rounding makes of quotients: integers, or the magnitude patterns of small floats.
template <Format F>
AGOQ_HD void round_quotients(const Values& t, Ints (&wide)[kVecs]) {
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) {
    if constexpr (FormatTraits<F>::is_int || F == Format::uint4)
      wide[i] = round_to_ints(t.v[i]);
    else if constexpr (F == Format::fp4_e2m1)
      wide[i] = small_float_nearest<1, 1>(bits_of(t.v[i]));
    else if constexpr (F == Format::fp4_e3m0)
      wide[i] = power_nearest(bits_of(t.v[i]));
    else
      wide[i] = small_float_nearest<SmallFloat<F>::mantissa, SmallFloat<F>::bias>(bits_of(t.v[i]));
  }
}

// The codes of rounded quotients of x.
template <Format F, DType D>
AGOQ_HD Codes codes_of_rounded(const Ints (&wide)[kVecs], const Values& x) {
  __m256i bytes = pack_in_order<D>(wide);
  if constexpr (F == Format::uint4) {
    bytes = _mm256_min_epu8(bytes, _mm256_set1_epi8(15)); // cancellation in the scale may leave t above 15
  } else if constexpr (FormatTraits<F>::is_int && F != Format::int8) {
    bytes = _mm256_add_epi8(bytes, same_codes(FormatTraits<F>::zero_code).bytes);
  } else if constexpr (!FormatTraits<F>::is_int) {
    // The sign of x is that of the quotient, even of one that underflows.
    Ints signs[kVecs];
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) signs[i] = all_of_sign(bits_of(x.v[i]));
    __m256i sign = _mm256_and_si256(pack_in_order<D>(signs), _mm256_set1_epi8(FormatTraits<F>::bits == 4 ? 8 : -128));
    if constexpr (F == Format::fp4_e3m0) // no minus zero
      sign = _mm256_andnot_si256(_mm256_cmpeq_epi8(bytes, _mm256_setzero_si256()), sign);
    bytes = _mm256_or_si256(bytes, sign);
  }
  return {bytes};
}
#if defined(__AVX512F__)
// The same in pairs: one register of bytes less.
template <Format F, DType D>
  requires(D == DType::bfloat16 && (F == Format::int4 || F == Format::uint4))
AGOQ_HD Nibbles codes_of_rounded(const Ints (&wide)[kVecs], const Values&) {
  const auto code = [](Ints w) {
    return F == Format::uint4 ? min_of(w, splat_int(15)) : add(w, splat_int(FormatTraits<F>::zero_code));
  };
  return {join_nibbles(code(wide[0]), code(wide[1]))};
}
#endif

// Of what load_to_encode<D> gives; `quotients` maps values to quotients. Gives Codes or Nibbles.
template <Format F, DType D, class MakeQuotients>
AGOQ_HD auto encode_nearest_block(const Values& x, const MakeQuotients& quotients) {
  const Values t = quotients(x);
  if constexpr (F == Format::nf4) {
    const __m256i packed = count_below<nf4_nearest_thresholds>(t);
    return Codes{D == DType::bfloat16 ? pairs_in_order(packed) : in_order(packed)};
  } else {
    Ints wide[kVecs];
    round_quotients<F>(t, wide);
    return codes_of_rounded<F, D>(wide, x);
  }
}
