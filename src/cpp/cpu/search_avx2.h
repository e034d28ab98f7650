// Searches among thresholds with the byte shuffles of AVX2 (search.h).

// --- by quotients --------------------------------------------------------------------------------------------

// Of each cell, by its low four bits: the number of thresholds below it, for cells from 0 and for cells below 0.
struct Cells {
  alignas(32) uint8_t below_from_0[32], below_under_0[32]; // each table twice, for both halves of a register
  alignas(64) float threshold[16];                         // times 16, in the order of Table16
};
template <Thresholds (*Make)()>
constexpr Cells make_cells() {
  constexpr Thresholds T = Make();
  static_assert(T.suit_cells());
  Cells cells{};
  for (int cell = -16; cell < 16; ++cell) {
    uint8_t below = 0;
    for (float t : T.of) below += t * 16 < static_cast<float>(cell) - 0.5f ? 1 : 0;
    uint8_t* table = cell < 0 ? cells.below_under_0 : cells.below_from_0;
    table[cell & 15] = table[(cell & 15) + 16] = below;
  }
  for (int i = 0; i < 16; ++i) cells.threshold[i] = kTableOrder[i] < 15 ? T.of[kTableOrder[i]] * 16 : kFloatMax;
  return cells;
}

// How many of Make()'s thresholds lie below t, given 16 t; out of order.
template <Thresholds (*Make)()>
AGOQ_HD __m256i count_below(const Values& t) {
  static constexpr Cells cells = make_cells<Make>();
  const auto table = [](const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); };
  Floats thresholds[kTableVecs];
#pragma GCC unroll 2
  for (int i = 0; i < kTableVecs; ++i) thresholds[i] = load(cells.threshold + i * kLanes);
  Ints wide[kVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) wide[i] = round_to_ints(t.v[i]);
  const __m256i cell = _mm256_min_epi8(pack_to_bytes(wide), _mm256_set1_epi8(15));
  // A byte shuffle gives 0 where the index is negative, so each table answers for its own cells.
  const __m256i from_0 = _mm256_shuffle_epi8(table(cells.below_from_0), cell);
  const __m256i under_0 =
      _mm256_shuffle_epi8(table(cells.below_under_0), _mm256_xor_si256(cell, _mm256_set1_epi8(-128)));
  const __m256i below = _mm256_or_si256(from_0, under_0);
  Floats threshold[kVecs];
  lookup16(make_table(thresholds), below, threshold);
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) wide[i] = greater(t.v[i], threshold[i]);
  return _mm256_sub_epi8(below, pack_to_bytes(wide));
}

// --- by patterns ---------------------------------------------------------------------------------------------

// Makes the tables of a search: their bytes in those of the limits 0-7 and of the limits 8-15.
struct SearchPlan {
  alignas(32) uint8_t bytes[3][32] = {};
};
template <Format F>
constexpr SearchPlan make_search_plan() {
  constexpr auto book = codebook<F>();
  SearchPlan plan{};
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
    find_limits<F>(scale, words);
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
