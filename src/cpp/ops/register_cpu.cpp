// Schemas of every op, the CPU implementations, and the ops that exist for tests only.
#include "backend_cpu.h"
#include "codec_ops.h"
#include "fused_ops.h"

namespace agoq::ops {
namespace {

std::string cpu_isa() { return cpu::isa_name(cpu::best_isa()); }

cpu::Isa take_isa(StringHandle handle) {
  const std::string name = take_string(handle);
  for (int i = 0; i < cpu::kNumIsas; ++i) {
    const auto isa = static_cast<cpu::Isa>(i);
    if (name != cpu::isa_name(isa)) continue;
    STD_TORCH_CHECK(cpu::isa_available(isa), "isa '", name, "' is not available on this machine or in this build");
    return isa;
  }
  throw std::runtime_error("isa must be baseline, avx2 or avx512; got '" + name + "'");
}

bool test_isa_available(StringHandle handle) {
  const std::string name = take_string(handle);
  for (int i = 0; i < cpu::kNumIsas; ++i)
    if (name == cpu::isa_name(static_cast<cpu::Isa>(i))) return cpu::isa_available(static_cast<cpu::Isa>(i));
  return false;
}

// Every kernel reads its instruction set from the backend; these two are given one.
std::tuple<Tensor, Tensor> test_quantize(const Tensor& x, StringHandle format, int64_t group_size,
                                         ScalarType scale_dtype, StringHandle rounding, std::optional<Tensor> seed,
                                         int64_t element_offset, StringHandle isa) {
  const Format f = take_format("quantize", format);
  const bool stochastic = take_stochastic("quantize", rounding);
  return quantize_with(CpuBackend(take_isa(isa)), x, f, checked_group_size("quantize", group_size), scale_dtype,
                       stochastic, seed, element_offset);
}

Tensor test_dequantize(const Tensor& packed, const Tensor& scales, int64_t cols, StringHandle format,
                       int64_t group_size, ScalarType dtype, StringHandle isa) {
  const Format f = take_format("dequantize", format);
  return dequantize_with(CpuBackend(take_isa(isa)), packed, scales, cols, f,
                         checked_group_size("dequantize", group_size), dtype);
}

// The other ops run with the instruction set that the calling thread chose last.
struct ForcedCpuBackend : CpuBackend {
  static inline thread_local cpu::Isa chosen = cpu::Isa::baseline;
  explicit ForcedCpuBackend(const Tensor&) : CpuBackend(chosen) {}
};

// These two work on the groups [begin, end) alone, so that tests can reach the far end of a tensor.
void test_quantize_range(const Tensor& x, const Tensor& packed, const Tensor& scales, StringHandle format,
                         int64_t group_size, int64_t begin, int64_t end, StringHandle isa) {
  constexpr const char* op = "quantize";
  const Format f = take_format(op, format);
  const DenseInput in = dense_input(op, x);
  const Packed out = packed_view(op, packed, scales, in.rows, in.cols, f, checked_group_size(op, group_size));
  cpu::kernels(take_isa(isa)).quantize({in.view, out, {false, nullptr, 0}}, begin, end);
}

void test_dequantize_range(const Tensor& packed, const Tensor& scales, const Tensor& out, StringHandle format,
                           int64_t group_size, int64_t begin, int64_t end, StringHandle isa) {
  constexpr const char* op = "dequantize";
  const Format f = take_format(op, format);
  const Packed in = packed_view(op, packed, scales, rows_of(out), cols_of(out), f, checked_group_size(op, group_size));
  cpu::kernels(take_isa(isa)).dequantize({in, dense_output(op, out)}, begin, end);
}

void test_accumulate_(const Tensor& packed, const Tensor& scales, const Tensor& x, double factor, StringHandle format,
                      int64_t group_size, StringHandle rounding, std::optional<Tensor> seed, int64_t element_offset,
                      StringHandle isa) {
  ForcedCpuBackend::chosen = take_isa(isa);
  accumulate_<ForcedCpuBackend>(packed, scales, x, factor, format, group_size, rounding, seed, element_offset);
}

Tensor test_reduce(const Tensor& packed, const Tensor& scales, int64_t cols, StringHandle format, int64_t group_size,
                   double factor, ScalarType dtype, StringHandle isa) {
  ForcedCpuBackend::chosen = take_isa(isa);
  return reduce<ForcedCpuBackend>(packed, scales, cols, format, group_size, factor, dtype);
}

void test_reduce_quantize_out(const Tensor& packed, const Tensor& scales, int64_t cols, StringHandle format,
                              int64_t group_size, double factor, StringHandle rounding, std::optional<Tensor> seed,
                              int64_t element_offset, const Tensor& out_packed, const Tensor& out_scales,
                              StringHandle isa) {
  ForcedCpuBackend::chosen = take_isa(isa);
  reduce_quantize_out<ForcedCpuBackend>(packed, scales, cols, format, group_size, factor, rounding, seed,
                                        element_offset, out_packed, out_scales);
}

std::tuple<Tensor, Tensor> test_norm(const Tensor& packed, const Tensor& scales, int64_t cols, StringHandle format,
                                     int64_t group_size, StringHandle isa) {
  ForcedCpuBackend::chosen = take_isa(isa);
  return norm<ForcedCpuBackend>(packed, scales, cols, format, group_size);
}

} // namespace

STABLE_TORCH_LIBRARY(agoq, m) {
  m.def(
      "quantize(Tensor x, str format, int group_size, ScalarType scale_dtype, str rounding, Tensor? seed, "
      "int element_offset) -> (Tensor, Tensor)");
  m.def(
      "quantize_out(Tensor x, str format, int group_size, str rounding, Tensor? seed, int element_offset, "
      "Tensor(a!) packed, Tensor(b!) scales) -> ()");
  m.def(
      "dequantize(Tensor packed, Tensor scales, SymInt cols, str format, int group_size, ScalarType dtype) -> Tensor");
  m.def("dequantize_out(Tensor packed, Tensor scales, str format, int group_size, Tensor(a!) out) -> ()");
  m.def(
      "accumulate_(Tensor(a!) packed, Tensor(b!) scales, Tensor x, float factor, str format, int group_size, "
      "str rounding, Tensor? seed, int element_offset) -> ()");
  m.def(
      "reduce(Tensor packed, Tensor scales, SymInt cols, str format, int group_size, float factor, ScalarType dtype) "
      "-> Tensor");
  m.def("reduce_out(Tensor packed, Tensor scales, str format, int group_size, float factor, Tensor(a!) out) -> ()");
  m.def(
      "reduce_quantize_out(Tensor packed, Tensor scales, SymInt cols, str format, int group_size, float factor, "
      "str rounding, Tensor? seed, int element_offset, Tensor(a!) out_packed, Tensor(b!) out_scales) -> ()");
  m.def("norm(Tensor packed, Tensor scales, SymInt cols, str format, int group_size) -> (Tensor, Tensor)");
  m.def(
      "rms_norm_quantize(Tensor x, Tensor weight, float eps, str format, int group_size, ScalarType scale_dtype) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "rms_norm_dequantize(Tensor packed, Tensor scales, SymInt cols, Tensor weight, float eps, str format, "
      "int group_size, ScalarType dtype) -> Tensor");
  m.def(
      "rms_norm_backward(Tensor dy, Tensor packed, Tensor scales, Tensor? weight, float eps, str format, "
      "int group_size, ScalarType dtype, bool need_dweight) -> (Tensor, Tensor)");
  m.def(
      "layer_norm_quantize(Tensor x, Tensor? weight, Tensor? bias, float eps, str format, int group_size, "
      "ScalarType scale_dtype) -> (Tensor, Tensor, Tensor)");
  m.def(
      "layer_norm_dequantize(Tensor packed, Tensor scales, SymInt cols, Tensor? weight, Tensor? bias, float eps, "
      "str format, int group_size, ScalarType dtype) -> Tensor");
  m.def(
      "layer_norm_backward(Tensor dy, Tensor packed, Tensor scales, Tensor? weight, float eps, str format, "
      "int group_size, ScalarType dtype, bool need_dx, bool need_dweight, bool need_dbias) -> (Tensor, Tensor, "
      "Tensor)");
  m.def(
      "swiglu_quantize(Tensor gate, Tensor up, str format, int group_size, ScalarType scale_dtype, bool keep_up) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "swiglu_dequantize(Tensor gate_packed, Tensor gate_scales, Tensor up_packed, Tensor up_scales, SymInt cols, "
      "str format, int group_size, ScalarType gate_dtype, ScalarType up_dtype) -> Tensor");
  m.def(
      "swiglu_backward(Tensor dh, Tensor gate_packed, Tensor gate_scales, Tensor? up_packed, Tensor? up_scales, "
      "str format, int group_size, ScalarType gate_dtype, ScalarType up_dtype, bool need_dgate, bool need_dup, "
      "bool need_h) -> (Tensor, Tensor, Tensor)");
  m.def(
      "gelu_quantize(Tensor x, str approximate, str format, int group_size, ScalarType scale_dtype) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "gelu_dequantize(Tensor packed, Tensor scales, SymInt cols, str approximate, str format, int group_size, "
      "ScalarType dtype) -> Tensor");
  m.def(
      "gelu_backward(Tensor dy, Tensor packed, Tensor scales, str approximate, str format, int group_size, "
      "ScalarType dtype, bool need_y) -> (Tensor, Tensor)");
  m.def("cpu_isa() -> str");
  m.def("_test_isa_available(str isa) -> bool");
  m.def(
      "_test_quantize(Tensor x, str format, int group_size, ScalarType scale_dtype, str rounding, Tensor? seed, "
      "int element_offset, str isa) -> (Tensor, Tensor)");
  m.def(
      "_test_dequantize(Tensor packed, Tensor scales, SymInt cols, str format, int group_size, ScalarType dtype, "
      "str isa) -> Tensor");
  m.def(
      "_test_accumulate_(Tensor(a!) packed, Tensor(b!) scales, Tensor x, float factor, str format, int group_size, "
      "str rounding, Tensor? seed, int element_offset, str isa) -> ()");
  m.def(
      "_test_quantize_range(Tensor x, Tensor(a!) packed, Tensor(b!) scales, str format, int group_size, int begin, "
      "int end, str isa) -> ()");
  m.def(
      "_test_dequantize_range(Tensor packed, Tensor scales, Tensor(a!) out, str format, int group_size, int begin, "
      "int end, str isa) -> ()");
  m.def(
      "_test_reduce(Tensor packed, Tensor scales, SymInt cols, str format, int group_size, float factor, "
      "ScalarType dtype, str isa) -> Tensor");
  m.def(
      "_test_reduce_quantize_out(Tensor packed, Tensor scales, SymInt cols, str format, int group_size, float factor, "
      "str rounding, Tensor? seed, int element_offset, Tensor(a!) out_packed, Tensor(b!) out_scales, str isa) -> ()");
  m.def(
      "_test_norm(Tensor packed, Tensor scales, SymInt cols, str format, int group_size, str isa) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(agoq, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", AGOQ_BOX(&cpu_isa));
  m.impl("_test_isa_available", AGOQ_BOX(&test_isa_available));
}

STABLE_TORCH_LIBRARY_IMPL(agoq, CPU, m) {
  m.impl("quantize", AGOQ_BOX(&quantize<CpuBackend>));
  m.impl("quantize_out", AGOQ_BOX(&quantize_out<CpuBackend>));
  m.impl("dequantize", AGOQ_BOX(&dequantize<CpuBackend>));
  m.impl("dequantize_out", AGOQ_BOX(&dequantize_out<CpuBackend>));
  m.impl("accumulate_", AGOQ_BOX(&accumulate_<CpuBackend>));
  m.impl("reduce", AGOQ_BOX(&reduce<CpuBackend>));
  m.impl("reduce_out", AGOQ_BOX(&reduce_out<CpuBackend>));
  m.impl("reduce_quantize_out", AGOQ_BOX(&reduce_quantize_out<CpuBackend>));
  m.impl("norm", AGOQ_BOX(&norm<CpuBackend>));
  m.impl("rms_norm_quantize", AGOQ_BOX(&rms_norm_quantize<CpuBackend>));
  m.impl("rms_norm_dequantize", AGOQ_BOX(&rms_norm_dequantize<CpuBackend>));
  m.impl("rms_norm_backward", AGOQ_BOX(&rms_norm_backward<CpuBackend>));
  m.impl("layer_norm_quantize", AGOQ_BOX(&layer_norm_quantize<CpuBackend>));
  m.impl("layer_norm_dequantize", AGOQ_BOX(&layer_norm_dequantize<CpuBackend>));
  m.impl("layer_norm_backward", AGOQ_BOX(&layer_norm_backward<CpuBackend>));
  m.impl("swiglu_quantize", AGOQ_BOX(&swiglu_quantize<CpuBackend>));
  m.impl("swiglu_dequantize", AGOQ_BOX(&swiglu_dequantize<CpuBackend>));
  m.impl("swiglu_backward", AGOQ_BOX(&swiglu_backward<CpuBackend>));
  m.impl("gelu_quantize", AGOQ_BOX(&gelu_quantize<CpuBackend>));
  m.impl("gelu_dequantize", AGOQ_BOX(&gelu_dequantize<CpuBackend>));
  m.impl("gelu_backward", AGOQ_BOX(&gelu_backward<CpuBackend>));
  m.impl("_test_quantize", AGOQ_BOX(&test_quantize));
  m.impl("_test_dequantize", AGOQ_BOX(&test_dequantize));
  m.impl("_test_accumulate_", AGOQ_BOX(&test_accumulate_));
  m.impl("_test_quantize_range", AGOQ_BOX(&test_quantize_range));
  m.impl("_test_dequantize_range", AGOQ_BOX(&test_dequantize_range));
  m.impl("_test_reduce", AGOQ_BOX(&test_reduce));
  m.impl("_test_reduce_quantize_out", AGOQ_BOX(&test_reduce_quantize_out));
  m.impl("_test_norm", AGOQ_BOX(&test_norm));
}

} // namespace agoq::ops
