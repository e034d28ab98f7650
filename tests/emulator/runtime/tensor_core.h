// Matrix instructions of a warp.
#pragma once

#include "emulator/warp.h"

namespace emulator {

// ldmatrix: four, two or one 8 x 8 matrices of 16-bit elements, whose rows the lanes' addresses name.
void load_matrices(unsigned warp, WarpCall* const (&calls)[32]);
// mma.m16n8k16, bf16 products, FP32 sums.
void multiply_matrices(WarpCall* const (&calls)[32]);

} // namespace emulator
