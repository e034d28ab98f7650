// Searches among the thresholds of a code book: what search_avx2.h and search_avx512.h share.

// --- by quotients --------------------------------------------------------------------------------------------

// nf4's: fifteen ascending thresholds in (-1, 1). The integer nearest to 16 t, one of 33 cells, leaves one in question.
struct Thresholds {
  float of[15];

  // Whether each cell holds one at most. Cell 16 is looked up as 15: both must lie above all.
  constexpr bool suit_cells() const {
    for (int cell = -16; cell <= 16; ++cell) {
      int inside = 0;
      for (float t : of) {
        const float distance = t * 16 - static_cast<float>(cell);
        inside += distance >= -0.5f && distance <= 0.5f ? 1 : 0;
      }
      if (inside > (cell < 15 ? 1 : 0)) return false;
    }
    return true;
  }
};
constexpr Thresholds nf4_nearest_thresholds() {
  constexpr auto book = codebook<Format::nf4>();
  Thresholds t{};
  for (int i = 0; i < 15; ++i) t.of[i] = book.threshold[i];
  return t;
}

// --- by patterns ---------------------------------------------------------------------------------------------

// Nearest 4-bit codes of bfloat16 elements under a bfloat16 scale: a search among bit patterns, without a division.
//
// A code is the number of the code book's thresholds t below x / scale. Once a group, each t becomes a limit, the
// largest bfloat16 not above t * scale: x / scale > t is then x > limit, a comparison of patterns as 16-bit integers,
// 16 or 32 to a register. Limits are searched in halves; those in question are looked up by the code so far.
//
// Codes are those of the IEEE quotient. Both significands have 8 bits, so a quotient either is a boundary between two
// codes or differs from it by a relative 2^-12 at least (nf4, whose boundaries have 24 bits: never equal, 2^-19.7),
// far above the 2^-23 by which rounding moves the quotient or t * scale. (A tie that goes up: t is the float below the
// boundary, and t * scale is rounded to one below boundary * scale.) test_codecs_isa.py compares all significands.
template <Format F>
inline constexpr bool kSearchesPatterns = F == Format::nf4 || F == Format::fp4_e2m1 || F == Format::fp4_e3m0;

// A code book's thresholds, for vectors.
struct ThresholdVector {
  alignas(64) float of[16] = {};
};
template <Format F>
constexpr ThresholdVector make_threshold_vector() {
  constexpr auto book = codebook<F>();
  ThresholdVector v{};
  for (int i = 0; i + 1 < book.size; ++i) v.of[i] = book.threshold[i];
  return v;
}

// The limits of a group by its scale, as 16-bit integers in the low halves of lanes.
template <Format F>
AGOQ_HD void find_limits(float scale, Ints (&words)[kVecs]) {
  static constexpr ThresholdVector thresholds = make_threshold_vector<F>();
#pragma GCC unroll 2
  for (int i = 0; i < 16 / kLanes; ++i) {
    const Floats t = mul(load(thresholds.of + i * kLanes), splat(scale));
    const Ints magnitude = both(bits_of(t), splat_int(0x7FFFFFFF));
    const Ints negative = greater(splat(0.0f), t);
    words[i] = shift_right<16>(sub(exclusive_or(magnitude, negative), negative)); // the floor, of negative ones too
  }
}
