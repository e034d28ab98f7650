// The CPU kernels, written once and compiled for each instruction set in a namespace of its own.
//
// A kernel walks over groups of at most 256 elements, block by block of 32. What is done with a block comes from
// block_simd.h (vectors of vec_avx2.h or vec_avx512.h) or block_portable.h (loops); the kernels are the same. Between
// decoding and encoding, values are FP32 in buffers that stay in the first-level cache.
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../core/codec.h"
#include "../core/layout.h"
#include "../core/philox.h"
#include "../core/scale.h"
#include "kernels.h"

namespace agoq::cpu::AGOQ_ISA_NAMESPACE {
// Unnamed, and everything in it inlined or local to the file, so that no code compiled for a wider instruction set can
// be linked in for a narrower one.
namespace {

// Of the values of a group: the largest magnitude (NaN or Inf if there is one), and where asked for the extremes.
struct Extremes {
  float magnitude;
  float low, high;
};

// From the extremes among keys of bfloat16, patterns with the lower 15 bits flipped below zero, which order like
// values. NaNs lie beyond the infinities, so a magnitude that is not finite is that of an extreme.
AGOQ_HD Extremes range_of_keys(int16_t low, int16_t high) {
  const auto pattern = [](int16_t key) { return static_cast<uint16_t>(key ^ ((key >> 15) & 0x7FFF)); };
  const int a = pattern(low) & 0x7FFF, b = pattern(high) & 0x7FFF;
  return {bfloat_to_float(static_cast<uint16_t>(a > b ? a : b)), bfloat_to_float(pattern(low)),
          bfloat_to_float(pattern(high))};
}

// What values are divided by: the stored scale, after subtracting min. An ordinary scale may be divided by through its
// inverse (encode_simd.h).
struct Divisor {
  float scale, min, inverse;
  bool ordinary;
};
inline constexpr float kOrdinaryLow = 0x1p-85f, kOrdinaryHigh = 0x1p100f;

// Outputs of at least this many bytes bypass the caches.
inline constexpr int64_t kStreamBytes = int64_t{1} << 25;

// Asks memory for the line at p + ahead, which may be no address at all.
AGOQ_HD void prefetch(const void* p, int64_t ahead) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(ahead)));
}

// Each builds on those before it.
// clang-format off
#if defined(__AVX512F__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#endif
#if defined(__AVX2__)
#include "block_simd.h"
#include "decode_simd.h"
#include "search.h"
#if defined(__AVX512F__)
#include "search_avx512.h"
#else
#include "search_avx2.h"
#endif
#include "encode_simd.h"
#include "stochastic_portable.h"
#include "stochastic_simd.h"
#else
#include "block_portable.h"
#include "stochastic_portable.h"
#endif
#include "stochastic.h"
#include "runs.h"
#include "encode_run.h"
#include "decode_run.h"
// clang-format on

// --- picking functions ---------------------------------------------------------------------------------------

// Calls f(tag with the DType as ::value).
template <class Fn>
decltype(auto) with_dtype(DType dtype, Fn&& f) {
  switch (dtype) {
    case DType::float32: return f(std::integral_constant<DType, DType::float32>{});
    case DType::float16: return f(std::integral_constant<DType, DType::float16>{});
    default: return f(std::integral_constant<DType, DType::bfloat16>{});
  }
}

inline bool needs_range(Format format) { return format == Format::uint4; }

inline SumFn pick_sum(Format format) {
  return with_format(format, [](auto f) -> SumFn { return sum_shards<decltype(f)::value>; });
}

// --- kernels -------------------------------------------------------------------------------------------------

void quantize(const QuantizeArgs& a, int64_t begin, int64_t end) {
  using LoadFn = void (*)(const Dense&, const Run&, Tile&);
  const bool stochastic = a.rounding.stochastic;
  const LoadFn load = with_dtype(a.x.dtype, [&](auto d) {
    return with_bool(needs_range(a.out.format), [&](auto range) {
      return with_bool(stochastic, [](auto s) -> LoadFn {
        constexpr DType D = decltype(d)::value;
        return load_run<D, tile_dtype(D, decltype(s)::value), decltype(range)::value>;
      });
    });
  });
  const EncodeFn encode = pick_encode(a.out.format, tile_dtype(a.x.dtype, stochastic), stochastic);
  Packed out = a.out;
  Dense x = a.x;
  join_rows(out, &x);
  Tile tile;
  for_each_run(out, begin, end, [&](const Run& run) {
    load(x, run, tile);
    encode(tile, run, out, a.rounding);
  });
}

void dequantize(const DequantizeArgs& a, int64_t begin, int64_t end) {
  using DecodeFn = void (*)(const Packed&, const Run&, const Dense&, bool);
  const DecodeFn decode = with_format(a.in.format, [&](auto f) {
    return with_dtype(a.out.dtype,
                      [](auto d) -> DecodeFn { return decode_to_tensor<decltype(f)::value, decltype(d)::value>; });
  });
  Packed in = a.in;
  Dense out = a.out;
  join_rows(in, &out);
  const bool stream = worth_streaming(in, end - begin, out.dtype);
  for_each_run(in, begin, end, [&](const Run& run) { decode(in, run, out, stream); });
  finish_streams();
}

void accumulate(const AccumulateArgs& a, int64_t begin, int64_t end) {
  using AddFn = void (*)(const Packed&, const Dense&, float, const Run&, Tile&);
  const AddFn add = with_format(a.inout.format, [&](auto f) {
    return with_dtype(a.x.dtype, [](auto d) -> AddFn { return add_scaled<decltype(f)::value, decltype(d)::value>; });
  });
  const EncodeFn encode = pick_encode(a.inout.format, DType::float32, a.rounding.stochastic);
  Packed inout = a.inout;
  Dense x = a.x;
  join_rows(inout, &x);
  Tile tile;
  for_each_run(inout, begin, end, [&](const Run& run) {
    add(inout, x, a.factor, run, tile);
    encode(tile, run, inout, a.rounding);
  });
}

void reduce(const ReduceArgs& a, int64_t begin, int64_t end) {
  using PutFn = void (*)(const float*, float, const Run&, const Dense&, bool);
  const PutFn put = with_dtype(a.out.dtype, [](auto d) -> PutFn { return put_scaled<decltype(d)::value>; });
  const SumFn sum_of = pick_sum(a.in.first.format);
  Shards in = a.in;
  Dense out = a.out;
  join_rows(in.first, &out);
  const bool stream = worth_streaming(in.first, end - begin, out.dtype);
  alignas(64) float total[kRunElements];
  for_each_run(in.first, begin, end, [&](const Run& run) {
    sum_of(in, run, total);
    put(total, a.factor, run, out, stream);
  });
  finish_streams();
}

void reduce_quantize(const ReduceQuantizeArgs& a, int64_t begin, int64_t end) {
  const SumFn sum_of = pick_sum(a.in.first.format);
  const EncodeFn encode = pick_encode(a.out.format, DType::float32, a.rounding.stochastic);
  Shards in = a.in;
  Packed out = a.out;
  join_rows(in.first);
  join_rows(out);
  using ScaleFn = void (*)(float, const Run&, Tile&);
  const ScaleFn scale_run =
      with_bool(needs_range(out.format), [](auto r) -> ScaleFn { return scale_total<decltype(r)::value>; });
  Tile tile;
  for_each_run(out, begin, end, [&](const Run& run) {
    sum_of(in, run, tile.buffer);
    scale_run(a.factor, run, tile);
    encode(tile, run, out, a.rounding);
  });
}

void norm(const NormArgs& a, int64_t begin, int64_t end) {
  const SumFn decode = pick_sum(a.in.format);
  const Shards in = {a.in, 1, 0, 0};
  const int64_t chunks = ceil_div(a.in.cols, kNormChunk);
  const int64_t row_groups = num_groups(a.in.cols, a.in.group_size);
  const int64_t chunk_groups = kNormChunk / a.in.group_size;
  alignas(64) float values[kRunElements];
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t row = chunk / chunks, start = chunk % chunks * chunk_groups;
    const int64_t stop = start + chunk_groups < row_groups ? start + chunk_groups : row_groups;
    alignas(64) double lanes[kNormLanes] = {};
    for_each_run(a.in, row * row_groups + start, row * row_groups + stop, [&](const Run& run) {
      decode(in, run, values);
      const int size = (run.count - 1) * run.group_size + run.last_size;
      for (int i = size; i % kBlock != 0; ++i) values[i] = 0.0f;
      for (int i = 0; i < size; i += kBlock)
        for (int j = 0; j < kNormLanes; ++j) {
          const double value = values[i + j];
          lanes[j] += value * value;
        }
    });
    a.partial[chunk] = lane_sum(lanes, kNormLanes);
  }
}

} // namespace

extern const KernelTable kTable;
const KernelTable kTable = {quantize, dequantize, accumulate, reduce, reduce_quantize, norm};

} // namespace agoq::cpu::AGOQ_ISA_NAMESPACE
