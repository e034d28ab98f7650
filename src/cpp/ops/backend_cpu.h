// The CPU backend: splits the groups of a launch among torch's threads.
#pragma once

#include "../core/layout.h"
#include "../cpu/fused.h"
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

  // --- fused with quantization -------------------------------------------------------------------------------

  // Parts of the rows over which gradients of a norm's parameters are summed; no matter of the threads.
  static constexpr int64_t kRowParts = 64;

  const cpu::FusedTable& fused() const { return cpu::fused_kernels(isa); }

  void row_norm_quantize(const char*, const RowNormQuantizeArgs& a) const {
    torch::stable::parallel_for(0, a.out.rows, row_grain(a.out.cols),
                                [&](int64_t begin, int64_t end) { fused().row_norm_quantize(a, begin, end); });
  }
  void row_norm_backward(const char*, const RowNormBackwardArgs& a) const {
    const int64_t grain = row_grain(a.in.cols * rows_per_part(a.in.rows, a.parts));
    torch::stable::parallel_for(0, a.parts, grain,
                                [&](int64_t begin, int64_t end) { fused().row_norm_backward(a, begin, end); });
  }
  void part_sum(const char*, const PartSumArgs& a) const {
    torch::stable::parallel_for(0, a.cols, row_grain(a.parts),
                                [&](int64_t begin, int64_t end) { fused().part_sum(a, begin, end); });
  }
  void swiglu_quantize(const SwigluQuantizeArgs& a) const { for_groups(fused().swiglu_quantize, a, a.gate_out); }
  void swiglu_backward(const char*, const SwigluBackwardArgs& a) const {
    for_groups(fused().swiglu_backward, a, a.gate);
  }
  void gelu_quantize(const GeluQuantizeArgs& a) const { for_groups(fused().gelu_quantize, a, a.out); }
  void gelu_backward(const char*, const GeluBackwardArgs& a) const { for_groups(fused().gelu_backward, a, a.in); }

 private:
  static int64_t row_grain(int64_t cols) { return ceil_div(kGrainElements, cols > 0 ? cols : 1); }
};

} // namespace agoq::ops
