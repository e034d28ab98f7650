// The CPU kernels: one table of functions for each instruction set, chosen once at run time.
//
// Every function works on a range of groups (row-major over the tensor), so that the caller may split the work among
// threads in any way without changing a bit. The tables compute the same bits; only their speed differs.
#pragma once

#include "../core/args.h"

namespace agoq::cpu {

enum class Isa : int { baseline, avx2, avx512 };
inline constexpr int kNumIsas = 3;

struct KernelTable {
  void (*quantize)(const QuantizeArgs&, int64_t begin, int64_t end);
  void (*dequantize)(const DequantizeArgs&, int64_t begin, int64_t end);
  void (*accumulate)(const AccumulateArgs&, int64_t begin, int64_t end);
  void (*reduce)(const ReduceArgs&, int64_t begin, int64_t end);
  void (*reduce_quantize)(const ReduceQuantizeArgs&, int64_t begin, int64_t end);
  void (*norm)(const NormArgs&, int64_t begin, int64_t end); // a range of chunks
};

const char* isa_name(Isa isa);
// Whether the library holds kernels for `isa` and this machine can run them.
bool isa_available(Isa isa);
// The widest available instruction set.
Isa best_isa();
// Kernels of an available instruction set.
const KernelTable& kernels(Isa isa);

// Sums `count` values in norm's order: lane j of 32 adds values j, j + 32, ..., then the lanes are added in halves.
double lane_sum(const double* values, int64_t count);

} // namespace agoq::cpu
