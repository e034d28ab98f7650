// Stochastic rounding of a block by the scalar definitions of core: loops that compilers vectorize.

// Rounds the quotients `t` with the uniforms `u`, a block of each.
template <Format F>
inline Codes round_stochastically(const float* t, const float* u) {
  alignas(64) uint32_t wide[kBlock];
  for (int i = 0; i < kBlock; ++i) wide[i] = encode_stochastic<F>(t[i], u[i]);
  alignas(64) uint8_t codes[kBlock];
  for (int i = 0; i < kBlock; ++i) codes[i] = static_cast<uint8_t>(wide[i]);
  return load_codes(codes);
}

#if !defined(__AVX2__)
template <Format F>
inline Codes encode_stochastic_block(const Values& x, const Divisor& divisor, const float* u) {
  alignas(64) float t[kBlock];
  store_floats(exact_quotients<F>(x, divisor), t);
  return round_stochastically<F>(t, u);
}

// Uniforms of four elements each from kCounters successive counters of Philox.
inline constexpr int kCounters = 8;

inline void fill_uniforms(uint64_t seed, uint64_t counter, float* out) {
  uint32_t words[4][kCounters];
  for (int i = 0; i < kCounters; ++i) {
    const PhiloxWords w = philox(seed, counter + static_cast<uint64_t>(i));
    for (int k = 0; k < 4; ++k) words[k][i] = w.word[k];
  }
  for (int i = 0; i < kCounters; ++i)
    for (int k = 0; k < 4; ++k) out[4 * i + k] = uniform(words[k][i]);
}
#endif
