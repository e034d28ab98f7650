// The fused CPU kernels, written once and compiled for each instruction set in a namespace of its own.
//
// Encoding and decoding are the codec kernels of the same instruction set, called on the groups of a row, or of a piece
// of one, while its elements are in the first-level cache: one pass over memory, and the bits of quantize. What stands
// between is loops over FP32 buffers that compilers vectorize.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "../core/activation.h"
#include "../core/layout.h"
#include "fused.h"

namespace agoq::cpu::AGOQ_ISA_NAMESPACE {

extern const KernelTable kTable;

namespace {

// FP32 buffers of equal length, aligned for any vector.
class Buffers {
 public:
  Buffers(int count, int64_t length) : length_(round_up(length, 16)) {
    const size_t bytes = sizeof(float) * static_cast<size_t>(count) * static_cast<size_t>(length_);
    data_ = static_cast<float*>(::operator new(bytes, std::align_val_t(64)));
  }
  ~Buffers() { ::operator delete(data_, std::align_val_t(64)); }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  float* operator[](int i) const { return data_ + i * length_; }

 private:
  int64_t length_;
  float* data_;
};

// --- elements ------------------------------------------------------------------------------------------------

inline char* address_of(const Dense& x, int64_t row, int64_t col) {
  return static_cast<char*>(x.data) + (row * x.row_stride + col) * dtype_bytes(x.dtype);
}

// `count` elements at `source` as FP32.
inline void widen(const void* source, DType dtype, int64_t count, float* __restrict__ out) {
  const uint16_t* p = static_cast<const uint16_t*>(source);
  if (dtype == DType::float32) {
    std::memcpy(out, source, sizeof(float) * static_cast<size_t>(count));
  } else if (dtype == DType::bfloat16) {
    for (int64_t i = 0; i < count; ++i) out[i] = bfloat_to_float(p[i]);
  } else {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i))));
#endif
    for (; i < count; ++i) out[i] = half_to_float(p[i]);
  }
}

// FP32 values, rounded to the dtype; NaN in its one pattern.
inline void narrow(const float* __restrict__ v, int64_t count, DType dtype, void* target) {
  uint16_t* __restrict__ p = static_cast<uint16_t*>(target);
  if (dtype == DType::float32) {
    float* __restrict__ out = static_cast<float*>(target);
    for (int64_t i = 0; i < count; ++i) out[i] = v[i] != v[i] ? bits_float(kFloatNan) : v[i];
  } else if (dtype == DType::bfloat16) {
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t narrowed = float_to_bfloat(v[i]);
      p[i] = v[i] != v[i] ? kBfloatNan : narrowed;
    }
  } else {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8) {
      const __m256 x = _mm256_loadu_ps(v + i);
      const __m256 one_nan =
          _mm256_blendv_ps(x, _mm256_set1_ps(bits_float(kFloatNan)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i), _mm256_cvtps_ph(one_nan, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; i < count; ++i) p[i] = float_to_half(v[i]);
  }
}

// Values rounded to the dtype, in place. FP16 goes through memory, where conversions are vectors.
inline void round_all(float* v, int64_t count, DType dtype) {
  if (dtype == DType::bfloat16) {
    for (int64_t i = 0; i < count; ++i) v[i] = rounded<DType::bfloat16>(v[i]);
  } else if (dtype == DType::float16) {
    constexpr int kPiece = 256;
    uint16_t halves[kPiece];
    for (int64_t i = 0; i < count; i += kPiece) {
      const int64_t n = count - i < kPiece ? count - i : kPiece;
      narrow(v + i, n, dtype, halves);
      widen(halves, dtype, n, v + i);
    }
  }
}

inline DType promote(DType a, DType b) { return a == b ? a : DType::float32; }

// f(0) + f(1) + ... + f(n - 1): lane j of 32 adds f(j), f(j + 32), ... in order, then the lanes are added in halves.
template <class Fn>
inline float lane_total(int64_t n, Fn&& f) {
  constexpr int kLanes = 32;
  alignas(64) float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) lanes[j] += f(i + j);
  for (int j = 0; i + j < n; ++j) lanes[j] += f(i + j);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  return lanes[0];
}

// --- codecs on a piece of a tensor ---------------------------------------------------------------------------

// A range of groups of one row.
struct Piece {
  int64_t row, col;
  int64_t count;      // elements
  int64_t begin, end; // groups
};

// Calls f(Piece) for pieces of at most `limit` elements that make up the groups [begin, end).
template <class Fn>
inline void for_each_piece(const Packed& p, int64_t limit, int64_t begin, int64_t end, Fn&& f) {
  const int64_t groups = num_groups(p.cols, p.group_size);
  while (begin < end) {
    const int64_t row = begin / groups, index = begin - row * groups;
    int64_t stop = begin + limit / p.group_size;
    if (stop > end) stop = end;
    if (stop > (row + 1) * groups) stop = (row + 1) * groups;
    const int64_t col = index * p.group_size, past = (stop - row * groups) * p.group_size;
    f(Piece{row, col, (past < p.cols ? past : p.cols) - col, begin, stop});
    begin = stop;
  }
}

inline Piece whole_row(const Packed& p, int64_t row) {
  const int64_t groups = num_groups(p.cols, p.group_size);
  return {row, 0, p.cols, row * groups, (row + 1) * groups};
}

inline void encode_piece(const Dense& x, const Packed& out, const Piece& piece) {
  kTable.quantize({x, out, {false, nullptr, 0}}, piece.begin, piece.end);
}

// A tensor of one row that holds the piece, and which of its groups the piece is.
struct PieceGroups {
  Packed row;
  int64_t begin, end, col;
};

// Small tensors: what belongs to a large one would be decoded past the caches.
inline PieceGroups groups_of(const Packed& p, const Piece& piece) {
  const int bits = kFormats[static_cast<int>(p.format)].bits;
  const int64_t first = piece.row * num_groups(p.cols, p.group_size);
  const bool planes = bits == 5 || bits == 6; // they lie in the whole row
  const int64_t skipped = planes ? first : piece.begin, col = planes ? piece.col : 0;
  PieceGroups g = {p, piece.begin - skipped, piece.end - skipped, col};
  g.row.rows = 1;
  g.row.cols = planes ? p.cols : piece.count;
  g.row.codes += piece.row * row_bytes(p.cols, bits) + (planes ? 0 : piece.col / 8 * bits);
  g.row.scales = static_cast<char*>(p.scales) + skipped * scales_per_group(p.format) * dtype_bytes(p.scale_dtype);
  return g;
}

// Values as FP32, decoded to `dtype` first; `scratch` has room for them.
inline void decode_piece(const Packed& in, const Piece& piece, DType dtype, float* scratch, float* values) {
  const PieceGroups g = groups_of(in, piece);
  void* target = dtype == DType::float32 ? values : scratch;
  // Where the row would begin for the piece to lie in the buffer.
  const uintptr_t start = reinterpret_cast<uintptr_t>(target) - static_cast<uintptr_t>(g.col * dtype_bytes(dtype));
  kTable.dequantize({g.row, {reinterpret_cast<void*>(start), dtype, g.row.cols}}, g.begin, g.end);
  if (dtype != DType::float32) widen(scratch, dtype, piece.count, values);
}

// --- normalization of rows -----------------------------------------------------------------------------------

// Weight and bias as FP32 in `buffer`; null where absent.
inline const float* widen_vector(const Dense& vector, int64_t cols, float* buffer) {
  if (vector.data == nullptr) return nullptr;
  widen(vector.data, vector.dtype, cols, buffer);
  return buffer;
}

struct RowStatistics {
  float mean, rstd;
};

inline RowStatistics row_statistics(const float* x, int64_t cols, const RowNorm& norm) {
  const float n = static_cast<float>(cols);
  float mean = 0.0f, squares;
  if (norm.centered) {
    mean = lane_total(cols, [&](int64_t i) { return x[i]; }) / n;
    squares = lane_total(cols, [&](int64_t i) { return (x[i] - mean) * (x[i] - mean); });
  } else {
    squares = lane_total(cols, [&](int64_t i) { return x[i] * x[i]; });
  }
  return {mean, 1.0f / sqrt_rn(squares / n + norm.eps)};
}

// x <- its normalized values; of an RMS norm rounded to `dtype`.
inline void normalize(float* x, int64_t cols, const RowNorm& norm, const RowStatistics& s, DType dtype) {
  if (norm.centered) {
    for (int64_t i = 0; i < cols; ++i) x[i] = (x[i] - s.mean) * s.rstd;
  } else {
    for (int64_t i = 0; i < cols; ++i) x[i] *= s.rstd;
    round_all(x, cols, dtype);
  }
}

inline void scale_and_shift(const float* n, const float* weight, const float* bias, int64_t cols,
                            float* __restrict__ y) {
  if (weight == nullptr)
    std::memcpy(y, n, sizeof(float) * static_cast<size_t>(cols));
  else
    for (int64_t i = 0; i < cols; ++i) y[i] = n[i] * weight[i];
  if (bias != nullptr)
    for (int64_t i = 0; i < cols; ++i) y[i] += bias[i];
}

void row_norm_quantize(const RowNormQuantizeArgs& a, int64_t begin, int64_t end) {
  const int64_t cols = a.out.cols;
  const Buffers buffer(4, cols);
  float *x = buffer[0], *y = buffer[1];
  const float* weight = widen_vector(a.norm.weight, cols, buffer[2]);
  const float* bias = widen_vector(a.norm.bias, cols, buffer[3]);
  for (int64_t row = begin; row < end; ++row) {
    widen(address_of(a.x, row, 0), a.x.dtype, cols, x);
    normalize(x, cols, a.norm, row_statistics(x, cols, a.norm), a.x.dtype);
    scale_and_shift(x, weight, bias, cols, y);
    narrow(y, cols, a.y.dtype, address_of(a.y, row, 0));
    encode_piece(a.x, a.out, whole_row(a.out, row));
  }
}

// h <- round(dy * weight) to x's dtype: the gradient of the rounded normalized values (RMS norm).
// dx = h rstd + (-1/2 sum(h x) rstd^3 / cols) 2 x, in the order that autograd takes.
inline void rms_input_gradient(float* h, const float* x, float rstd, int64_t cols) {
  const float drstd = lane_total(cols, [&](int64_t i) { return h[i] * x[i]; });
  const float factor = -0.5f * drstd * (rstd * rstd * rstd) / static_cast<float>(cols);
  for (int64_t i = 0; i < cols; ++i) h[i] = h[i] * rstd + factor * (2.0f * x[i]);
}

// dx = rstd (h - mean(h) - n mean(h n)) with h = dy * weight and n = (x - mean) rstd.
inline void layer_input_gradient(float* h, const float* n, float rstd, int64_t cols) {
  const float count = static_cast<float>(cols);
  const float mean = lane_total(cols, [&](int64_t i) { return h[i]; }) / count;
  const float slope = lane_total(cols, [&](int64_t i) { return h[i] * n[i]; }) / count;
  for (int64_t i = 0; i < cols; ++i) h[i] = rstd * ((h[i] - mean) - n[i] * slope);
}

void row_norm_backward(const RowNormBackwardArgs& a, int64_t begin, int64_t end) {
  const int64_t cols = a.in.cols, height = rows_per_part(a.in.rows, a.parts);
  const Buffers buffer(6, cols);
  float *x = buffer[0], *n = buffer[1], *dy = buffer[2], *h = buffer[3];
  const float* weight = widen_vector(a.norm.weight, cols, buffer[4]);
  const float* bias = widen_vector(a.norm.bias, cols, buffer[5]);
  const DType product_dtype = a.norm.centered ? DType::float32 : promote(a.dy.dtype, a.dtype);
  for (int64_t part = begin; part < end; ++part) {
    float* dweight = a.dweight == nullptr ? nullptr : a.dweight + part * cols;
    float* dbias = a.dbias == nullptr ? nullptr : a.dbias + part * cols;
    if (dweight != nullptr) std::memset(dweight, 0, sizeof(float) * static_cast<size_t>(cols));
    if (dbias != nullptr) std::memset(dbias, 0, sizeof(float) * static_cast<size_t>(cols));
    const int64_t stop = (part + 1) * height < a.in.rows ? (part + 1) * height : a.in.rows;
    for (int64_t row = part * height; row < stop; ++row) {
      decode_piece(a.in, whole_row(a.in, row), DType::float32, nullptr, x);
      const RowStatistics s = row_statistics(x, cols, a.norm);
      std::memcpy(n, x, sizeof(float) * static_cast<size_t>(cols));
      normalize(n, cols, a.norm, s, a.dtype);
      if (a.y.data != nullptr) {
        scale_and_shift(n, weight, bias, cols, h);
        narrow(h, cols, a.y.dtype, address_of(a.y, row, 0));
      }
      if (a.dy.data == nullptr) continue;
      widen(address_of(a.dy, row, 0), a.dy.dtype, cols, dy);
      if (dweight != nullptr) {
        for (int64_t i = 0; i < cols; ++i) h[i] = dy[i] * n[i];
        round_all(h, cols, product_dtype);
        for (int64_t i = 0; i < cols; ++i) dweight[i] += h[i];
      }
      if (dbias != nullptr)
        for (int64_t i = 0; i < cols; ++i) dbias[i] += dy[i];
      if (a.dx.data == nullptr) continue;
      scale_and_shift(dy, weight, nullptr, cols, h);
      if (a.norm.centered) {
        layer_input_gradient(h, n, s.rstd, cols);
      } else {
        round_all(h, cols, a.dtype);
        rms_input_gradient(h, x, s.rstd, cols);
      }
      narrow(h, cols, a.dx.dtype, address_of(a.dx, row, 0));
    }
  }
}

void part_sum(const PartSumArgs& a, int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end; ++c) a.out[c] = 0.0f;
  for (int64_t p = 0; p < a.parts; ++p)
    for (int64_t c = begin; c < end; ++c) a.out[c] += a.partial[p * a.cols + c];
}

// --- activations ---------------------------------------------------------------------------------------------

// Elements of a piece: six FP32 buffers of it fit the first-level cache.
inline constexpr int kPiece = 1024;
using Buffer = float[kPiece];

// round(silu(gate)) to its dtype
inline void silu_all(const float* gate, int64_t count, DType dtype, float* __restrict__ act) {
  for (int64_t i = 0; i < count; ++i) act[i] = silu(gate[i]);
  round_all(act, count, dtype);
}

inline void multiply(const float* a, const float* b, int64_t count, float* __restrict__ out) {
  for (int64_t i = 0; i < count; ++i) out[i] = a[i] * b[i];
}

void swiglu_quantize(const SwigluQuantizeArgs& a, int64_t begin, int64_t end) {
  alignas(64) Buffer gate, up, act, h;
  for_each_piece(a.gate_out, kPiece, begin, end, [&](const Piece& p) {
    widen(address_of(a.gate, p.row, p.col), a.gate.dtype, p.count, gate);
    widen(address_of(a.up, p.row, p.col), a.up.dtype, p.count, up);
    silu_all(gate, p.count, a.gate.dtype, act);
    multiply(act, up, p.count, h);
    narrow(h, p.count, a.h.dtype, address_of(a.h, p.row, p.col));
    encode_piece(a.gate, a.gate_out, p);
    if (a.up_out.codes != nullptr) encode_piece(a.up, a.up_out, p);
  });
}

void swiglu_backward(const SwigluBackwardArgs& a, int64_t begin, int64_t end) {
  alignas(64) Buffer gate, up, act, sigmoids, dh, out;
  for_each_piece(a.gate, kPiece, begin, end, [&](const Piece& p) {
    decode_piece(a.gate, p, a.gate_dtype, out, gate);
    if (a.up.codes != nullptr) decode_piece(a.up, p, a.up_dtype, out, up);
    for (int64_t i = 0; i < p.count; ++i) { // one exp for both
      const float denominator = sigmoid_denominator(gate[i]);
      act[i] = gate[i] / denominator;
      sigmoids[i] = 1.0f / denominator;
    }
    round_all(act, p.count, a.gate_dtype);
    if (a.h.data != nullptr) {
      multiply(act, up, p.count, out);
      narrow(out, p.count, a.h.dtype, address_of(a.h, p.row, p.col));
    }
    if (a.dh.data == nullptr) return;
    widen(address_of(a.dh, p.row, p.col), a.dh.dtype, p.count, dh);
    if (a.dup.data != nullptr) {
      multiply(dh, act, p.count, out);
      narrow(out, p.count, a.dup.dtype, address_of(a.dup, p.row, p.col));
    }
    if (a.dgate.data != nullptr) {
      multiply(dh, up, p.count, out);
      round_all(out, p.count, a.gate_dtype);
      for (int64_t i = 0; i < p.count; ++i) out[i] = silu_gradient(out[i], gate[i], sigmoids[i]);
      narrow(out, p.count, a.dgate.dtype, address_of(a.dgate, p.row, p.col));
    }
  });
}

inline void gelu_all(const float* x, int64_t count, bool tanh, float* __restrict__ y) {
  if (tanh)
    for (int64_t i = 0; i < count; ++i) y[i] = gelu_tanh(x[i]);
  else
    for (int64_t i = 0; i < count; ++i) y[i] = gelu_erf(x[i]);
}

void gelu_quantize(const GeluQuantizeArgs& a, int64_t begin, int64_t end) {
  alignas(64) Buffer x, y;
  for_each_piece(a.out, kPiece, begin, end, [&](const Piece& p) {
    widen(address_of(a.x, p.row, p.col), a.x.dtype, p.count, x);
    gelu_all(x, p.count, a.tanh, y);
    narrow(y, p.count, a.y.dtype, address_of(a.y, p.row, p.col));
    encode_piece(a.x, a.out, p);
  });
}

void gelu_backward(const GeluBackwardArgs& a, int64_t begin, int64_t end) {
  alignas(64) Buffer x, dy, out;
  for_each_piece(a.in, kPiece, begin, end, [&](const Piece& p) {
    decode_piece(a.in, p, a.dtype, out, x);
    if (a.y.data != nullptr) {
      gelu_all(x, p.count, a.tanh, out);
      narrow(out, p.count, a.y.dtype, address_of(a.y, p.row, p.col));
    }
    if (a.dy.data == nullptr) return;
    widen(address_of(a.dy, p.row, p.col), a.dy.dtype, p.count, dy);
    if (a.tanh)
      for (int64_t i = 0; i < p.count; ++i) out[i] = gelu_tanh_gradient(dy[i], x[i]);
    else
      for (int64_t i = 0; i < p.count; ++i) out[i] = gelu_erf_gradient(dy[i], x[i]);
    narrow(out, p.count, a.dx.dtype, address_of(a.dx, p.row, p.col));
  });
}

} // namespace

extern const FusedTable kFusedTable;
const FusedTable kFusedTable = {row_norm_quantize, row_norm_backward, part_sum,     swiglu_quantize,
                                swiglu_backward,   gelu_quantize,     gelu_backward};

} // namespace agoq::cpu::AGOQ_ISA_NAMESPACE
