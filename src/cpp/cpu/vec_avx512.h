// Vectors of sixteen FP32 or 32-bit integer lanes, for AVX-512 F, BW, VL and DQ.
//
// The names of vec_avx2.h, which says what each does. Some intrinsics stand in their masked form with all lanes on: the
// plain ones make gcc 12 warn of an uninitialized register.

using Floats = __m512;
using Ints = __m512i;
inline constexpr int kLanes = 16;
inline constexpr int kVecs = kBlock / kLanes;
inline constexpr __mmask16 kAllLanes = 0xFFFF;
inline constexpr __mmask32 kAllWords = 0xFFFFFFFF;

// --- memory --------------------------------------------------------------------------------------------------

AGOQ_HD Floats load(const float* p) { return _mm512_loadu_ps(p); }
AGOQ_HD void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
AGOQ_HD void stream(float* p, Floats v) { _mm512_stream_ps(p, v); }

AGOQ_HD Floats load_bfloats(const uint16_t* p) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAllLanes, _mm512_maskz_cvtepu16_epi32(kAllLanes, words), 16));
}
AGOQ_HD Floats load_halves(const uint16_t* p) {
  return _mm512_maskz_cvtph_ps(kAllLanes, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// --- arithmetic: each rounds once, to nearest even -----------------------------------------------------------

AGOQ_HD Floats splat(float x) { return _mm512_set1_ps(x); }
AGOQ_HD Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
AGOQ_HD Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
AGOQ_HD Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
AGOQ_HD Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
AGOQ_HD Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
AGOQ_HD Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
AGOQ_HD Floats min_of(Floats a, Floats b) { return _mm512_maskz_min_ps(kAllLanes, a, b); }
AGOQ_HD Floats max_of(Floats a, Floats b) { return _mm512_maskz_max_ps(kAllLanes, a, b); }
AGOQ_HD Ints round_to_ints(Floats a) { return _mm512_maskz_cvtps_epi32(kAllLanes, a); }
AGOQ_HD Floats to_floats(Ints a) { return _mm512_maskz_cvtepi32_ps(kAllLanes, a); }

AGOQ_HD Ints splat_int(int32_t x) { return _mm512_set1_epi32(x); }
AGOQ_HD Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
AGOQ_HD Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
AGOQ_HD Ints max_of(Ints a, Ints b) { return _mm512_maskz_max_epi32(kAllLanes, a, b); }
AGOQ_HD Ints min_of(Ints a, Ints b) { return _mm512_maskz_min_epi32(kAllLanes, a, b); }
AGOQ_HD Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
template <int N>
AGOQ_HD Ints shift_left(Ints a) {
  return _mm512_maskz_slli_epi32(kAllLanes, a, N);
}
template <int N>
AGOQ_HD Ints shift_right(Ints a) {
  return _mm512_maskz_srli_epi32(kAllLanes, a, N);
}

AGOQ_HD Ints all_of_sign(Ints a) { return _mm512_maskz_srai_epi32(kAllLanes, a, 31); }

AGOQ_HD Ints load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }
AGOQ_HD Ints bits_of(Floats a) { return _mm512_castps_si512(a); }
AGOQ_HD Floats floats_of(Ints a) { return _mm512_castsi512_ps(a); }

AGOQ_HD Ints exclusive_or(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
AGOQ_HD void multiply_wide(Ints a, uint32_t b, Ints& low, Ints& high) {
  const __m512i m = _mm512_set1_epi32(static_cast<int32_t>(b));
  const __m512i even = _mm512_maskz_mul_epu32(0xFF, a, m);
  const __m512i odd = _mm512_maskz_mul_epu32(0xFF, _mm512_maskz_srli_epi64(0xFF, a, 32), m);
  low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_maskz_slli_epi64(0xFF, odd, 32));
  high = _mm512_mask_blend_epi32(0xAAAA, _mm512_maskz_srli_epi64(0xFF, even, 32), odd);
}

// --- choice --------------------------------------------------------------------------------------------------

AGOQ_HD Ints greater(Floats a, Floats b) { return _mm512_movm_epi32(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ)); }
AGOQ_HD Ints unequal_to_itself(Floats a) { return _mm512_movm_epi32(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q)); }
AGOQ_HD bool has_nan(const Floats (&v)[kVecs]) { return _mm512_cmp_ps_mask(v[0], v[1], _CMP_UNORD_Q) != 0; }
AGOQ_HD Floats choose(Ints condition, Floats yes, Floats no) {
  return _mm512_mask_blend_ps(_mm512_movepi32_mask(condition), no, yes);
}

// --- 16-bit lanes --------------------------------------------------------------------------------------------

using Words = __m512i;
inline constexpr int kWordVecs = 1;
AGOQ_HD Words load_words(const void* p) { return _mm512_loadu_si512(p); }
AGOQ_HD Words splat_word(int16_t x) { return _mm512_set1_epi16(x); }
AGOQ_HD Words smaller_words(Words a, Words b) { return _mm512_maskz_min_epi16(kAllWords, a, b); }
AGOQ_HD Words larger_words(Words a, Words b) { return _mm512_maskz_max_epi16(kAllWords, a, b); }
AGOQ_HD Words without_signs(Words a) { return _mm512_and_si512(a, splat_word(0x7FFF)); }
AGOQ_HD Words ordered_keys(Words a) {
  const __m512i negative = _mm512_maskz_srai_epi16(kAllWords, a, 15);
  return _mm512_ternarylogic_epi32(a, negative, splat_word(0x7FFF), 0x78); // a ^ (negative & 0x7FFF)
}

// --- across lanes --------------------------------------------------------------------------------------------

template <int Half>
AGOQ_HD __m256i half_of(__m512i a) {
  return _mm512_maskz_extracti64x4_epi64(0xF, a, Half);
}
template <int Half>
AGOQ_HD __m256 half_of(__m512 a) {
  return _mm256_castsi256_ps(half_of<Half>(_mm512_castps_si512(a)));
}

AGOQ_HD __m128i smallest_eight(Words a) {
  const __m256i m = _mm256_min_epi16(half_of<0>(a), half_of<1>(a));
  return _mm_min_epi16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
}
AGOQ_HD __m128i largest_eight(Words a) {
  const __m256i m = _mm256_max_epi16(half_of<0>(a), half_of<1>(a));
  return _mm_max_epi16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
}
AGOQ_HD int32_t largest(Ints a) {
  const __m256i m8 = _mm256_max_epi32(half_of<0>(a), half_of<1>(a));
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(m8), _mm256_extracti128_si256(m8, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1));
  return _mm_cvtsi128_si32(m);
}
AGOQ_HD float largest(Floats a) {
  const __m256 m8 = _mm256_max_ps(half_of<0>(a), half_of<1>(a));
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}
AGOQ_HD float smallest(Floats a) {
  const __m256 m8 = _mm256_min_ps(half_of<0>(a), half_of<1>(a));
  __m128 m = _mm_min_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
  m = _mm_min_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_min_ss(m, _mm_shuffle_ps(m, m, 1)));
}

inline constexpr int kQuadruple[kLanes] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
AGOQ_HD void transpose_quadruples(Ints (&w)[4]) {
  const __m512i a = _mm512_maskz_unpacklo_epi32(kAllLanes, w[0], w[1]);
  const __m512i b = _mm512_maskz_unpackhi_epi32(kAllLanes, w[0], w[1]);
  const __m512i c = _mm512_maskz_unpacklo_epi32(kAllLanes, w[2], w[3]);
  const __m512i d = _mm512_maskz_unpackhi_epi32(kAllLanes, w[2], w[3]);
  w[0] = _mm512_maskz_unpacklo_epi64(0xFF, a, c);
  w[1] = _mm512_maskz_unpackhi_epi64(0xFF, a, c);
  w[2] = _mm512_maskz_unpacklo_epi64(0xFF, b, d);
  w[3] = _mm512_maskz_unpackhi_epi64(0xFF, b, d);
}

// --- between 32-bit lanes and a block's bytes or 16-bit elements ---------------------------------------------

AGOQ_HD __m256i join(__m128i low, __m128i high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
AGOQ_HD __m256i in_order(__m256i packed) { return packed; }
AGOQ_HD __m256i pairs_in_order(__m256i packed) {
  const __m128i even = _mm256_castsi256_si128(packed), odd = _mm256_extracti128_si256(packed, 1);
  return join(_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd));
}
AGOQ_HD void load_pairs(const void* block, Ints (&v)[kVecs / 2]) { v[0] = _mm512_loadu_si512(block); }
AGOQ_HD __m256i out_of_order(__m256i bytes) { return bytes; }
AGOQ_HD __m256i pack_to_bytes(const Ints (&v)[kVecs]) {
  return join(_mm512_maskz_cvtsepi32_epi8(kAllLanes, v[0]), _mm512_maskz_cvtsepi32_epi8(kAllLanes, v[1]));
}
AGOQ_HD __m256i pack_pairs_to_bytes(const Ints (&v)[kVecs]) {
  return _mm512_maskz_cvtepi16_epi8(kAllWords, _mm512_mask_blend_epi16(0xAAAAAAAA, v[0], shift_left<16>(v[1])));
}
// The codes 0-15 of even and odd elements, two a byte; the same of a block in 16-bit lanes.
AGOQ_HD __m128i join_nibbles(Ints even, Ints odd) {
  return _mm512_maskz_cvtepi32_epi8(kAllLanes, _mm512_or_si512(even, shift_left<4>(odd)));
}
AGOQ_HD __m128i join_nibbles(Words codes) {
  return _mm512_maskz_cvtepi32_epi8(kAllLanes, _mm512_or_si512(codes, shift_right<12>(codes)));
}
template <int B>
AGOQ_HD uint32_t bits_of_bytes(__m256i bytes) {
  return _mm256_test_epi8_mask(bytes, _mm256_set1_epi8(1 << B));
}
template <int B>
AGOQ_HD __m256i bytes_of_bits(uint32_t word) {
  return _mm256_maskz_mov_epi8(word, _mm256_set1_epi8(1 << B));
}
AGOQ_HD void widen_bytes(__m256i bytes, Ints (&v)[kVecs]) {
  v[0] = _mm512_maskz_cvtepi8_epi32(kAllLanes, _mm256_castsi256_si128(bytes));
  v[1] = _mm512_maskz_cvtepi8_epi32(kAllLanes, _mm256_extracti128_si256(bytes, 1));
}
AGOQ_HD void widen_halves(__m256i low, __m256i high, Floats (&v)[kVecs]) {
  v[0] = _mm512_maskz_cvtph_ps(kAllLanes, low);
  v[1] = _mm512_maskz_cvtph_ps(kAllLanes, high);
}
template <int Half>
AGOQ_HD __m256i narrow_to_words(const Ints (&v)[kVecs]) {
  return _mm512_maskz_cvtepi32_epi16(kAllLanes, v[Half]);
}
template <int Half>
AGOQ_HD __m256i narrow_to_halves(const Floats (&v)[kVecs]) {
  return _mm512_maskz_cvtps_ph(kAllLanes, v[Half], _MM_FROUND_TO_NEAREST_INT);
}

// --- tables of sixteen floats, indexed by codes --------------------------------------------------------------

struct Table16 {
  Floats entries;
};
inline constexpr int kTableOrder[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
inline constexpr int kTableVecs = 16 / kLanes;

AGOQ_HD Table16 make_table(const Floats (&entries)[kTableVecs]) { return {entries[0]}; }
AGOQ_HD void lookup16(const Table16& table, __m256i codes, Floats (&v)[kVecs]) {
  const __m512i low = _mm512_maskz_cvtepu8_epi32(kAllLanes, _mm256_castsi256_si128(codes));
  const __m512i high = _mm512_maskz_cvtepu8_epi32(kAllLanes, _mm256_extracti128_si256(codes, 1));
  v[0] = _mm512_maskz_permutexvar_ps(kAllLanes, low, table.entries);
  v[1] = _mm512_maskz_permutexvar_ps(kAllLanes, high, table.entries);
}
// Entries of a block's codes, two a byte.
AGOQ_HD void lookup_nibbles(const Table16& table, __m128i nibbles, Floats (&v)[kVecs]) {
  const __m512i pairs = _mm512_maskz_cvtepu8_epi32(kAllLanes, nibbles);
  const __m512 even = _mm512_maskz_permutexvar_ps(kAllLanes, pairs, table.entries); // by the lower four bits
  const __m512 odd = _mm512_maskz_permutexvar_ps(kAllLanes, shift_right<4>(pairs), table.entries);
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  v[0] = _mm512_permutex2var_ps(even, first, odd);
  v[1] = _mm512_permutex2var_ps(even, _mm512_add_epi32(first, splat_int(8)), odd);
}
