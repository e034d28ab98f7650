// Blocks of 32 elements: packing and unpacking of stored patterns, and loads and stores of tensor elements.
//
// Included by kernels_impl.h only, inside a namespace of the instruction set being compiled. The loops have constant
// trip counts and no branches, so the compiler vectorizes them; intrinsics stand only where it cannot.

// --- packing -------------------------------------------------------------------------------------------------

// Bit B of each of 32 bytes as a little-endian word.
template <int B>
inline uint32_t gather_bit(const uint8_t* codes) {
#if defined(__AVX2__)
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 7 - B)));
#else
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    uint64_t bytes;
    std::memcpy(&bytes, codes + 8 * i, 8);
    // The multiplication moves bit 0 of byte k to bit 56 + k.
    const uint64_t bits = (((bytes >> B) & 0x0101010101010101u) * 0x0102040810204080u) >> 56;
    word |= static_cast<uint32_t>(bits) << (8 * i);
  }
  return word;
#endif
}

// 32 stored patterns, one a byte, into the row's planes.
template <int Bits>
inline void pack_block(const uint8_t* codes, uint8_t* row, int64_t block, int64_t padded) {
  const BlockOffsets at = block_offsets<Bits>(block, padded);
  if constexpr (Bits == 8) {
    std::memcpy(row + at.low, codes, 32);
    return;
  }
  uint8_t nibbles[16];
  for (int i = 0; i < 16; ++i) {
    uint16_t pair;
    std::memcpy(&pair, codes + 2 * i, 2);
    nibbles[i] = static_cast<uint8_t>((pair & 0x0Fu) | ((pair >> 4) & 0xF0u));
  }
  std::memcpy(row + at.low, nibbles, 16);
  if constexpr (Bits >= 5) {
    const uint32_t word = gather_bit<4>(codes);
    std::memcpy(row + at.bit4, &word, 4);
  }
  if constexpr (Bits >= 6) {
    const uint32_t word = gather_bit<5>(codes);
    std::memcpy(row + at.bit5, &word, 4);
  }
}

template <int Bits>
inline void unpack_block(const uint8_t* row, int64_t block, int64_t padded, uint8_t* codes) {
  const BlockOffsets at = block_offsets<Bits>(block, padded);
  if constexpr (Bits == 8) {
    std::memcpy(codes, row + at.low, 32);
    return;
  }
  for (int i = 0; i < 16; ++i) {
    const uint16_t byte = row[at.low + i];
    const uint16_t pair = static_cast<uint16_t>((byte | (byte << 4)) & 0x0F0Fu);
    std::memcpy(codes + 2 * i, &pair, 2);
  }
  if constexpr (Bits >= 5) {
    uint32_t word;
    std::memcpy(&word, row + at.bit4, 4);
    for (int i = 0; i < 32; ++i) codes[i] |= static_cast<uint8_t>(((word >> i) & 1u) << 4);
  }
  if constexpr (Bits >= 6) {
    uint32_t word;
    std::memcpy(&word, row + at.bit5, 4);
    for (int i = 0; i < 32; ++i) codes[i] |= static_cast<uint8_t>(((word >> i) & 1u) << 5);
  }
}

// FP32 values of 32 stored patterns.
template <Format F>
inline void decode_block(const uint8_t* codes, float* values) {
#if defined(__AVX512F__)
  if constexpr (F == Format::nf4) {
    static constexpr auto nf4 = codebook<F>();
    const __m512 book = _mm512_loadu_ps(nf4.value);
    for (int i = 0; i < 32; i += 16) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
      const __m512i index = _mm512_maskz_cvtepu8_epi32(0xFFFF, bytes); // masked forms: gcc 12 warns on the others
      _mm512_storeu_ps(values + i, _mm512_maskz_permutexvar_ps(0xFFFF, index, book));
    }
    return;
  }
#elif defined(__AVX2__)
  if constexpr (F == Format::nf4) {
    static constexpr auto nf4 = codebook<F>();
    const __m256 low = _mm256_loadu_ps(nf4.value), high = _mm256_loadu_ps(nf4.value + 8);
    for (int i = 0; i < 32; i += 8) {
      const __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
      const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)); // bit 3 chooses the half
      _mm256_storeu_ps(values + i, _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index),
                                                    _mm256_permutevar8x32_ps(high, index), is_high));
    }
    return;
  }
#endif
  for (int i = 0; i < 32; ++i) values[i] = decode<F>(codes[i]);
}

// --- tensor elements -----------------------------------------------------------------------------------------

template <DType D>
inline void load_elements(const void* source, int64_t offset, int count, float* out) {
  if constexpr (D == DType::float32) {
    std::memcpy(out, static_cast<const float*>(source) + offset, sizeof(float) * count);
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(source) + offset;
    int i = 0;
#if defined(__F16C__)
    if constexpr (D == DType::float16)
      for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i))));
#endif
    for (; i < count; ++i) out[i] = D == DType::float16 ? half_to_float(p[i]) : bfloat_to_float(p[i]);
  }
}

// Values are within the range of D, or Inf or the canonical NaN.
template <DType D>
inline void store_elements(const float* values, int count, void* target, int64_t offset) {
  if constexpr (D == DType::float32) {
    std::memcpy(static_cast<float*>(target) + offset, values, sizeof(float) * count);
  } else {
    uint16_t* p = static_cast<uint16_t*>(target) + offset;
    int i = 0;
#if defined(__F16C__)
    if constexpr (D == DType::float16)
      for (; i + 8 <= count; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < count; ++i) p[i] = D == DType::float16 ? float_to_half(values[i]) : float_to_bfloat(values[i]);
  }
}
