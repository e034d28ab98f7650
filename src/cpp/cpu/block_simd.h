// Blocks of 32 elements in vector registers: loads and stores of elements, extremes, packing of codes.
//
// Written once over the vectors of vec_avx2.h or vec_avx512.h; block_portable.h is the plain twin. A block's codes are
// one byte each in a register of 256 bits, whatever the width of the vectors.

struct Values {
  Floats v[kVecs];
};
struct Codes {
  __m256i bytes;
};
struct Nibbles { // codes of four bits, two a byte
  __m128i bytes;
};

// --- elements ------------------------------------------------------------------------------------------------

AGOQ_HD Values same_values(float x) {
  Values out;
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) out.v[i] = splat(x);
  return out;
}

template <DType D>
AGOQ_HD Values load_values(const void* block) {
  Values out;
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) {
    if constexpr (D == DType::float32)
      out.v[i] = load(static_cast<const float*>(block) + i * kLanes);
    else if constexpr (D == DType::float16)
      out.v[i] = load_halves(static_cast<const uint16_t*>(block) + i * kLanes);
    else
      out.v[i] = load_bfloats(static_cast<const uint16_t*>(block) + i * kLanes);
  }
  return out;
}

// 16-bit patterns of elements 16 * Half ..., of values within the range of D, or Inf or the canonical NaN.
template <DType D, int Half>
AGOQ_HD __m256i narrow_elements(const Values& x) {
  if constexpr (D == DType::float16) return narrow_to_halves<Half>(x.v);
  Ints rounded[kVecs] = {};
#pragma GCC unroll 8
  for (int i = Half * kVecs / 2; i < (Half + 1) * kVecs / 2; ++i) {
    // float_to_bfloat of core/float_types.h.
    const Ints bits = bits_of(x.v[i]), even = both(shift_right<16>(bits), splat_int(1));
    rounded[i] = shift_right<16>(add(add(bits, even), splat_int(0x7FFF)));
  }
  return narrow_to_words<Half>(rounded);
}

// A block of elements as they lie in memory.
template <DType D>
struct Elements {
  __m256i words[2];
};
template <>
struct Elements<DType::float32> {
  Floats words[kVecs];
};

template <DType D>
AGOQ_HD Elements<D> to_elements(const Values& x) {
  Elements<D> out;
  if constexpr (D == DType::float32) {
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) out.words[i] = x.v[i];
  } else {
    out.words[0] = narrow_elements<D, 0>(x);
    out.words[1] = narrow_elements<D, 1>(x);
  }
  return out;
}

template <DType D>
AGOQ_HD void store_elements(const Elements<D>& x, void* block) {
  if constexpr (D == DType::float32) {
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) store(static_cast<float*>(block) + i * kLanes, x.words[i]);
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(block), x.words[0]);
    _mm256_storeu_si256(static_cast<__m256i*>(block) + 1, x.words[1]);
  }
}
// Past the caches, to an address aligned to 64 bytes.
template <DType D>
AGOQ_HD void stream_elements(const Elements<D>& x, void* block) {
  if constexpr (D == DType::float32) {
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) stream(static_cast<float*>(block) + i * kLanes, x.words[i]);
  } else {
    _mm256_stream_si256(static_cast<__m256i*>(block), x.words[0]);
    _mm256_stream_si256(static_cast<__m256i*>(block) + 1, x.words[1]);
  }
}
AGOQ_HD void finish_streams() { _mm_sfence(); }

AGOQ_HD void store_floats(const Values& x, float* block) { store_elements(to_elements<DType::float32>(x), block); }

// --- arithmetic ----------------------------------------------------------------------------------------------

AGOQ_HD Values sum(const Values& a, const Values& b) {
  Values out;
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) out.v[i] = add(a.v[i], b.v[i]);
  return out;
}
AGOQ_HD Values product(const Values& a, float factor) {
  Values out;
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) out.v[i] = mul(a.v[i], splat(factor));
  return out;
}
// Every NaN in the one pattern that is written.
AGOQ_HD Values one_nan(const Values& a) {
  if (__builtin_expect(!has_nan(a.v), 1)) return a;
  Values out;
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) out.v[i] = choose(unequal_to_itself(a.v[i]), splat(bits_float(kFloatNan)), a.v[i]);
  return out;
}

// The largest magnitude, found on bits (they order like magnitudes, NaN above Inf), and with Range the extremes.
template <bool Range>
struct ExtremesSoFar {
  Ints magnitude = splat_int(0);
  Floats low = splat(kFloatMax), high = splat(-kFloatMax);

  AGOQ_HD void include(const Values& x) {
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) {
      magnitude = max_of(magnitude, both(bits_of(x.v[i]), splat_int(0x7FFFFFFF)));
      if constexpr (Range) low = min_of(low, x.v[i]), high = max_of(high, x.v[i]); // of no use beside a NaN
    }
  }
  AGOQ_HD Extremes result() const {
    const float amax = bits_float(static_cast<uint32_t>(largest(magnitude)));
    if constexpr (Range) return {amax, smallest(low), largest(high)};
    return {amax, 0.0f, 0.0f};
  }
};

// The largest of eight unsigned words.
AGOQ_HD uint16_t largest_word(__m128i m) {
  // There is a minimum across lanes only: of the complements.
  return static_cast<uint16_t>(~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(m, _mm_set1_epi16(-1))), 0));
}

// The extremes of whole blocks of bfloat16, as ExtremesSoFar finds them, on patterns as 16-bit integers.
template <bool Range>
AGOQ_HD Extremes bfloat_extremes(const char* elements, int blocks) {
  if constexpr (!Range) {
    Words m[kWordVecs] = {};
    for (int b = 0; b < blocks; ++b, elements += 2 * kBlock)
#pragma GCC unroll 2
      for (int i = 0; i < kWordVecs; ++i)
        m[i] = larger_words(m[i], without_signs(load_words(elements + i * sizeof(Words))));
    return {bfloat_to_float(largest_word(largest_eight(larger_words(m[0], m[kWordVecs - 1])))), 0.0f, 0.0f};
  } else {
    Words low = splat_word(INT16_MAX), high = splat_word(INT16_MIN);
    for (int i = 0; i < blocks * kWordVecs; ++i) {
      const Words keys = ordered_keys(load_words(elements + i * sizeof(Words)));
      low = smaller_words(low, keys), high = larger_words(high, keys);
    }
    // Keys with the sign bit flipped order as unsigned words.
    const __m128i sign = _mm_set1_epi16(INT16_MIN);
    const int least = _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(smallest_eight(low), sign)), 0) ^ 0x8000;
    const int most = largest_word(_mm_xor_si128(largest_eight(high), sign)) ^ 0x8000;
    return range_of_keys(static_cast<int16_t>(least), static_cast<int16_t>(most));
  }
}

// --- codes ---------------------------------------------------------------------------------------------------

AGOQ_HD Codes same_codes(uint8_t code) { return {_mm256_set1_epi8(static_cast<char>(code))}; }
AGOQ_HD Codes load_codes(const uint8_t* codes) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes))}; }
// The first `count` codes, then `rest`.
AGOQ_HD Codes first_codes(Codes codes, int count, uint8_t rest) {
  const __m256i lane = _mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                        22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
  const __m256i keep = _mm256_cmpgt_epi8(_mm256_set1_epi8(static_cast<char>(count)), lane);
  return {_mm256_blendv_epi8(same_codes(rest).bytes, codes.bytes, keep)};
}

// Bit B of each code in its plane, a bit a code.
template <int B>
AGOQ_HD void store_bit_plane(Codes codes, uint8_t* plane) {
  const uint32_t word = bits_of_bytes<B>(codes.bytes);
  std::memcpy(plane, &word, 4);
}
template <int B>
AGOQ_HD __m256i load_bit_plane(const uint8_t* plane) {
  uint32_t word;
  std::memcpy(&word, plane, 4);
  return bytes_of_bits<B>(word);
}

AGOQ_HD Nibbles low_nibbles(Codes codes) {
  // Each pair of bytes (a, b) as the word a + 16 b.
  const __m256i pairs = _mm256_maddubs_epi16(codes.bytes, _mm256_set1_epi16(0x1001));
  return {_mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1))};
}
AGOQ_HD Codes codes_of(Nibbles nibbles) {
  const __m256i words = _mm256_cvtepu8_epi16(nibbles.bytes);
  return {_mm256_and_si256(_mm256_or_si256(words, _mm256_slli_epi16(words, 4)), _mm256_set1_epi8(15))};
}
AGOQ_HD Codes first_codes(Nibbles nibbles, int count, uint8_t rest) {
  return first_codes(codes_of(nibbles), count, rest);
}

// 32 stored patterns into the row's planes.
template <int Bits>
AGOQ_HD void pack(Codes codes, uint8_t* row, int64_t block, int64_t padded) {
  const BlockOffsets at = block_offsets<Bits>(block, padded);
  if constexpr (Bits == 8) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + at.low), codes.bytes);
    return;
  }
  const Codes low = Bits == 4 ? codes : Codes{_mm256_and_si256(codes.bytes, _mm256_set1_epi8(15))};
  _mm_storeu_si128(reinterpret_cast<__m128i*>(row + at.low), low_nibbles(low).bytes);
  if constexpr (Bits >= 5) store_bit_plane<4>(codes, row + at.bit4);
  if constexpr (Bits >= 6) store_bit_plane<5>(codes, row + at.bit5);
}
template <int Bits>
AGOQ_HD void pack(Nibbles nibbles, uint8_t* row, int64_t block, int64_t padded) {
  static_assert(Bits == 4);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(row + block_offsets<Bits>(block, padded).low), nibbles.bytes);
}

// Codes, of four bits Nibbles.
template <int Bits>
AGOQ_HD auto unpack(const uint8_t* row, int64_t block, int64_t padded) {
  const BlockOffsets at = block_offsets<Bits>(block, padded);
  if constexpr (Bits == 8) {
    return load_codes(row + at.low);
  } else {
    const Nibbles low = {_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + at.low))};
    if constexpr (Bits == 4) {
      return low;
    } else {
      __m256i codes = _mm256_or_si256(codes_of(low).bytes, load_bit_plane<4>(row + at.bit4));
      if constexpr (Bits >= 6) codes = _mm256_or_si256(codes, load_bit_plane<5>(row + at.bit5));
      return Codes{codes};
    }
  }
}
