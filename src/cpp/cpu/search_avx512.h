// Searches among thresholds with the permutations of AVX-512, whose tables are whole registers (search.h).

// --- by quotients --------------------------------------------------------------------------------------------

// Of each cell from -16 to 15, by its low five bits: the number of thresholds below it, and the next one, times 16.
struct Cells {
  alignas(64) int32_t below[32];
  alignas(64) float threshold[32];
};
template <Thresholds (*Make)()>
constexpr Cells make_cells() {
  constexpr Thresholds T = Make();
  static_assert(T.suit_cells());
  Cells cells{};
  for (int cell = -16; cell < 16; ++cell) {
    int below = 0;
    for (float t : T.of) below += t * 16 < static_cast<float>(cell) - 0.5f ? 1 : 0;
    cells.below[cell & 31] = below;
    cells.threshold[cell & 31] = below < 15 ? T.of[below] * 16 : kFloatMax;
  }
  return cells;
}

// How many of Make()'s thresholds lie below t, given 16 t.
template <Thresholds (*Make)()>
AGOQ_HD __m256i count_below(const Values& t) {
  static constexpr Cells cells = make_cells<Make>();
  Ints below[kVecs];
#pragma GCC unroll 2
  for (int i = 0; i < kVecs; ++i) {
    const Ints cell = min_of(round_to_ints(t.v[i]), splat_int(15));
    const Floats threshold = _mm512_permutex2var_ps(load(cells.threshold), cell, load(cells.threshold + kLanes));
    below[i] = _mm512_permutex2var_epi32(load_ints(cells.below), cell, load_ints(cells.below + kLanes));
    const __mmask16 above = _mm512_cmp_ps_mask(t.v[i], threshold, _CMP_GT_OQ);
    below[i] = _mm512_mask_add_epi32(below[i], above, below[i], splat_int(1));
  }
  return pack_to_bytes(below);
}

// --- by patterns ---------------------------------------------------------------------------------------------

// By the code so far, the limit that decides on its next bit.
struct SearchPlan {
  alignas(64) int16_t limit[3][32] = {};
};
template <Format F>
constexpr SearchPlan make_search_plan() {
  SearchPlan plan{};
  for (int level = 0, step = codebook<F>().size / 4; step > 0; ++level, step /= 2)
    for (int code = 0; code < 16; ++code) plan.limit[level][code] = static_cast<int16_t>(code + step - 1);
  return plan;
}

template <Format F>
struct PatternSearch {
  static constexpr int kCodes = codebook<F>().size; // 16, or 8 magnitudes
  static constexpr bool kSigned = kCodes == 16;
  static constexpr int kLevels = kSigned ? 3 : 2;

  __m512i middle, table[kLevels];

  AGOQ_HD explicit PatternSearch(float scale) {
    static constexpr SearchPlan plan = make_search_plan<F>();
    Ints words[kVecs] = {};
    find_limits<F>(scale, words);
    // Below zero the keys of patterns are one less than the patterns' values.
    if constexpr (kSigned) words[0] = add(words[0], all_of_sign(shift_left<16>(words[0])));
    const __m512i limits = _mm512_castsi256_si512(narrow_to_words<0>(words));
    middle = _mm512_maskz_permutexvar_epi16(kAllWords, _mm512_set1_epi16(kCodes / 2 - 1), limits);
#pragma GCC unroll 3
    for (int level = 0; level < kLevels; ++level)
      table[level] = _mm512_maskz_permutexvar_epi16(kAllWords, load_words(plan.limit[level]), limits);
  }

  // Of a block.
  AGOQ_HD Nibbles operator()(const char* elements) const {
    const __m512i x = load_words(elements), no_sign = _mm512_set1_epi16(0x7FFF);
    const __m512i p = kSigned ? ordered_keys(x) : _mm512_and_si512(x, no_sign);
    int16_t step = kCodes / 2;
    __m512i code = _mm512_maskz_mov_epi16(_mm512_cmpgt_epi16_mask(p, middle), _mm512_set1_epi16(step));
#pragma GCC unroll 3
    for (int level = 0; level < kLevels; ++level) {
      step /= 2;
      const __m512i limit = _mm512_maskz_permutexvar_epi16(kAllWords, code, table[level]);
      code = _mm512_mask_add_epi16(code, _mm512_cmpgt_epi16_mask(p, limit), code, _mm512_set1_epi16(step));
    }
    if constexpr (!kSigned) {
      __mmask32 negative = _mm512_movepi16_mask(x);
      if constexpr (F == Format::fp4_e3m0) negative &= _mm512_test_epi16_mask(code, code); // no minus zero
      code = _mm512_mask_add_epi16(code, negative, code, _mm512_set1_epi16(8));
    }
    return {join_nibbles(code)};
  }
};
