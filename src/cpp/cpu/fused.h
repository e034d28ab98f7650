// The CPU kernels that are fused with quantization: one table for each instruction set, as in kernels.h.
//
// They compute the same bits on every instruction set and in any split of their ranges.
#pragma once

#include "kernels.h"

namespace agoq::cpu {

struct FusedTable {
  void (*row_norm_quantize)(const RowNormQuantizeArgs&, int64_t begin, int64_t end); // a range of rows
  void (*row_norm_backward)(const RowNormBackwardArgs&, int64_t begin, int64_t end); // a range of parts
  void (*part_sum)(const PartSumArgs&, int64_t begin, int64_t end);                  // a range of columns
  void (*swiglu_quantize)(const SwigluQuantizeArgs&, int64_t begin, int64_t end);    // ranges of groups
  void (*swiglu_backward)(const SwigluBackwardArgs&, int64_t begin, int64_t end);
  void (*gelu_quantize)(const GeluQuantizeArgs&, int64_t begin, int64_t end);
  void (*gelu_backward)(const GeluBackwardArgs&, int64_t begin, int64_t end);
};

// Kernels of an available instruction set.
const FusedTable& fused_kernels(Isa isa);

} // namespace agoq::cpu
