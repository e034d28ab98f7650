// Encoding of a run: its values, then the scales of its groups together, then its codes.
//
// A scale is a chain of dependent operations: found for one group at a time, it would leave the core idle for as long
// as encoding the group takes. Those of a run are found side by side, as lanes of vectors. The values of a run (at most
// 8 KiB) stay in the first-level cache between the two passes over them. While it is encoded, memory is asked for the
// next: hardware that prefetches stops at the end of a page, about once a run.

// Bytes between the codes that are stored and those whose lines memory is asked for.
inline constexpr int kStoresAhead = 1024;

// What is encoded: elements of a run, in whole blocks, and the extremes of each group.
struct Tile {
  const void* elements[kRunGroups]; // in the tensor or in `buffer`
  // By field, so that vectors hold the groups of a run.
  float magnitude[kRunGroups] = {}, low[kRunGroups] = {}, high[kRunGroups] = {};
  int64_t ahead = 0; // bytes from the elements to those that memory is asked for; 0 if they are in `buffer`
  alignas(64) float buffer[kRunElements];

  AGOQ_HD void set(int group, const void* group_elements, const Extremes& e) {
    elements[group] = group_elements;
    magnitude[group] = e.magnitude, low[group] = e.low, high[group] = e.high;
  }
};

// Repeats the first of `count` elements to the end of their last block, which changes no extreme.
template <class T>
AGOQ_HD void pad_with_first(void* elements, int count) {
  T* p = static_cast<T*>(elements);
  for (int i = count; i % kBlock != 0; ++i) p[i] = p[0];
}

// What encode_run reads of a tensor's dtype: FP16 comes widened to FP32, and all dtypes do for stochastic rounding.
constexpr DType tile_dtype(DType dtype, bool stochastic) {
  return dtype == DType::bfloat16 && !stochastic ? DType::bfloat16 : DType::float32;
}

// The elements of a run as To, in place or in the tile's buffer.
template <DType From, DType To, bool Range>
void load_run(const Dense& x, const Run& run, Tile& tile) {
  const char* source = run.in<From>(x);
  if constexpr (From == To) tile.ahead = int64_t{2 * kRunGroups} * run.group_size * dtype_bytes(From); // two runs
  for (int i = 0; i < run.count; ++i, source += run.group_size * dtype_bytes(From)) {
    const int size = run.size(i), blocks = run.blocks(i);
    float* buffer = tile.buffer + i * run.group_size;
    const char* elements = source;
    alignas(64) char padded[kMaxGroup * dtype_bytes(From)];
    if (__builtin_expect(size % kBlock != 0, 0)) {
      char* copy = From == To ? reinterpret_cast<char*>(buffer) : padded;
      std::memcpy(copy, source, static_cast<size_t>(size) * dtype_bytes(From));
      pad_with_first<std::conditional_t<From == DType::float32, float, uint16_t>>(copy, size);
      elements = copy;
    }
    if constexpr (From == DType::bfloat16 && To == From) {
      tile.set(i, elements, bfloat_extremes<Range>(elements, blocks));
    } else {
      ExtremesSoFar<Range> so_far;
      for (int b = 0; b < blocks; ++b) {
        const Values v = load_values<From>(elements + b * kBlock * dtype_bytes(From));
        so_far.include(v);
        if constexpr (From != To) store_floats(v, buffer + b * kBlock);
      }
      tile.set(i, From == To ? static_cast<const void*>(elements) : buffer, so_far.result());
    }
  }
}

struct RunScales {
  float scale[kRunGroups], min[kRunGroups], inverse[kRunGroups];

  AGOQ_HD Divisor divisor(int group) const {
    const float s = scale[group];
    return {s, min[group], inverse[group], s >= kOrdinaryLow && s <= kOrdinaryHigh};
  }
};

// Scales of a run's groups, and of what a former run left behind its last group.
template <Format F>
AGOQ_HD RunScales find_scales(const Tile& tile, DType scale_dtype) {
  RunScales s;
  for (int i = 0; i < kRunGroups; ++i) {
    if constexpr (FormatTraits<F>::has_min) {
      const bool finite = is_finite(tile.magnitude[i]);
      const GroupScale both = asymmetric_scale(tile.low[i], tile.high[i], finite, scale_dtype);
      s.scale[i] = both.scale, s.min[i] = both.min;
    } else {
      s.scale[i] = symmetric_scale(tile.magnitude[i], FormatTraits<F>::qmax, scale_dtype), s.min[i] = 0.0f;
    }
  }
  for (int i = 0; i < kRunGroups; ++i) s.inverse[i] = div_rn(1.0f, s.scale[i]);
  return s;
}

template <Format F>
AGOQ_HD void store_scales(const RunScales& s, const Run& run, const Packed& out) {
  constexpr int each = FormatTraits<F>::has_min ? 2 : 1;
  const auto store_as = [&](auto* scales, auto convert) {
    scales += each * run.position;
    for (int i = 0; i < run.count; ++i) {
      scales[each * i] = convert(s.scale[i]);
      if constexpr (each == 2) scales[each * i + 1] = convert(s.min[i]);
    }
  };
  if (out.scale_dtype == DType::float32)
    store_as(static_cast<float*>(out.scales), [](float x) { return x; });
  else // they are bfloat16 values
    store_as(static_cast<uint16_t*>(out.scales), [](float x) { return static_cast<uint16_t>(float_bits(x) >> 16); });
}

// Stores the scales and codes of a run of elements of type D.
template <Format F, DType D, bool Stochastic>
void encode_run(const Tile& tile, const Run& run, const Packed& out, const Rounding& rounding) {
  constexpr int bits = FormatTraits<F>::bits, block_bytes = kBlock * dtype_bytes(D);
  constexpr int low_bytes = bits == 8 ? 32 : 16; // of a block of codes, in its first plane
  constexpr uint8_t zero = static_cast<uint8_t>(FormatTraits<F>::zero_code);
  const RunScales scales = find_scales<F>(tile, out.scale_dtype);
  store_scales<F>(scales, run, out);
  // What loops need is copied: stores of codes might change it otherwise, as far as the compiler knows.
  const int count = run.count, group_size = run.group_size, last_size = run.last_size;
  const int64_t padded = padded_cols(out.cols), ahead = tile.ahead;
  uint8_t* const row = out.codes + run.row * row_bytes(out.cols, bits);
  int64_t block = run.first_block();
  for (int i = 0; i < count; ++i) {
    const Divisor d = scales.divisor(i);
    const int size = i + 1 < count ? group_size : last_size;
    const int whole = size / kBlock, rest = size % kBlock;
    if (__builtin_expect(!scale_is_usable(d.scale), 0)) {
      for (int b = 0; b < whole + (rest != 0 ? 1 : 0); ++b) pack<bits>(same_codes(zero), row, block++, padded);
      continue;
    }
    Randoms randoms;
    if constexpr (Stochastic) {
      const int64_t element = rounding.element_offset + run.row * out.cols + run.col + i * group_size;
      randoms.fill(static_cast<uint64_t>(*rounding.seed), static_cast<uint64_t>(element), whole * kBlock + rest);
    }
    const char* elements = static_cast<const char*>(tile.elements[i]);
    // Packs the codes of encoded(elements of a block).
    const auto put = [&](auto&& encoded) __attribute__((always_inline)) {
      for (int b = 0; b < whole; ++b) {
        for (int line = 0; line < block_bytes; line += 64) prefetch(elements + b * block_bytes, ahead + line);
        prefetch(row + block * low_bytes, kStoresAhead);
        pack<bits>(encoded(elements + b * block_bytes), row, block++, padded);
      }
      if (__builtin_expect(rest != 0, 0))
        pack<bits>(first_codes(encoded(elements + whole * block_bytes), rest, zero), row, block++, padded);
    };
    if constexpr (D == DType::bfloat16 && (kSearchesPatterns<F> || kCoarseQuotientsDo<F>)) {
      if (__builtin_expect(d.ordinary && out.scale_dtype == DType::bfloat16, 1)) {
        if constexpr (kSearchesPatterns<F>) {
          const PatternSearch<F> search(d.scale);
          put([&](const char* block) __attribute__((always_inline)) { return search(block); });
        } else {
          const CoarseQuotients<F> quotients(d);
          put([&](const char* block) __attribute__((always_inline)) {
            return encode_nearest_block<F, D>(load_to_encode<D>(block), quotients);
          });
        }
        continue;
      }
    }
    const Quotients<F> quotients(d);
    put([&](const char* block) __attribute__((always_inline)) {
      if constexpr (Stochastic)
        return encode_stochastic_block<F>(load_values<D>(block), d,
                                          randoms.at(static_cast<int>(block - elements) / block_bytes));
      else
        return encode_nearest_block<F, D>(load_to_encode<D>(block), quotients);
    });
  }
}

using EncodeFn = void (*)(const Tile&, const Run&, const Packed&, const Rounding&);

// The encoder of elements of `dtype`, which is what tile_dtype says.
inline EncodeFn pick_encode(Format format, DType dtype, bool stochastic) {
  return with_format(format, [&](auto f) -> EncodeFn {
    constexpr Format F = decltype(f)::value;
    if (stochastic) return encode_run<F, DType::float32, true>;
    return dtype == DType::float32 ? encode_run<F, DType::float32, false> : encode_run<F, DType::bfloat16, false>;
  });
}
