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

}  // namespace agoq
