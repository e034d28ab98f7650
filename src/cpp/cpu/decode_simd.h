// Decoding of a group in vector registers: the bits of core/codec.h's decode_scaled.

AGOQ_HD Values saturated(Values x, float limit) {
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) x.v[i] = max_of(min_of(x.v[i], splat(limit)), splat(-limit));
  return x;
}

// Codes of 8, 6 and 5 bits: decoded, multiplied, saturated.
template <Format F>
struct GroupDecoder {
  float scale, limit;
  bool may_saturate; // the largest code value of a pattern is below 2^16, of integers 2^7

  AGOQ_HD GroupDecoder(float group_scale, float, float largest)
      : scale(group_scale), limit(largest), may_saturate(!(__builtin_fabsf(scale) <= limit * kMayReach)) {}

  AGOQ_HD Values operator()(Codes codes) const {
    Values x;
    if constexpr (FormatTraits<F>::is_fp8) {
      const __m256i magnitude = _mm256_and_si256(codes.bytes, _mm256_set1_epi8(0x7F));
      const __m256i invalid = _mm256_cmpgt_epi8(magnitude, _mm256_set1_epi8(SmallFloat<F>::top));
      if (__builtin_expect(!_mm256_testz_si256(invalid, invalid), 0)) return one_by_one(codes);
      x = floats_of_fp8(codes.bytes);
    } else {
      if constexpr (F != Format::int8)
        codes.bytes = _mm256_sub_epi8(codes.bytes, same_codes(FormatTraits<F>::zero_code).bytes);
      Ints wide[kVecs];
      widen_bytes(codes.bytes, wide);
#pragma GCC unroll 8
      for (int i = 0; i < kVecs; ++i) x.v[i] = to_floats(wide[i]);
    }
    x = product(x, scale);
    if (__builtin_expect(may_saturate, 0)) x = saturated(x, limit);
    return x;
  }

 private:
  static constexpr float kMayReach = FormatTraits<F>::is_fp8 ? 0x1p-16f : 0x1p-7f;

  // Through FP16: an e5m2 pattern is the upper byte of one. An e4m3 pattern, its exponent widened from 4 to 5 bits, is
  // 2^-8 of its value there, since the biases differ by 8; that holds for the subnormal numbers of both too.
  static AGOQ_HD Values floats_of_fp8(__m256i bytes) {
    Values x;
    __m256i low = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes));
    __m256i high = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1));
    if constexpr (F == Format::fp8_e5m2) {
      widen_halves(_mm256_slli_epi16(low, 8), _mm256_slli_epi16(high, 8), x.v);
      return x;
    } else {
      const __m256i no_bit_14 = _mm256_set1_epi16(static_cast<int16_t>(0xBFFF)); // a copy of the sign
      low = _mm256_and_si256(_mm256_slli_epi16(low, 7), no_bit_14);
      high = _mm256_and_si256(_mm256_slli_epi16(high, 7), no_bit_14);
      widen_halves(low, high, x.v);
      return product(x, 256.0f);
    }
  }

  // For blocks with patterns that are no numbers, which encoding never writes.
  __attribute__((noinline, cold)) Values one_by_one(Codes codes) const {
    alignas(64) uint8_t bytes[kBlock];
    alignas(64) float values[kBlock];
    _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), codes.bytes);
    for (int i = 0; i < kBlock; ++i) values[i] = decode_scaled<F>(bytes[i], scale, 0.0f, limit);
    return load_values<DType::float32>(values);
  }
};

// Codes of 4 bits: a group has only sixteen values, which are computed once and looked up.
struct CodeValues {
  alignas(64) float value[16];
};
template <Format F, bool TableOrder>
constexpr CodeValues make_code_values() {
  CodeValues v{};
  for (int i = 0; i < 16; ++i) v.value[i] = decode<F>(static_cast<uint32_t>(TableOrder ? kTableOrder[i] : i));
  return v;
}

// The values of a group's sixteen codes.
template <Format F, bool TableOrder>
AGOQ_HD void scaled_code_values(float scale, float min, float limit, Floats* values) {
  static constexpr CodeValues codes = make_code_values<F, TableOrder>();
#pragma GCC unroll 2
  for (int i = 0; i < kTableVecs; ++i) {
    Floats x = mul(load(codes.value + i * kLanes), splat(scale));
    if constexpr (FormatTraits<F>::has_min) x = add(x, splat(min));
    values[i] = max_of(min_of(x, splat(limit)), splat(-limit));
  }
}

template <Format F>
  requires(FormatTraits<F>::bits == 4)
struct GroupDecoder<F> {
  Table16 table;

  AGOQ_HD GroupDecoder(float scale, float min, float limit) {
    Floats values[kTableVecs];
    scaled_code_values<F, true>(scale, min, limit, values);
    table = make_table(values);
  }
  AGOQ_HD Values operator()(Nibbles nibbles) const {
    Values x;
#if defined(__AVX512F__)
    lookup_nibbles(table, nibbles.bytes, x.v);
#else
    lookup16(table, out_of_order(codes_of(nibbles).bytes), x.v);
#endif
    return x;
  }
};

// To the elements of a tensor: decoded, then narrowed.
template <Format F, DType D>
struct ElementDecoder {
  GroupDecoder<F> decoded;

  AGOQ_HD ElementDecoder(float scale, float min) : decoded(scale, min, max_finite(D)) {}
  AGOQ_HD Elements<D> operator()(auto codes) const { return to_elements<D>(decoded(codes)); }
};

// Sixteen values are narrowed once too; their patterns are looked up byte by byte.
template <Format F, DType D>
  requires(FormatTraits<F>::bits == 4 && D != DType::float32)
struct ElementDecoder<F, D> {
  __m256i low, high; // bytes of the sixteen patterns, in both halves

  AGOQ_HD ElementDecoder(float scale, float min) {
    Values values = {};
    scaled_code_values<F, false>(scale, min, max_finite(D), values.v);
    const __m256i split = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12,
                                           14, 1, 3, 5, 7, 9, 11, 13, 15);
    const __m256i bytes = _mm256_shuffle_epi8(narrow_elements<D, 0>(values), split);
    low = _mm256_permute4x64_epi64(bytes, 0x88);
    high = _mm256_permute4x64_epi64(bytes, 0xDD);
  }
  AGOQ_HD Elements<D> operator()(Nibbles nibbles) const {
    const __m256i index =
        _mm256_permute4x64_epi64(codes_of(nibbles).bytes, 0xD8); // unpacking works in halves of 128 bits
    const __m256i a = _mm256_shuffle_epi8(low, index), b = _mm256_shuffle_epi8(high, index);
    return {{_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)}};
  }
};
