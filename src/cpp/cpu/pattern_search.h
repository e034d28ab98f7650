// Nearest 4-bit codes of bfloat16 elements under a bfloat16 scale: a search among bit patterns, without a division.
//
// A code is the number of the code book's thresholds t below x / scale. Once a group, each t becomes a limit, the
// largest bfloat16 not above t * scale: x / scale > t is then x > limit, a comparison of patterns as 16-bit integers,
// sixteen to a register. Limits are searched in halves; those in question come from tables by byte shuffles.
//
// Codes are those of the IEEE quotient. Both significands have 8 bits, so a quotient either is a boundary between two
// codes or differs from it by a relative 2^-12 at least (nf4, whose boundaries have 24 bits: never equal, 2^-19.7),
// far above the 2^-23 by which rounding moves the quotient or t * scale. (A tie that goes up: t is the float below the
// boundary, and t * scale is rounded to one below boundary * scale.) test_codecs_isa.py compares all significands.

template <Format F>
inline constexpr bool kSearchesPatterns = F == Format::nf4 || F == Format::fp4_e2m1 || F == Format::fp4_e3m0;

// Makes the limits of a group, and of them the tables.
struct SearchPlan {
  alignas(64) float threshold[16] = {}; // of quotients
  // The bytes of a table in those of the limits 0-7 and of the limits 8-15.
  alignas(32) uint8_t bytes[3][32] = {};
};
template <Format F>
constexpr SearchPlan make_search_plan() {
  constexpr auto book = codebook<F>();
  SearchPlan plan{};
  for (int i = 0; i + 1 < book.size; ++i) plan.threshold[i] = book.threshold[i];
  for (int level = 0, step = book.size / 4; step > 0; ++level, step /= 2) {
    for (uint8_t& byte : plan.bytes[level]) byte = 0x80; // gives zero
    for (int code = 0; code < book.size; code += 2 * step) {
      // The limit of `code` lies at the code's bytes; half a table of sixteen codes comes from each half of the limits.
      const int half = code / 8, at = code * 16 / book.size - 8 * half, limit = code + step - 1 - 8 * half;
      for (int k = 0; k < 2; ++k) plan.bytes[level][16 * half + at + k] = static_cast<uint8_t>(2 * limit + k);
    }
  }
  return plan;
}

template <Format F>
struct PatternSearch {
  static constexpr int kCodes = codebook<F>().size; // 16, or 8 magnitudes
  static constexpr bool kSigned = kCodes == 16;

  // The limit in the middle; then, by the code so far, those that decide on its next bits.
  __m256i middle, table[3];

  AGOQ_HD explicit PatternSearch(float scale) {
    static constexpr SearchPlan plan = make_search_plan<F>();
    Ints words[kVecs] = {};
#pragma GCC unroll 2
    for (int i = 0; i < 16 / kLanes; ++i) {
      const Floats t = mul(load(plan.threshold + i * kLanes), splat(scale));
      const Ints magnitude = both(bits_of(t), splat_int(0x7FFFFFFF));
      const Ints negative = greater(splat(0.0f), t);
      words[i] = shift_right<16>(sub(exclusive_or(magnitude, negative), negative)); // the floor, of negative ones too
    }
    const __m256i limits = narrow_to_words<0>(words);
    middle = _mm256_broadcastw_epi16(_mm_srli_si128(_mm256_castsi256_si128(limits), kCodes - 2));
#pragma GCC unroll 3
    for (int level = 0; level < (kSigned ? 3 : 2); ++level) {
      const __m256i bytes = _mm256_load_si256(reinterpret_cast<const __m256i*>(plan.bytes[level]));
      table[level] = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(limits, bytes), kSigned ? 0x88 : 0x44);
    }
  }

  // Of 16 elements, in 16-bit lanes.
  AGOQ_HD __m256i codes_of(__m256i x) const {
    // Bytes of a table's entry: those of code c are c * 16 / kCodes and the next.
    constexpr int unit = 0x0101 * 16 / kCodes;
    const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7FFF));
    const __m256i p = kSigned ? _mm256_sign_epi16(magnitude, x) : magnitude;
    const auto taken = [&](__m256i above, int step) {
      return _mm256_and_si256(above, _mm256_set1_epi16(static_cast<int16_t>(unit * step)));
    };
    int step = kCodes / 2;
    __m256i at = _mm256_add_epi16(taken(_mm256_cmpgt_epi16(p, middle), step), _mm256_set1_epi16(0x0100));
#pragma GCC unroll 3
    for (int level = 0; level < (kSigned ? 3 : 2); ++level) {
      step /= 2;
      const __m256i above = _mm256_cmpgt_epi16(p, _mm256_shuffle_epi8(table[level], at));
      at = _mm256_add_epi16(at, taken(above, step));
    }
    const __m256i code = _mm256_and_si256(kSigned ? at : _mm256_srli_epi16(at, 1), _mm256_set1_epi16(kCodes - 1));
    if constexpr (kSigned) return code;
    return _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi16(x, 12), _mm256_set1_epi16(8)));
  }

  // Of a block.
  AGOQ_HD Codes operator()(const char* elements) const {
    const __m256i* p = reinterpret_cast<const __m256i*>(elements);
    __m256i bytes = _mm256_permute4x64_epi64(
        _mm256_packs_epi16(codes_of(_mm256_loadu_si256(p)), codes_of(_mm256_loadu_si256(p + 1))), 0xD8);
    if constexpr (F == Format::fp4_e3m0) // no minus zero
      bytes = _mm256_andnot_si256(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(8)), bytes);
    return {bytes};
  }
};
