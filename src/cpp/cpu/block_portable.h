// Blocks of 32 elements as arrays and loops: the plain twin of block_simd.h, encode_simd.h and decode_simd.h.
//
// For machines without AVX2. The loops have constant trip counts and no branches, so compilers vectorize most of them.

struct Values {
  alignas(64) float v[kBlock];
};
struct Codes {
  alignas(64) uint8_t code[kBlock];
};

// --- elements ------------------------------------------------------------------------------------------------

AGOQ_HD Values same_values(float x) {
  Values out;
  for (int i = 0; i < kBlock; ++i) out.v[i] = x;
  return out;
}

template <DType D>
AGOQ_HD Values load_values(const void* block) {
  Values out;
  if constexpr (D == DType::float32) {
    std::memcpy(out.v, block, sizeof out.v);
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(block);
    for (int i = 0; i < kBlock; ++i) out.v[i] = D == DType::float16 ? half_to_float(p[i]) : bfloat_to_float(p[i]);
  }
  return out;
}

// A block of elements as they lie in memory.
template <DType D>
struct Elements {
  alignas(64) uint16_t words[kBlock];
};
template <>
struct Elements<DType::float32> {
  alignas(64) float words[kBlock];
};

// Values are within the range of D, or Inf or the canonical NaN.
template <DType D>
AGOQ_HD Elements<D> to_elements(const Values& x) {
  Elements<D> out;
  for (int i = 0; i < kBlock; ++i) {
    if constexpr (D == DType::float32)
      out.words[i] = x.v[i];
    else
      out.words[i] = D == DType::float16 ? float_to_half(x.v[i]) : float_to_bfloat(x.v[i]);
  }
  return out;
}
template <DType D>
AGOQ_HD void store_elements(const Elements<D>& x, void* block) {
  std::memcpy(block, x.words, sizeof x.words);
}
template <DType D>
AGOQ_HD void stream_elements(const Elements<D>& x, void* block) {
  store_elements(x, block);
}
AGOQ_HD void finish_streams() {}

AGOQ_HD void store_floats(const Values& x, float* block) { std::memcpy(block, x.v, sizeof x.v); }

// --- arithmetic ----------------------------------------------------------------------------------------------

AGOQ_HD Values sum(const Values& a, const Values& b) {
  Values out;
  for (int i = 0; i < kBlock; ++i) out.v[i] = add_rn(a.v[i], b.v[i]);
  return out;
}
AGOQ_HD Values product(const Values& a, float factor) {
  Values out;
  for (int i = 0; i < kBlock; ++i) out.v[i] = mul_rn(a.v[i], factor);
  return out;
}
// Every NaN in the one pattern that is written.
AGOQ_HD Values one_nan(const Values& a) {
  Values out;
  for (int i = 0; i < kBlock; ++i) out.v[i] = a.v[i] != a.v[i] ? bits_float(kFloatNan) : a.v[i];
  return out;
}

// Extremes are found on integers, which compilers vectorize: magnitudes order like their bits, and signed values like
// their bits with the lower 31 flipped below zero.
template <bool Range>
struct ExtremesSoFar {
  int32_t magnitude = 0, low = INT32_MAX, high = INT32_MIN;

  AGOQ_HD static int32_t flipped(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }
  AGOQ_HD static float value(int32_t key) { return bits_float(static_cast<uint32_t>(flipped(key))); }

  AGOQ_HD void include(const Values& x) {
    for (int i = 0; i < kBlock; ++i) {
      const int32_t bits = static_cast<int32_t>(float_bits(x.v[i])), key = flipped(bits);
      magnitude = (bits & 0x7FFFFFFF) > magnitude ? bits & 0x7FFFFFFF : magnitude;
      if constexpr (Range) low = key < low ? key : low, high = key > high ? key : high;
    }
  }
  AGOQ_HD Extremes result() const {
    const float amax = bits_float(static_cast<uint32_t>(magnitude));
    if constexpr (Range) return {amax, value(low), value(high)};
    return {amax, 0.0f, 0.0f};
  }
};

// The extremes of whole blocks of bfloat16, as ExtremesSoFar finds them, on patterns as 16-bit integers.
template <bool Range>
AGOQ_HD Extremes bfloat_extremes(const char* elements, int blocks) {
  const int16_t* p = reinterpret_cast<const int16_t*>(elements);
  if constexpr (!Range) {
    int16_t magnitude = 0;
    for (int i = 0; i < blocks * kBlock; ++i) {
      const int16_t m = p[i] & 0x7FFF;
      magnitude = m > magnitude ? m : magnitude;
    }
    return {bfloat_to_float(static_cast<uint16_t>(magnitude)), 0.0f, 0.0f};
  } else {
    int16_t low = INT16_MAX, high = INT16_MIN;
    for (int i = 0; i < blocks * kBlock; ++i) {
      const int16_t key = static_cast<int16_t>(p[i] ^ ((p[i] >> 15) & 0x7FFF));
      low = key < low ? key : low, high = key > high ? key : high;
    }
    return range_of_keys(low, high);
  }
}

// --- codes ---------------------------------------------------------------------------------------------------

AGOQ_HD Codes same_codes(uint8_t code) {
  Codes out;
  std::memset(out.code, code, kBlock);
  return out;
}
AGOQ_HD Codes load_codes(const uint8_t* codes) {
  Codes out;
  std::memcpy(out.code, codes, kBlock);
  return out;
}
// The first `count` codes, then `rest`.
AGOQ_HD Codes first_codes(const Codes& all, int count, uint8_t rest) {
  Codes codes = all;
  for (int i = count; i < kBlock; ++i) codes.code[i] = rest;
  return codes;
}

template <int B>
AGOQ_HD void store_bit_plane(const Codes& codes, uint8_t* plane) {
  for (int i = 0; i < 4; ++i) {
    uint32_t byte = 0;
    for (int j = 0; j < 8; ++j) byte |= static_cast<uint32_t>((codes.code[8 * i + j] >> B) & 1) << j;
    plane[i] = static_cast<uint8_t>(byte);
  }
}
template <int B>
AGOQ_HD void load_bit_plane(const uint8_t* plane, Codes& codes) {
  for (int i = 0; i < kBlock; ++i) codes.code[i] |= static_cast<uint8_t>(((plane[i / 8] >> (i % 8)) & 1) << B);
}

// 32 stored patterns into the row's planes.
template <int Bits>
AGOQ_HD void pack(const Codes& codes, uint8_t* row, int64_t block, int64_t padded) {
  const BlockOffsets at = block_offsets<Bits>(block, padded);
  if constexpr (Bits == 8) {
    std::memcpy(row + at.low, codes.code, kBlock);
    return;
  }
  for (int i = 0; i < kBlock / 2; ++i)
    row[at.low + i] = static_cast<uint8_t>((codes.code[2 * i] & 15) | (codes.code[2 * i + 1] << 4));
  if constexpr (Bits >= 5) store_bit_plane<4>(codes, row + at.bit4);
  if constexpr (Bits >= 6) store_bit_plane<5>(codes, row + at.bit5);
}

template <int Bits>
AGOQ_HD Codes unpack(const uint8_t* row, int64_t block, int64_t padded) {
  const BlockOffsets at = block_offsets<Bits>(block, padded);
  if constexpr (Bits == 8) return load_codes(row + at.low);
  Codes codes;
  for (int i = 0; i < kBlock / 2; ++i) {
    codes.code[2 * i] = row[at.low + i] & 15;
    codes.code[2 * i + 1] = row[at.low + i] >> 4;
  }
  if constexpr (Bits >= 5) load_bit_plane<4>(row + at.bit4, codes);
  if constexpr (Bits >= 6) load_bit_plane<5>(row + at.bit5, codes);
  return codes;
}

// --- codecs: not inlined, since there are many callers and the code is large
// --------------------------------------------------------------------------------------------------

template <Format F>
__attribute__((noinline)) Values exact_quotients(const Values& x, const Divisor& d) {
  Values t;
  for (int i = 0; i < kBlock; ++i) t.v[i] = div_rn(FormatTraits<F>::has_min ? sub_rn(x.v[i], d.min) : x.v[i], d.scale);
  return t;
}

template <Format F>
struct Quotients {
  Divisor divisor;

  explicit Quotients(const Divisor& d) : divisor(d) {}
};

template <DType D>
AGOQ_HD Values load_to_encode(const char* block) {
  return load_values<D>(block);
}

template <Format F, DType>
__attribute__((noinline)) Codes encode_nearest_block(const Values& x, const Quotients<F>& quotients) {
  const Values t = exact_quotients<F>(x, quotients.divisor);
  alignas(64) uint32_t wide[kBlock];
  for (int i = 0; i < kBlock; ++i) wide[i] = encode_nearest<F>(t.v[i]);
  Codes codes;
  for (int i = 0; i < kBlock; ++i) codes.code[i] = static_cast<uint8_t>(wide[i]);
  return codes;
}

// There are no short cuts for BF16 here.
template <Format F>
inline constexpr bool kSearchesPatterns = false;
template <Format F>
struct PatternSearch;
template <Format F>
inline constexpr bool kCoarseQuotientsDo = false;
template <Format F>
struct CoarseQuotients;

template <Format F>
struct GroupDecoder {
  float scale, min, limit;

  AGOQ_HD GroupDecoder(float group_scale, float group_min, float largest)
      : scale(group_scale), min(group_min), limit(largest) {}
  __attribute__((noinline)) Values operator()(const Codes& codes) const {
    Values x;
    for (int i = 0; i < kBlock; ++i) x.v[i] = decode_scaled<F>(codes.code[i], scale, min, limit);
    return x;
  }
};

// To the elements of a tensor.
template <Format F, DType D>
struct ElementDecoder {
  GroupDecoder<F> decoded;

  AGOQ_HD ElementDecoder(float scale, float min) : decoded(scale, min, max_finite(D)) {}
  AGOQ_HD Elements<D> operator()(const Codes& codes) const { return to_elements<D>(decoded(codes)); }
};
