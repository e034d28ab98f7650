// Stochastic rounding in vector registers: the uniforms, IEEE quotients, and nf4, whose search compilers do not
// vectorize.

// IEEE quotients: the uniform is compared with the quotient itself.
template <Format F>
AGOQ_HD Values exact_quotients(Values x, const Divisor& d) {
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i)
    x.v[i] = div(FormatTraits<F>::has_min ? sub(x.v[i], splat(d.min)) : x.v[i], splat(d.scale));
  return x;
}

// t >= value[i + 1] where t > threshold i. The last value bounds no interval: nothing lies above the threshold for it.
constexpr Thresholds nf4_floor_thresholds() {
  constexpr auto book = codebook<Format::nf4>();
  Thresholds t{};
  for (int i = 0; i < 14; ++i) {
    const float value = book.value[i + 1];
    const uint32_t below = value > 0.0f ? float_bits(value) - 1u : value < 0.0f ? float_bits(value) + 1u : 0x80000001u;
    t.of[i] = bits_float(below);
  }
  t.of[14] = kFloatMax / 16;
  return t;
}

// core/codec.h's encode_stochastic of nf4.
AGOQ_HD Codes round_nf4_stochastically(Values t, const float* u) {
  Values sixteen_t;
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) {
    t.v[i] = max_of(min_of(t.v[i], splat(1.0f)), splat(-1.0f));
    sixteen_t.v[i] = mul(t.v[i], splat(16.0f));
  }
  const __m256i low = count_below<nf4_floor_thresholds>(sixteen_t);
  const GroupDecoder<Format::nf4> value(1.0f, 0.0f, 1.0f);
  Floats v0[kVecs], v1[kVecs];
  lookup16(value.table, low, v0);
  lookup16(value.table, _mm256_add_epi8(low, _mm256_set1_epi8(1)), v1);
  Ints higher[kVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) higher[i] = greater(div(sub(t.v[i], v0[i]), sub(v1[i], v0[i])), load(u + i * kLanes));
  return {in_order(_mm256_sub_epi8(low, pack_to_bytes(higher)))};
}

template <Format F>
AGOQ_HD Codes encode_stochastic_block(const Values& x, const Divisor& divisor, const float* u) {
  const Values quotients = exact_quotients<F>(x, divisor);
  if constexpr (F == Format::nf4) {
    return round_nf4_stochastically(quotients, u);
  } else {
    alignas(64) float t[kBlock];
    store_floats(quotients, t);
    return round_stochastically<F>(t, u);
  }
}

// Uniforms of four elements each from kCounters successive counters of Philox.
inline constexpr int kCounters = kLanes;

AGOQ_HD void fill_uniforms(uint64_t seed, uint64_t counter, float* out) {
  const uint32_t low = static_cast<uint32_t>(counter);
  if (__builtin_expect(low > UINT32_MAX - kCounters, 0)) { // the lanes' high words would differ
    for (int i = 0; i < kCounters; ++i) {
      const PhiloxWords w = philox(seed, counter + static_cast<uint64_t>(i));
      for (int k = 0; k < 4; ++k) out[4 * i + k] = uniform(w.word[k]);
    }
    return;
  }
  // The rounds of core/philox.h, a counter in each lane.
  Ints c[4] = {add(splat_int(static_cast<int32_t>(low)), load_ints(kQuadruple)),
               splat_int(static_cast<int32_t>(counter >> 32)), splat_int(0), splat_int(0)};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    Ints low0, high0, low1, high1;
    multiply_wide(c[0], 0xD2511F53u, low0, high0);
    multiply_wide(c[2], 0xCD9E8D57u, low1, high1);
    c[0] = exclusive_or(exclusive_or(high1, c[1]), splat_int(static_cast<int32_t>(k0)));
    c[1] = low1;
    c[2] = exclusive_or(exclusive_or(high0, c[3]), splat_int(static_cast<int32_t>(k1)));
    c[3] = low0;
  }
  transpose_quadruples(c);
  for (int k = 0; k < 4; ++k) store(out + k * kLanes, mul(to_floats(shift_right<8>(c[k])), splat(0x1p-24f)));
}
