// The CPU backend: splits the groups of a launch among torch's threads.
#pragma once

#include "../core/layout.h"
#include "../cpu/kernels.h"
#include "box.h"

namespace agoq::ops {

struct CpuBackend {
  using Tensor = torch::stable::Tensor;

  // Work for one thread is at least this many elements: below it, waking a thread costs more than it saves.
  static constexpr int64_t kGrainElements = 32768;

  cpu::Isa isa = cpu::best_isa();

  explicit CpuBackend(const Tensor&) {}
  explicit CpuBackend(cpu::Isa forced) : isa(forced) {}

  template <class Args>
  void for_groups(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, const Packed& p) const {
    const int64_t groups = p.rows * num_groups(p.cols, p.group_size);
    torch::stable::parallel_for(0, groups, ceil_div(kGrainElements, p.group_size),
                                [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  }

  const cpu::KernelTable& table() const { return cpu::kernels(isa); }

  void quantize(const QuantizeArgs& a) const { for_groups(table().quantize, a, a.out); }
  void dequantize(const DequantizeArgs& a) const { for_groups(table().dequantize, a, a.in); }
  void accumulate(const AccumulateArgs& a) const { for_groups(table().accumulate, a, a.inout); }
  void reduce(const ReduceArgs& a) const { for_groups(table().reduce, a, a.in.first); }
  void reduce_quantize(const ReduceQuantizeArgs& a) const { for_groups(table().reduce_quantize, a, a.in.first); }

  // Sum of squares into `sum`, and whether it is NaN into `nonfinite`.
  void norm(const NormArgs& a, double* sum, bool* nonfinite) const {
    const int64_t chunks = a.in.rows * ceil_div(a.in.cols, kNormChunk);
    torch::stable::parallel_for(0, chunks, 2, [&](int64_t begin, int64_t end) { table().norm(a, begin, end); });
    const double total = cpu::lane_sum(a.partial, chunks);
    *nonfinite = total != total;
    *sum = *nonfinite ? __builtin_nan("") : total;
  }
};

}  // namespace agoq::ops
