// Decoding of a run: to a tensor, into a sum over shards, or plus a scaled tensor.

// Bytes between the codes that are decoded and those that memory is asked for.
inline constexpr int kCodesAhead = 2048;

// Calls sink(element of the run, decoded block, count) for the blocks of a run, `count` of them elements.
// make_decoder(scale) is asked once a group; nan() is what stands for the blocks of a group whose scale (or uint4's
// min) is not finite.
template <Format F, class MakeDecoder, class Nan, class Sink>
AGOQ_HD void decode_run(const Packed& in, const Run& run, MakeDecoder&& make_decoder, Nan&& nan, Sink&& sink) {
  constexpr int bits = FormatTraits<F>::bits, low_bytes = bits == 8 ? 32 : 16; // of a block, in its first plane
  // Copied: stores by the sink might change it otherwise, as far as the compiler knows.
  const Packed p = in;
  const int count = run.count, group_size = run.group_size, last_size = run.last_size;
  const int64_t position = run.position, padded = padded_cols(p.cols), first = run.first_block();
  const uint8_t* row = p.codes + run.row * row_bytes(p.cols, bits);
  for (int i = 0; i < count; ++i) {
    const GroupScale s = load_scale<F>(p, position + i);
    const int size = i + 1 < count ? group_size : last_size;
    const int whole = size / kBlock, rest = size % kBlock, start = i * group_size;
    if (__builtin_expect(!is_finite(s.scale) || !is_finite(s.min), 0)) {
      for (int b = 0; b < whole; ++b) sink(start + b * kBlock, nan(), kBlock);
      if (rest != 0) sink(start + whole * kBlock, nan(), rest);
      continue;
    }
    const auto decoder = make_decoder(s);
    const int64_t block = first + start / kBlock;
    for (int b = 0; b < whole; ++b) {
      prefetch(row + (block + b) * low_bytes, kCodesAhead);
      sink(start + b * kBlock, decoder(unpack<bits>(row, block + b, padded)), kBlock);
    }
    if (__builtin_expect(rest != 0, 0))
      sink(start + whole * kBlock, decoder(unpack<bits>(row, block + whole, padded)), rest);
  }
}

// FP32 values to sink(element, values, count).
template <Format F, class Sink>
AGOQ_HD void decode_values(const Packed& in, const Run& run, Sink&& sink) {
  decode_run<F>(
      in, run, [](const GroupScale& s) { return GroupDecoder<F>(s.scale, s.min, kFloatMax); },
      [] { return same_values(bits_float(kFloatNan)); }, sink);
}

// --- tensors as targets --------------------------------------------------------------------------------------

// The first `count` elements of a block to a tensor.
template <DType D>
AGOQ_HD void put_elements(const Elements<D>& elements, int count, char* target, bool stream) {
  if (__builtin_expect(count < kBlock, 0)) {
    alignas(64) char block[kBlock * dtype_bytes(D)];
    store_elements<D>(elements, block);
    std::memcpy(target, block, static_cast<size_t>(count) * dtype_bytes(D));
  } else if (stream) {
    stream_elements<D>(elements, target);
  } else {
    store_elements<D>(elements, target);
  }
}

// Large outputs bypass the caches: otherwise each of their lines would be read before it is written. Not so a small
// range of groups: its target may be a buffer, whatever tensor the groups are of.
inline bool worth_streaming(const Packed& p, int64_t groups, DType dtype) {
  const int64_t bytes = dtype_bytes(dtype);
  return p.rows * p.cols * bytes >= kStreamBytes && groups * p.group_size * bytes >= kStreamBytes / 64;
}
AGOQ_HD bool can_stream(const void* target) { return reinterpret_cast<uintptr_t>(target) % 64 == 0; }

template <Format F, DType D>
void decode_to_tensor(const Packed& in, const Run& run, const Dense& out, bool stream) {
  char* target = run.in<D>(out);
  const bool past_caches = stream && can_stream(target);
  decode_run<F>(
      in, run, [](const GroupScale& s) { return ElementDecoder<F, D>(s.scale, s.min); },
      [] { return to_elements<D>(same_values(bits_float(kFloatNan))); },
      [&](int element, const Elements<D>& elements, int count) __attribute__((always_inline)) {
        put_elements<D>(elements, count, target + element * dtype_bytes(D), past_caches);
      });
}

// --- sums ----------------------------------------------------------------------------------------------------

// The shard `w` of `in`.
AGOQ_HD Packed shard_of(const Shards& in, int64_t w) {
  Packed shard = in.first;
  shard.codes += w * in.codes_stride;
  shard.scales = static_cast<char*>(shard.scales) + w * dtype_bytes(shard.scale_dtype) * in.scales_stride;
  return shard;
}

// total = a, or with Add total + a.
template <Format F, bool Add>
AGOQ_HD void sum_one(const Packed& a, const Run& run, float* total) {
  decode_values<F>(a, run, [&](int element, const Values& values, int) __attribute__((always_inline)) {
    float* target = total + element;
    store_floats(Add ? sum(load_values<DType::float32>(target), values) : values, target);
  });
}

// The same for one after the other of two shards, with one load and store of the total.
template <Format F, bool Add>
AGOQ_HD void sum_two(const Packed& in_a, const Packed& in_b, const Run& run, float* total) {
  constexpr int bits = FormatTraits<F>::bits, low_bytes = bits == 8 ? 32 : 16;
  const Packed a = in_a, b = in_b; // copied, as in decode_run
  const int64_t padded = padded_cols(a.cols), bytes = run.row * row_bytes(a.cols, bits), position = run.position;
  const uint8_t *row_a = a.codes + bytes, *row_b = b.codes + bytes;
  int64_t block = run.first_block();
  for (int i = 0; i < run.count; ++i) {
    const GroupScale s = load_scale<F>(a, position + i), t = load_scale<F>(b, position + i);
    const int blocks = run.blocks(i);
    float* target = total + i * run.group_size;
    if (__builtin_expect(!is_finite(s.scale + s.min + t.scale + t.min), 0)) { // or a sum of finite ones overflows
      const Run group = {run.row, position + i, run.col + i * run.group_size, 1, run.group_size, run.size(i)};
      sum_one<F, Add>(a, group, target);
      sum_one<F, true>(b, group, target);
      block += blocks;
      continue;
    }
    const GroupDecoder<F> decode_a(s.scale, s.min, kFloatMax), decode_b(t.scale, t.min, kFloatMax);
    for (int k = 0; k < blocks; ++k, ++block, target += kBlock) {
      prefetch(row_a + block * low_bytes, kCodesAhead);
      prefetch(row_b + block * low_bytes, kCodesAhead);
      const Values first = decode_a(unpack<bits>(row_a, block, padded));
      const Values both = sum(Add ? sum(load_values<DType::float32>(target), first) : first,
                              decode_b(unpack<bits>(row_b, block, padded)));
      store_floats(both, target);
    }
  }
}

// The sum of a run over the shards, in order: whole blocks, what follows a short group included.
using SumFn = void (*)(const Shards&, const Run&, float*);
template <Format F>
void sum_shards(const Shards& in, const Run& run, float* total) {
  if (in.count == 1) return sum_one<F, false>(in.first, run, total);
  sum_two<F, false>(in.first, shard_of(in, 1), run, total);
  int64_t w = 2;
  for (; w + 1 < in.count; w += 2) sum_two<F, true>(shard_of(in, w), shard_of(in, w + 1), run, total);
  if (w < in.count) sum_one<F, true>(shard_of(in, w), run, total);
}

// factor * total, NaN in its one pattern.
AGOQ_HD Values scaled_block(const float* total, float factor) {
  return one_nan(product(load_values<DType::float32>(total), factor));
}

template <DType D>
void put_scaled(const float* total, float factor, const Run& run, const Dense& out, bool stream) {
  char* target = run.in<D>(out);
  const bool past_caches = stream && can_stream(target);
  const int size = (run.count - 1) * run.group_size + run.last_size;
  for (int e = 0; e < size; e += kBlock)
    put_elements<D>(to_elements<D>(scaled_block(total + e, factor)), size - e < kBlock ? size - e : kBlock,
                    target + e * dtype_bytes(D), past_caches);
}

// Multiplies the sums in the tile's buffer by `factor`.
template <bool Range>
void scale_total(float factor, const Run& run, Tile& tile) {
  for (int i = 0; i < run.count; ++i) {
    float* total = tile.buffer + i * run.group_size;
    pad_with_first<float>(total, run.size(i));
    ExtremesSoFar<Range> so_far;
    for (int b = 0; b < run.blocks(i); ++b) {
      const Values v = scaled_block(total + b * kBlock, factor);
      store_floats(v, total + b * kBlock);
      so_far.include(v);
    }
    tile.set(i, total, so_far.result());
  }
}

// decode(inout) + factor * x of a run, in whole blocks.
template <Format F, DType D>
void add_scaled(const Packed& inout, const Dense& x, float factor, const Run& run, Tile& tile) {
  const int64_t run_bytes = int64_t{kRunGroups} * run.group_size * dtype_bytes(D);
  const char* source = run.in<D>(x);
  float* total = tile.buffer;
  decode_values<F>(inout, run, [&](int element, const Values& values, int count) __attribute__((always_inline)) {
    const char* elements = source + element * dtype_bytes(D);
    for (int line = 0; line < kBlock * dtype_bytes(D); line += 64) prefetch(elements, run_bytes + line);
    alignas(64) char padded[kBlock * dtype_bytes(D)];
    if (__builtin_expect(count < kBlock, 0)) {
      std::memset(padded, 0, sizeof padded);
      std::memcpy(padded, elements, static_cast<size_t>(count) * dtype_bytes(D));
      elements = padded;
    }
    store_floats(sum(values, product(load_values<D>(elements), factor)), total + element);
  });
  // Apart: together with the sums the extremes would need more registers than there are.
  for (int i = 0; i < run.count; ++i, total += run.group_size) {
    pad_with_first<float>(total, run.size(i));
    ExtremesSoFar<FormatTraits<F>::has_min> so_far;
    for (int b = 0; b < run.blocks(i); ++b) so_far.include(load_values<DType::float32>(total + b * kBlock));
    tile.set(i, total, so_far.result());
  }
}
