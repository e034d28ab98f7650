// Argument structs of the kernels, one vocabulary for the CPU and the CUDA launchers.
//
// All pointers are to memory of the device that runs the kernel. A tensor is seen as [rows, cols]; `packed` and
// `scales` are contiguous in a row-major [rows, row_bytes] and [rows, groups(, 2)]. Offsets are 64-bit throughout.
#pragma once

#include "formats.h"

namespace agoq {

// A dense [rows, cols] tensor whose last dimension is contiguous.
struct Dense {
  void* data;
  DType dtype;
  int64_t row_stride; // in elements
};

// Codes and scales of a [rows, cols] tensor.
struct Packed {
  uint8_t* codes;
  void* scales;
  DType scale_dtype; // bfloat16 or float32
  Format format;
  int group_size;
  int64_t rows, cols;
};

struct Rounding {
  bool stochastic;
  const int64_t* seed;    // one element; null for nearest rounding
  int64_t element_offset; // index of the first element of the tensor in the random stream
};

struct QuantizeArgs {
  Dense x;
  Packed out;
  Rounding rounding;
};

struct DequantizeArgs {
  Packed in;
  Dense out;
};

// inout <- encode(decode(inout) + factor * x)
struct AccumulateArgs {
  Packed inout;
  Dense x;
  float factor;
  Rounding rounding;
};

// `count` equally shaped shards, `codes_stride` bytes and `scales_stride` scale elements apart.
struct Shards {
  Packed first;
  int64_t count;
  int64_t codes_stride;
  int64_t scales_stride;
};

// out <- factor * (sum of the shards in order)
struct ReduceArgs {
  Shards in;
  float factor;
  Dense out;
};

// out <- encode(factor * (sum of the shards in order)), in the shards' format
struct ReduceQuantizeArgs {
  Shards in;
  float factor;
  Packed out;
  Rounding rounding;
};

// Sum of squares in the order of docs/formats.md, "Norm": chunks of kNormChunk elements of a row, kNormLanes lanes.
inline constexpr int64_t kNormChunk = 16384;
inline constexpr int kNormLanes = 32;
struct NormArgs {
  Packed in;
  double* partial; // one sum for each chunk, row-major
};

// --- fused with quantization ---------------------------------------------------------------------------------

// A pointer of an absent tensor (Dense::data, Packed::codes) is null.

// Normalization of rows. RMS: weight * round(x * rstd), the inner rounding to x's dtype; centered (LayerNorm):
// (x - mean) * rstd * weight + bias. Weight and bias are [cols]; a bias may be absent, and so may LayerNorm's weight.
struct RowNorm {
  bool centered;
  Dense weight, bias;
  float eps;
};

// y <- norm(x), out <- encode(x)
struct RowNormQuantizeArgs {
  Dense x;
  RowNorm norm;
  Dense y;
  Packed out;
};

// From packed x: y <- norm(x), and for an upstream dy the gradients of x (dx, in x's dtype) and of weight and bias.
// dweight and dbias are FP32 [parts, cols]: row i of them sums the rows of part i, rows_per_part(rows, parts) in order.
// Outputs that are not wanted are absent, and dy is where no gradient is wanted.
struct RowNormBackwardArgs {
  Packed in;
  DType dtype; // of the x that was packed
  RowNorm norm;
  Dense dy;
  Dense dx, y;
  float *dweight, *dbias;
  int64_t parts;
};
AGOQ_HD constexpr int64_t rows_per_part(int64_t rows, int64_t parts) { return (rows + parts - 1) / parts; }

// out[c] <- the sum of partial[p, c] over p in order
struct PartSumArgs {
  const float* partial; // [parts, cols]
  int64_t parts, cols;
  float* out;
};

// h <- round(silu(gate)) * up, gate_out <- encode(gate), up_out <- encode(up) unless absent
struct SwigluQuantizeArgs {
  Dense gate, up;
  Dense h;
  Packed gate_out, up_out;
};

// From packed gate and up, decoded to their dtypes: h as above, and for an upstream dh the gradients of both.
// Up is absent where only dup is wanted.
struct SwigluBackwardArgs {
  Packed gate, up;
  DType gate_dtype, up_dtype;
  Dense dh;
  Dense dgate, dup, h;
};

// y <- gelu(x), out <- encode(x); by erf, or by PyTorch's tanh approximation
struct GeluQuantizeArgs {
  bool tanh;
  Dense x;
  Dense y;
  Packed out;
};

// From packed x, decoded to its dtype: y as above, and for an upstream dy the gradient of x.
struct GeluBackwardArgs {
  bool tanh;
  Packed in;
  DType dtype;
  Dense dy;
  Dense dx, y;
};

} // namespace agoq
