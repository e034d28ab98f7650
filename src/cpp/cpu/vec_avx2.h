// Vectors of eight FP32 or 32-bit integer lanes, for AVX2 with FMA and F16C.
//
// vec_avx512.h offers the same names with sixteen lanes; simd.h is written once over either. A block of 32 elements is
// kVecs vectors in element order. Comparisons give all ones or all zeros in each lane.

using Floats = __m256;
using Ints = __m256i;
inline constexpr int kLanes = 8;
inline constexpr int kVecs = kBlock / kLanes;

// --- memory --------------------------------------------------------------------------------------------------

AGOQ_HD Floats load(const float* p) { return _mm256_loadu_ps(p); }
AGOQ_HD void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
AGOQ_HD void stream(float* p, Floats v) { _mm256_stream_ps(p, v); } // p is aligned to a block's 64 bytes

AGOQ_HD Floats load_bfloats(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
AGOQ_HD Floats load_halves(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// --- arithmetic: each rounds once, to nearest even -----------------------------------------------------------

AGOQ_HD Floats splat(float x) { return _mm256_set1_ps(x); }
AGOQ_HD Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
AGOQ_HD Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
AGOQ_HD Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
AGOQ_HD Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
AGOQ_HD Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }   // a * b + c
AGOQ_HD Floats fnma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); } // c - a * b
AGOQ_HD Floats min_of(Floats a, Floats b) { return _mm256_min_ps(a, b); }
AGOQ_HD Floats max_of(Floats a, Floats b) { return _mm256_max_ps(a, b); }
AGOQ_HD Ints round_to_ints(Floats a) { return _mm256_cvtps_epi32(a); }
AGOQ_HD Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }

AGOQ_HD Ints splat_int(int32_t x) { return _mm256_set1_epi32(x); }
AGOQ_HD Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
AGOQ_HD Ints sub(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
AGOQ_HD Ints max_of(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
AGOQ_HD Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
template <int N>
AGOQ_HD Ints shift_left(Ints a) {
  return _mm256_slli_epi32(a, N);
}
template <int N>
AGOQ_HD Ints shift_right(Ints a) {
  return _mm256_srli_epi32(a, N);
} // zeros come in

// All ones where the sign bit is set.
AGOQ_HD Ints all_of_sign(Ints a) { return _mm256_srai_epi32(a, 31); }

AGOQ_HD Ints load_ints(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
AGOQ_HD Ints bits_of(Floats a) { return _mm256_castps_si256(a); }
AGOQ_HD Floats floats_of(Ints a) { return _mm256_castsi256_ps(a); }

AGOQ_HD Ints exclusive_or(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
// The low and high 32 bits of a * b, unsigned.
AGOQ_HD void multiply_wide(Ints a, uint32_t b, Ints& low, Ints& high) {
  const __m256i m = _mm256_set1_epi32(static_cast<int32_t>(b));
  const __m256i even = _mm256_mul_epu32(a, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), m);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}

// --- choice --------------------------------------------------------------------------------------------------

AGOQ_HD Ints greater(Floats a, Floats b) { return bits_of(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
AGOQ_HD Ints unequal_to_itself(Floats a) { return bits_of(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
AGOQ_HD bool has_nan(const Floats (&v)[kVecs]) {
  const Floats a = _mm256_cmp_ps(v[0], v[1], _CMP_UNORD_Q), b = _mm256_cmp_ps(v[2], v[3], _CMP_UNORD_Q);
  return _mm256_movemask_ps(_mm256_or_ps(a, b)) != 0;
}
AGOQ_HD Floats choose(Ints condition, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, floats_of(condition)); }

// --- 16-bit lanes --------------------------------------------------------------------------------------------

using Words = __m256i;
inline constexpr int kWordVecs = 2; // of a block
AGOQ_HD Words load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
AGOQ_HD Words splat_word(int16_t x) { return _mm256_set1_epi16(x); }
AGOQ_HD Words smaller_words(Words a, Words b) { return _mm256_min_epi16(a, b); }
AGOQ_HD Words larger_words(Words a, Words b) { return _mm256_max_epi16(a, b); }
AGOQ_HD Words without_signs(Words a) { return _mm256_and_si256(a, splat_word(0x7FFF)); }
// Patterns of floats with the bits below the sign flipped in negative ones: as integers they order like the floats.
AGOQ_HD Words ordered_keys(Words a) { return _mm256_xor_si256(a, _mm256_srli_epi16(_mm256_srai_epi16(a, 15), 1)); }

// --- across lanes --------------------------------------------------------------------------------------------

// Eight words that the extreme is among.
AGOQ_HD __m128i smallest_eight(Words a) {
  return _mm_min_epi16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
}
AGOQ_HD __m128i largest_eight(Words a) {
  return _mm_max_epi16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
}
AGOQ_HD int32_t largest(Ints a) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1));
  return _mm_cvtsi128_si32(m);
}
AGOQ_HD float largest(Floats a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}
AGOQ_HD float smallest(Floats a) {
  __m128 m = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_min_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_min_ss(m, _mm_shuffle_ps(m, m, 1)));
}

// From vectors of the first, second, third and fourth words of kLanes quadruples to the quadruples one after the other.
// Lane i holds those of quadruple kQuadruple[i], because transposing works in each half of 128 bits.
inline constexpr int kQuadruple[kLanes] = {0, 2, 4, 6, 1, 3, 5, 7};
AGOQ_HD void transpose_quadruples(Ints (&w)[4]) {
  const __m256i a = _mm256_unpacklo_epi32(w[0], w[1]), b = _mm256_unpackhi_epi32(w[0], w[1]);
  const __m256i c = _mm256_unpacklo_epi32(w[2], w[3]), d = _mm256_unpackhi_epi32(w[2], w[3]);
  w[0] = _mm256_unpacklo_epi64(a, c);
  w[1] = _mm256_unpackhi_epi64(a, c);
  w[2] = _mm256_unpacklo_epi64(b, d);
  w[3] = _mm256_unpackhi_epi64(b, d);
}

// --- between 32-bit lanes and a block's bytes or 16-bit elements ---------------------------------------------

// Packing works in each half of 128 bits, so bytes come out in this order: 0-3, 8-11, 16-19, 24-27, then 4-7, 12-15,
// ... Unpacking wants the same order, so what goes from vectors to bytes and back need not be put in order between.
AGOQ_HD __m256i in_order(__m256i packed) {
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
// The same where v[0] and v[2] held even elements and v[1] and v[3] the odd ones after them.
AGOQ_HD __m256i pairs_in_order(__m256i packed) {
  const __m256i pairs = _mm256_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15, 0, 4, 1, 5, 2, 6, 3, 7,
                                         8, 12, 9, 13, 10, 14, 11, 15);
  return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(packed, pairs), 0xD8);
}
AGOQ_HD void load_pairs(const void* block, Ints (&v)[kVecs / 2]) {
  for (int i = 0; i < kVecs / 2; ++i) v[i] = _mm256_loadu_si256(static_cast<const __m256i*>(block) + i);
}
AGOQ_HD __m256i out_of_order(__m256i bytes) {
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}
// The low bytes of values within an int8, out of order; then of even and odd elements, in order.
AGOQ_HD __m256i pack_to_bytes(const Ints (&v)[kVecs]) {
  return _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
}
AGOQ_HD __m256i pack_pairs_to_bytes(const Ints (&v)[kVecs]) { return pairs_in_order(pack_to_bytes(v)); }
// Bit B of each of 32 bytes, and bytes that have only that bit.
template <int B>
AGOQ_HD uint32_t bits_of_bytes(__m256i bytes) {
  return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 7 - B)));
}
template <int B>
AGOQ_HD __m256i bytes_of_bits(uint32_t word) {
  const __m256i spread =
      _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  const __m256i words = _mm256_set1_epi32(static_cast<int32_t>(word));
  const __m256i chosen = _mm256_and_si256(_mm256_shuffle_epi8(words, spread), bit);
  return _mm256_and_si256(_mm256_cmpeq_epi8(chosen, bit), _mm256_set1_epi8(1 << B));
}
// 32-bit lanes of signed bytes, which are in order.
AGOQ_HD void widen_bytes(__m256i bytes, Ints (&v)[kVecs]) {
  const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
  v[0] = _mm256_cvtepi8_epi32(low);
  v[1] = _mm256_cvtepi8_epi32(_mm_srli_si128(low, 8));
  v[2] = _mm256_cvtepi8_epi32(high);
  v[3] = _mm256_cvtepi8_epi32(_mm_srli_si128(high, 8));
}
// FP32 of a block of FP16 patterns: elements 0-15 and 16-31.
AGOQ_HD void widen_halves(__m256i low, __m256i high, Floats (&v)[kVecs]) {
  v[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(low));
  v[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(low, 1));
  v[2] = _mm256_cvtph_ps(_mm256_castsi256_si128(high));
  v[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(high, 1));
}
// Elements 16 * Half ... of a block, whose values are in the low 16 bits of each lane.
template <int Half>
AGOQ_HD __m256i narrow_to_words(const Ints (&v)[kVecs]) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(v[2 * Half], v[2 * Half + 1]), 0xD8);
}
template <int Half>
AGOQ_HD __m256i narrow_to_halves(const Floats (&v)[kVecs]) {
  const __m128i low = _mm256_cvtps_ph(v[2 * Half], _MM_FROUND_TO_NEAREST_INT);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low),
                                 _mm256_cvtps_ph(v[2 * Half + 1], _MM_FROUND_TO_NEAREST_INT), 1);
}

// --- tables of sixteen floats, indexed by codes --------------------------------------------------------------

// AVX2 has no lookup of 16 floats, but one of 16 bytes: the table is kept as its four byte planes.
struct Table16 {
  __m256i plane[4];
};
// Entries arrive in the order that makes the planes come out in code order.
inline constexpr int kTableOrder[16] = {0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15};
inline constexpr int kTableVecs = 16 / kLanes;

AGOQ_HD Table16 make_table(const Floats (&entries)[kTableVecs]) {
  const __m256i gather = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9,
                                          13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m256i a = _mm256_shuffle_epi8(bits_of(entries[0]), gather);
  const __m256i b = _mm256_shuffle_epi8(bits_of(entries[1]), gather);
  const __m256i low = _mm256_unpacklo_epi32(a, b), high = _mm256_unpackhi_epi32(a, b);
  return {{_mm256_permute4x64_epi64(low, 0x88), _mm256_permute4x64_epi64(low, 0xDD),
           _mm256_permute4x64_epi64(high, 0x88), _mm256_permute4x64_epi64(high, 0xDD)}};
}
// Entries of a block's indices, which are out of order.
AGOQ_HD void lookup16(const Table16& table, __m256i codes, Floats (&v)[kVecs]) {
  const __m256i b0 = _mm256_shuffle_epi8(table.plane[0], codes), b1 = _mm256_shuffle_epi8(table.plane[1], codes);
  const __m256i b2 = _mm256_shuffle_epi8(table.plane[2], codes), b3 = _mm256_shuffle_epi8(table.plane[3], codes);
  const __m256i b01_low = _mm256_unpacklo_epi8(b0, b1), b01_high = _mm256_unpackhi_epi8(b0, b1);
  const __m256i b23_low = _mm256_unpacklo_epi8(b2, b3), b23_high = _mm256_unpackhi_epi8(b2, b3);
  v[0] = floats_of(_mm256_unpacklo_epi16(b01_low, b23_low));
  v[1] = floats_of(_mm256_unpackhi_epi16(b01_low, b23_low));
  v[2] = floats_of(_mm256_unpacklo_epi16(b01_high, b23_high));
  v[3] = floats_of(_mm256_unpackhi_epi16(b01_high, b23_high));
}
