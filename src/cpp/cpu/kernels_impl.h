// The CPU kernels, written once and compiled for each instruction set in a namespace of its own.
//
// A kernel walks over groups of at most 256 elements. Its four steps are functions on one group, picked by format and
// dtype before the walk: load (elements to FP32), encode (FP32 to codes and scale), decode, store. Everything between
// them is FP32 in a buffer that stays in the first-level cache.
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../core/codec.h"
#include "../core/layout.h"
#include "../core/philox.h"
#include "../core/scale.h"
#include "kernels.h"

namespace agoq::cpu::AGOQ_ISA_NAMESPACE {
namespace {

#include "block.h"

// One group of a [rows, cols] tensor.
struct Group {
  int64_t row;
  int64_t index;    // in its row
  int64_t position; // of its scale, in row-major [rows, groups]
  int64_t col;      // first element
  int size;         // elements; the last group of a row may be short
  int blocks() const { return static_cast<int>(ceil_div(size, kBlock)); }
};

// Calls f(Group) for the groups [begin, end) of `p`.
template <class Fn>
inline void for_each_group(const Packed& p, int64_t begin, int64_t end, Fn&& f) {
  const int64_t groups = num_groups(p.cols, p.group_size);
  int64_t row = begin / groups, index = begin % groups;
  for (int64_t position = begin; position < end; ++position) {
    const int64_t col = index * p.group_size;
    const int64_t left = p.cols - col;
    f(Group{row, index, position, col, static_cast<int>(left < p.group_size ? left : p.group_size)});
    if (++index == groups) index = 0, ++row;
  }
}

// --- scales --------------------------------------------------------------------------------------------------

inline float load_scale(const void* scales, DType dtype, int64_t i) {
  return dtype == DType::float32 ? static_cast<const float*>(scales)[i]
                                 : bfloat_to_float(static_cast<const uint16_t*>(scales)[i]);
}

// `value` is a value of the scale's dtype.
inline void store_scale(void* scales, DType dtype, int64_t i, float value) {
  if (dtype == DType::float32)
    static_cast<float*>(scales)[i] = value;
  else
    static_cast<uint16_t*>(scales)[i] = static_cast<uint16_t>(float_bits(value) >> 16);
}

// Extremes are found on integers, which compilers vectorize: magnitudes order like their bits, and signed values like
// their bits with the lower 31 flipped below zero.
template <Format F>
inline GroupScale group_scale(const float* v, int count, DType scale_dtype) {
  int32_t amax = 0;
  for (int i = 0; i < count; ++i) {
    const int32_t magnitude = static_cast<int32_t>(float_bits(v[i]) & 0x7FFFFFFFu);
    amax = magnitude > amax ? magnitude : amax;
  }
  const bool finite = static_cast<uint32_t>(amax) < kFloatInf;
  if constexpr (FormatTraits<F>::has_min) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int i = 0; i < count; ++i) {
      const int32_t bits = static_cast<int32_t>(float_bits(v[i]));
      const int32_t key = bits ^ ((bits >> 31) & 0x7FFFFFFF);
      low = key < low ? key : low;
      high = key > high ? key : high;
    }
    const auto value = [](int32_t key) { return bits_float(static_cast<uint32_t>(key ^ ((key >> 31) & 0x7FFFFFFF))); };
    return asymmetric_scale(value(low), value(high), finite, scale_dtype);
  }
  return {symmetric_scale(bits_float(static_cast<uint32_t>(amax)), FormatTraits<F>::qmax, scale_dtype), 0.0f};
}

// --- the four steps ------------------------------------------------------------------------------------------

// Uniforms of the elements first, first + 1, ...: the counter advances every fourth element.
struct Randoms {
  alignas(64) float storage[kMaxGroup + 32];
  int skip = 0;

  const float* at(int block) const { return storage + skip + block * kBlock; }

  void fill(uint64_t seed, uint64_t first, int count) {
    constexpr int kWide = 8;
    const uint64_t counter = first / 4;
    skip = static_cast<int>(first % 4);
    for (int c = 0; 4 * c < skip + count; c += kWide) {
      uint32_t words[4][kWide];
      for (int i = 0; i < kWide; ++i) {
        const PhiloxWords w = philox(seed, counter + static_cast<uint64_t>(c + i));
        for (int k = 0; k < 4; ++k) words[k][i] = w.word[k];
      }
      for (int i = 0; i < kWide; ++i)
        for (int k = 0; k < 4; ++k) storage[4 * (c + i) + k] = uniform(words[k][i]);
    }
  }
};

// Elements of a group as FP32, in `buffer` or in place. The rest of the last block repeats the first element, which
// changes no extreme.
template <DType D>
const float* load_group(const Dense& x, const Group& g, float* buffer) {
  const int64_t offset = g.row * x.row_stride + g.col;
  if constexpr (D == DType::float32)
    if (g.size % kBlock == 0) return static_cast<const float*>(x.data) + offset;
  load_elements<D>(x.data, offset, g.size, buffer);
  for (int i = g.size; i < g.blocks() * kBlock; ++i) buffer[i] = buffer[0];
  return buffer;
}

template <Format F, bool Stochastic>
void encode_group(const float* v, const Packed& out, const Group& g, const Randoms& randoms) {
  constexpr int bits = FormatTraits<F>::bits;
  constexpr uint8_t zero = static_cast<uint8_t>(FormatTraits<F>::zero_code);
  const GroupScale s = group_scale<F>(v, g.blocks() * kBlock, out.scale_dtype);
  if constexpr (FormatTraits<F>::has_min) {
    store_scale(out.scales, out.scale_dtype, 2 * g.position, s.scale);
    store_scale(out.scales, out.scale_dtype, 2 * g.position + 1, s.min);
  } else {
    store_scale(out.scales, out.scale_dtype, g.position, s.scale);
  }
  const int64_t padded = padded_cols(out.cols);
  uint8_t* row = out.codes + g.row * row_bytes(out.cols, bits);
  const int64_t first = g.col / kBlock;
  const bool usable = scale_is_usable(s.scale);
  for (int b = 0; b < g.blocks(); ++b) {
    alignas(64) uint8_t codes[kBlock];
    if (usable) {
      const float* x = v + b * kBlock;
      alignas(64) uint32_t wide[kBlock];
      for (int i = 0; i < kBlock; ++i) {
        const float t = div_rn(FormatTraits<F>::has_min ? sub_rn(x[i], s.min) : x[i], s.scale);
        if constexpr (Stochastic)
          wide[i] = encode_stochastic<F>(t, randoms.at(b)[i]);
        else
          wide[i] = encode_nearest<F>(t);
      }
      for (int i = 0; i < kBlock; ++i) codes[i] = static_cast<uint8_t>(wide[i]);
      for (int i = g.size - b * kBlock; i < kBlock; ++i) codes[i] = zero;
    } else {
      std::memset(codes, zero, kBlock);
    }
    pack_block<bits>(codes, row, first + b, padded);
  }
}

// Whole blocks of values, saturated to `limit`; NaN throughout if the scale (or uint4's min) is not finite.
template <Format F>
void decode_group(const Packed& in, const Group& g, float limit, float* values) {
  constexpr int bits = FormatTraits<F>::bits;
  float scale, min = 0.0f;
  if constexpr (FormatTraits<F>::has_min) {
    scale = load_scale(in.scales, in.scale_dtype, 2 * g.position);
    min = load_scale(in.scales, in.scale_dtype, 2 * g.position + 1);
  } else {
    scale = load_scale(in.scales, in.scale_dtype, g.position);
  }
  if (!is_finite(scale) || !is_finite(min)) {
    for (int i = 0; i < g.blocks() * kBlock; ++i) values[i] = bits_float(kFloatNan);
    return;
  }
  const int64_t padded = padded_cols(in.cols);
  const uint8_t* row = in.codes + g.row * row_bytes(in.cols, bits);
  const int64_t first = g.col / kBlock;
  for (int b = 0; b < g.blocks(); ++b) {
    alignas(64) uint8_t codes[kBlock];
    alignas(64) float decoded[kBlock];
    unpack_block<bits>(row, first + b, padded, codes);
    decode_block<F>(codes, decoded);
    float* out = values + b * kBlock;
    for (int i = 0; i < kBlock; ++i) {
      const float product = mul_rn(decoded[i], scale);
      out[i] = saturate(FormatTraits<F>::has_min ? add_rn(product, min) : product, limit);
    }
  }
}

template <DType D>
void store_group(const float* values, const Dense& out, const Group& g) {
  store_elements<D>(values, g.size, out.data, g.row * out.row_stride + g.col);
}

// --- picking the steps ---------------------------------------------------------------------------------------

using LoadFn = const float* (*)(const Dense&, const Group&, float*);
using EncodeFn = void (*)(const float*, const Packed&, const Group&, const Randoms&);
using DecodeFn = void (*)(const Packed&, const Group&, float, float*);
using StoreFn = void (*)(const float*, const Dense&, const Group&);

inline LoadFn pick_load(DType d) {
  return d == DType::float32   ? load_group<DType::float32>
         : d == DType::float16 ? load_group<DType::float16>
                               : load_group<DType::bfloat16>;
}
inline StoreFn pick_store(DType d) {
  return d == DType::float32   ? store_group<DType::float32>
         : d == DType::float16 ? store_group<DType::float16>
                               : store_group<DType::bfloat16>;
}
inline DecodeFn pick_decode(Format format) {
  return with_format(format, [](auto f) -> DecodeFn { return decode_group<decltype(f)::value>; });
}
inline EncodeFn pick_encode(Format format, bool stochastic) {
  return with_format(format, [&](auto f) {
    return with_bool(stochastic, [](auto s) -> EncodeFn { return encode_group<decltype(f)::value, decltype(s)::value>; });
  });
}

// Encodes groups of `out`, drawing randoms where rounding asks for them.
struct Encoder {
  const Packed& out;
  const Rounding& rounding;
  EncodeFn encode = pick_encode(out.format, rounding.stochastic);
  Randoms randoms = {};

  void operator()(const float* v, const Group& g) {
    if (rounding.stochastic) {
      const uint64_t first = static_cast<uint64_t>(rounding.element_offset + g.row * out.cols + g.col);
      randoms.fill(static_cast<uint64_t>(*rounding.seed), first, g.blocks() * kBlock);
    }
    encode(v, out, g, randoms);
  }
};

// --- kernels -------------------------------------------------------------------------------------------------

void quantize(const QuantizeArgs& a, int64_t begin, int64_t end) {
  const LoadFn load = pick_load(a.x.dtype);
  Encoder encode{a.out, a.rounding};
  alignas(64) float buffer[kMaxGroup];
  for_each_group(a.out, begin, end, [&](const Group& g) { encode(load(a.x, g, buffer), g); });
}

void dequantize(const DequantizeArgs& a, int64_t begin, int64_t end) {
  const DecodeFn decode = pick_decode(a.in.format);
  const StoreFn store = pick_store(a.out.dtype);
  const float limit = max_finite(a.out.dtype);
  alignas(64) float buffer[kMaxGroup];
  for_each_group(a.in, begin, end, [&](const Group& g) {
    if (a.out.dtype == DType::float32 && g.size % kBlock == 0) {
      decode(a.in, g, limit, static_cast<float*>(a.out.data) + g.row * a.out.row_stride + g.col);
    } else {
      decode(a.in, g, limit, buffer);
      store(buffer, a.out, g);
    }
  });
}

void accumulate(const AccumulateArgs& a, int64_t begin, int64_t end) {
  const LoadFn load = pick_load(a.x.dtype);
  const DecodeFn decode = pick_decode(a.inout.format);
  Encoder encode{a.inout, a.rounding};
  alignas(64) float buffer[kMaxGroup], sum[kMaxGroup];
  for_each_group(a.inout, begin, end, [&](const Group& g) {
    const float* x = load(a.x, g, buffer);
    decode(a.inout, g, kFloatMax, sum);
    for (int i = 0; i < g.blocks() * kBlock; ++i) sum[i] = add_rn(sum[i], mul_rn(x[i], a.factor));
    for (int i = g.size; i < g.blocks() * kBlock; ++i) sum[i] = sum[0];
    encode(sum, g);
  });
}

// factor * the sum of a group over the shards, in order; NaN in its one pattern.
inline void sum_shards(const Shards& in, DecodeFn decode, const Group& g, float factor, float* buffer, float* sum) {
  const int count = g.blocks() * kBlock;
  Packed shard = in.first;
  const int64_t scale_bytes = dtype_bytes(shard.scale_dtype) * in.scales_stride;
  decode(shard, g, kFloatMax, sum);
  for (int64_t w = 1; w < in.count; ++w) {
    shard.codes += in.codes_stride;
    shard.scales = static_cast<char*>(shard.scales) + scale_bytes;
    decode(shard, g, kFloatMax, buffer);
    for (int i = 0; i < count; ++i) sum[i] = add_rn(sum[i], buffer[i]);
  }
  for (int i = 0; i < count; ++i) {
    const float scaled = mul_rn(sum[i], factor);
    sum[i] = scaled != scaled ? bits_float(kFloatNan) : scaled;
  }
  for (int i = g.size; i < count; ++i) sum[i] = sum[0];
}

void reduce(const ReduceArgs& a, int64_t begin, int64_t end) {
  const DecodeFn decode = pick_decode(a.in.first.format);
  const StoreFn store = pick_store(a.out.dtype);
  alignas(64) float buffer[kMaxGroup], sum[kMaxGroup];
  for_each_group(a.in.first, begin, end, [&](const Group& g) {
    sum_shards(a.in, decode, g, a.factor, buffer, sum);
    store(sum, a.out, g);
  });
}

void reduce_quantize(const ReduceQuantizeArgs& a, int64_t begin, int64_t end) {
  const DecodeFn decode = pick_decode(a.in.first.format);
  Encoder encode{a.out, a.rounding};
  alignas(64) float buffer[kMaxGroup], sum[kMaxGroup];
  for_each_group(a.in.first, begin, end, [&](const Group& g) {
    sum_shards(a.in, decode, g, a.factor, buffer, sum);
    encode(sum, g);
  });
}

void norm(const NormArgs& a, int64_t begin, int64_t end) {
  const DecodeFn decode = pick_decode(a.in.format);
  const int64_t chunks = ceil_div(a.in.cols, kNormChunk);
  const int64_t row_groups = num_groups(a.in.cols, a.in.group_size);
  const int64_t chunk_groups = kNormChunk / a.in.group_size;
  alignas(64) float buffer[kMaxGroup];
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t row = chunk / chunks, start = chunk % chunks * chunk_groups;
    const int64_t stop = start + chunk_groups < row_groups ? start + chunk_groups : row_groups;
    alignas(64) double lanes[kNormLanes] = {};
    for_each_group(a.in, row * row_groups + start, row * row_groups + stop, [&](const Group& g) {
      decode(a.in, g, kFloatMax, buffer);
      for (int i = g.size; i < g.blocks() * kBlock; ++i) buffer[i] = 0.0f;
      for (int b = 0; b < g.blocks(); ++b)
        for (int j = 0; j < kNormLanes; ++j) {
          const double value = buffer[b * kBlock + j];
          lanes[j] += value * value;
        }
    });
    a.partial[chunk] = lane_sum(lanes, kNormLanes);
  }
}

}  // namespace

extern const KernelTable kTable;
const KernelTable kTable = {quantize, dequantize, accumulate, reduce, reduce_quantize, norm};

}  // namespace agoq::cpu::AGOQ_ISA_NAMESPACE
