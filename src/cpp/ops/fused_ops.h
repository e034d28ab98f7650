// Norms and activations fused with quantization: each op checks, allocates and launches, once for every backend.
//
// Absent tensors are undefined arguments (schema `Tensor?`) and tensors without elements among the results.
// `reference_fused.py` holds the readable twin of every op.
#pragma once

#include <initializer_list>
#include <optional>
#include <tuple>

#include "tensor_args.h"

namespace agoq::ops {

using OptionalTensor = std::optional<Tensor>;

// How the saved tensors of an op are stored; `take_codec` owns the handle it reads.
struct Codec {
  Format format;
  int group_size;
};

inline Codec take_codec(const char* op, StringHandle format, int64_t group_size) {
  const Format f = take_format(op, format);
  return {f, checked_group_size(op, group_size)};
}

// Codes and scales of a tensor to be, and the view that kernels write to.
struct PackedOutput {
  Tensor packed, scales;
  Packed view;
};

inline PackedOutput packed_output(const char* op, const Tensor& like, int64_t rows, int64_t cols, const Codec& codec,
                                  ScalarType scale_dtype) {
  scale_dtype_of(op, scale_dtype);
  const int64_t bytes = row_bytes(cols, kFormats[static_cast<int>(codec.format)].bits);
  Tensor packed = torch::stable::new_empty(like, {rows, bytes}, ScalarType::Byte);
  Tensor scales = torch::stable::new_empty(like, scales_shape(rows, cols, codec.format, codec.group_size), scale_dtype);
  return {packed, scales, packed_view(op, packed, scales, rows, cols, codec.format, codec.group_size)};
}

inline Packed packed_input(const char* op, const Tensor& packed, const Tensor& scales, int64_t cols,
                           const Codec& codec) {
  STD_TORCH_CHECK(packed.dim() == 2, op, ": packed must be [rows, row_bytes]");
  return packed_view(op, packed, scales, packed.size(0), cols, codec.format, codec.group_size);
}

inline Tensor no_result(const Tensor& like, ScalarType dtype) { return torch::stable::new_empty(like, {0}, dtype); }

// A dense result [rows, cols], or an absent one.
struct DenseOutput {
  Tensor tensor;
  Dense view;
};

inline DenseOutput dense_result(const char* op, const Tensor& like, int64_t rows, int64_t cols, ScalarType dtype,
                                bool wanted = true) {
  if (!wanted) return {no_result(like, dtype), {}};
  Tensor tensor = torch::stable::new_empty(like, {rows, cols}, dtype);
  return {tensor, dense_output(op, tensor)};
}

inline void check_same_shape(const char* op, const char* argument, const DenseInput& x, int64_t rows, int64_t cols) {
  STD_TORCH_CHECK(x.rows == rows && x.cols == cols, op, ": ", argument, " must be [", rows, ", ", cols,
                  "] as rows; got [", x.rows, ", ", x.cols, "]");
}

inline DenseInput absent_input(const Tensor& like) { return {like, {}, 0, 0}; }

// Weight or bias [cols], or an absent one.
inline DenseInput vector_input(const char* op, const OptionalTensor& vector, int64_t cols, const Tensor& like) {
  if (!vector.has_value()) return absent_input(like);
  STD_TORCH_CHECK(vector->dim() == 1 && vector->size(0) == cols, op, ": weight and bias must have shape (", cols, ",)");
  return dense_input(op, torch::stable::contiguous(*vector));
}

inline ScalarType promoted(ScalarType a, ScalarType b) { return a == b ? a : ScalarType::Float; }

// Sees tensors whose rows follow each other without gaps as one row, so that short rows cost no more than long ones.
// Bit planes (5 and 6 bits) lie row by row, so those formats keep their rows.
inline void merge_rows(std::initializer_list<Packed*> packed, std::initializer_list<Dense*> dense) {
  const Packed first = **packed.begin();
  const int bits = kFormats[static_cast<int>(first.format)].bits;
  if (first.rows <= 1 || first.cols % first.group_size != 0 || bits == 5 || bits == 6) return;
  for (const Dense* d : dense)
    if (d->data != nullptr && d->row_stride != first.cols) return;
  for (Packed* p : packed) p->rows = 1, p->cols = first.rows * first.cols;
  for (Dense* d : dense) d->row_stride = first.rows * first.cols;
}

// --- norms ---------------------------------------------------------------------------------------------------

// y in `y_dtype` and packed x.
template <class Backend>
std::tuple<Tensor, Tensor, Tensor> row_norm_quantize(const char* op, bool centered, const Tensor& x,
                                                     const OptionalTensor& weight, const OptionalTensor& bias,
                                                     double eps, const Codec& codec, ScalarType scale_dtype,
                                                     ScalarType y_dtype) {
  const DenseInput in = dense_input(op, x);
  const DenseInput w = vector_input(op, weight, in.cols, x), b = vector_input(op, bias, in.cols, x);
  const PackedOutput out = packed_output(op, x, in.rows, in.cols, codec, scale_dtype);
  const DenseOutput y = dense_result(op, x, in.rows, in.cols, y_dtype);
  const RowNorm norm = {centered, w.view, b.view, static_cast<float>(eps)};
  if (in.rows > 0 && in.cols > 0) Backend(x).row_norm_quantize(op, {in.view, norm, y.view, out.view});
  return {y.tensor, out.packed, out.scales};
}

template <class Backend>
Tensor row_norm_dequantize(const char* op, bool centered, const Tensor& packed, const Tensor& scales, int64_t cols,
                           const OptionalTensor& weight, const OptionalTensor& bias, double eps, const Codec& codec,
                           ScalarType dtype, ScalarType y_dtype) {
  const Packed in = packed_input(op, packed, scales, cols, codec);
  const DenseInput w = vector_input(op, weight, cols, packed), b = vector_input(op, bias, cols, packed);
  const DenseOutput y = dense_result(op, packed, in.rows, cols, y_dtype);
  const RowNorm norm = {centered, w.view, b.view, static_cast<float>(eps)};
  const RowNormBackwardArgs args = {in, dtype_of(op, "dtype", dtype), norm, {}, {}, y.view, nullptr, nullptr, in.rows};
  if (in.rows > 0 && cols > 0) Backend(packed).row_norm_backward(op, args);
  return y.tensor;
}

// dx in `dtype`, dweight and dbias in FP32; absent where not wanted.
template <class Backend>
std::tuple<Tensor, Tensor, Tensor> row_norm_backward(const char* op, bool centered, const Tensor& dy,
                                                     const Tensor& packed, const Tensor& scales,
                                                     const OptionalTensor& weight, double eps, const Codec& codec,
                                                     ScalarType dtype, bool need_dx, bool need_dweight,
                                                     bool need_dbias) {
  const DenseInput upstream = dense_input(op, dy);
  const int64_t rows = upstream.rows, cols = upstream.cols;
  const Packed in = packed_input(op, packed, scales, cols, codec);
  check_same_shape(op, "dy", upstream, in.rows, cols);
  const DenseInput w = vector_input(op, weight, cols, packed);
  const DenseOutput dx = dense_result(op, dy, rows, cols, dtype, need_dx);
  // Rows are cut into parts in a fixed way, so sums do not depend on how work is split.
  const bool sums = need_dweight || need_dbias;
  const int64_t most = sums && rows > Backend::kRowParts ? Backend::kRowParts : rows;
  const int64_t parts = rows == 0 ? 0 : ceil_div(rows, rows_per_part(rows, most));
  const auto vector = [&](bool wanted, std::initializer_list<int64_t> shape) {
    return wanted ? torch::stable::new_empty(dy, shape, ScalarType::Float) : no_result(dy, ScalarType::Float);
  };
  Tensor dweight = vector(need_dweight, {cols}), dbias = vector(need_dbias, {cols});
  Tensor weight_parts = vector(need_dweight, {parts, cols}), bias_parts = vector(need_dbias, {parts, cols});
  const auto pointer = [](bool wanted, const Tensor& t) {
    return wanted ? static_cast<float*>(t.mutable_data_ptr()) : nullptr;
  };
  const RowNorm norm = {centered, w.view, {}, static_cast<float>(eps)};
  const Backend backend(dy);
  if (rows > 0 && cols > 0)
    backend.row_norm_backward(op, {in,
                                   dtype_of(op, "dtype", dtype),
                                   norm,
                                   upstream.view,
                                   dx.view,
                                   {},
                                   pointer(need_dweight, weight_parts),
                                   pointer(need_dbias, bias_parts),
                                   parts});
  if (need_dweight) backend.part_sum(op, {pointer(true, weight_parts), parts, cols, pointer(true, dweight)});
  if (need_dbias) backend.part_sum(op, {pointer(true, bias_parts), parts, cols, pointer(true, dbias)});
  return {dx.tensor, dweight, dbias};
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> rms_norm_quantize(const Tensor& x, const Tensor& weight, double eps,
                                                     StringHandle format, int64_t group_size, ScalarType scale_dtype) {
  constexpr const char* op = "rms_norm_quantize";
  const Codec codec = take_codec(op, format, group_size);
  return row_norm_quantize<Backend>(op, false, x, weight, std::nullopt, eps, codec, scale_dtype,
                                    promoted(x.scalar_type(), weight.scalar_type()));
}

template <class Backend>
Tensor rms_norm_dequantize(const Tensor& packed, const Tensor& scales, int64_t cols, const Tensor& weight, double eps,
                           StringHandle format, int64_t group_size, ScalarType dtype) {
  constexpr const char* op = "rms_norm_dequantize";
  const Codec codec = take_codec(op, format, group_size);
  return row_norm_dequantize<Backend>(op, false, packed, scales, cols, weight, std::nullopt, eps, codec, dtype,
                                      promoted(dtype, weight.scalar_type()));
}

template <class Backend>
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy, const Tensor& packed, const Tensor& scales,
                                             OptionalTensor weight, double eps, StringHandle format, int64_t group_size,
                                             ScalarType dtype, bool need_dweight) {
  constexpr const char* op = "rms_norm_backward";
  const Codec codec = take_codec(op, format, group_size);
  const auto [dx, dweight, dbias] = row_norm_backward<Backend>(op, false, dy, packed, scales, weight, eps, codec, dtype,
                                                               weight.has_value(), need_dweight, false);
  return {dx, dweight};
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> layer_norm_quantize(const Tensor& x, OptionalTensor weight, OptionalTensor bias,
                                                       double eps, StringHandle format, int64_t group_size,
                                                       ScalarType scale_dtype) {
  constexpr const char* op = "layer_norm_quantize";
  const Codec codec = take_codec(op, format, group_size);
  return row_norm_quantize<Backend>(op, true, x, weight, bias, eps, codec, scale_dtype, x.scalar_type());
}

template <class Backend>
Tensor layer_norm_dequantize(const Tensor& packed, const Tensor& scales, int64_t cols, OptionalTensor weight,
                             OptionalTensor bias, double eps, StringHandle format, int64_t group_size,
                             ScalarType dtype) {
  constexpr const char* op = "layer_norm_dequantize";
  const Codec codec = take_codec(op, format, group_size);
  return row_norm_dequantize<Backend>(op, true, packed, scales, cols, weight, bias, eps, codec, dtype, dtype);
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dy, const Tensor& packed, const Tensor& scales,
                                                       OptionalTensor weight, double eps, StringHandle format,
                                                       int64_t group_size, ScalarType dtype, bool need_dx,
                                                       bool need_dweight, bool need_dbias) {
  constexpr const char* op = "layer_norm_backward";
  const Codec codec = take_codec(op, format, group_size);
  return row_norm_backward<Backend>(op, true, dy, packed, scales, weight, eps, codec, dtype, need_dx, need_dweight,
                                    need_dbias);
}

// --- activations ---------------------------------------------------------------------------------------------

template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> swiglu_quantize(const Tensor& gate, const Tensor& up,
                                                                   StringHandle format, int64_t group_size,
                                                                   ScalarType scale_dtype, bool keep_up) {
  constexpr const char* op = "swiglu_quantize";
  const Codec codec = take_codec(op, format, group_size);
  const DenseInput g = dense_input(op, gate), u = dense_input(op, up);
  check_same_shape(op, "up", u, g.rows, g.cols);
  PackedOutput gate_out = packed_output(op, gate, g.rows, g.cols, codec, scale_dtype);
  PackedOutput up_out = keep_up ? packed_output(op, up, u.rows, u.cols, codec, scale_dtype)
                                : PackedOutput{no_result(up, ScalarType::Byte), no_result(up, scale_dtype), {}};
  const DenseOutput h = dense_result(op, gate, g.rows, g.cols, promoted(gate.scalar_type(), up.scalar_type()));
  SwigluQuantizeArgs args = {g.view, u.view, h.view, gate_out.view, up_out.view};
  merge_rows({&args.gate_out, &args.up_out}, {&args.gate, &args.up, &args.h});
  Backend(gate).swiglu_quantize(args);
  return {h.tensor, gate_out.packed, gate_out.scales, up_out.packed, up_out.scales};
}

template <class Backend>
Tensor swiglu_dequantize(const Tensor& gate_packed, const Tensor& gate_scales, const Tensor& up_packed,
                         const Tensor& up_scales, int64_t cols, StringHandle format, int64_t group_size,
                         ScalarType gate_dtype, ScalarType up_dtype) {
  constexpr const char* op = "swiglu_dequantize";
  const Codec codec = take_codec(op, format, group_size);
  const Packed gate = packed_input(op, gate_packed, gate_scales, cols, codec);
  const Packed up = packed_input(op, up_packed, up_scales, cols, codec);
  STD_TORCH_CHECK(gate.rows == up.rows, op, ": gate and up must have equally many rows; got ", gate.rows, " and ",
                  up.rows);
  const DenseOutput h = dense_result(op, gate_packed, gate.rows, cols, promoted(gate_dtype, up_dtype));
  SwigluBackwardArgs args = {
      gate, up, dtype_of(op, "gate_dtype", gate_dtype), dtype_of(op, "up_dtype", up_dtype), {}, {}, {}, h.view};
  merge_rows({&args.gate, &args.up}, {&args.h});
  Backend(gate_packed).swiglu_backward(op, args);
  return h.tensor;
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> swiglu_backward(const Tensor& dh, const Tensor& gate_packed,
                                                   const Tensor& gate_scales, OptionalTensor up_packed,
                                                   OptionalTensor up_scales, StringHandle format, int64_t group_size,
                                                   ScalarType gate_dtype, ScalarType up_dtype, bool need_dgate,
                                                   bool need_dup, bool need_h) {
  constexpr const char* op = "swiglu_backward";
  const Codec codec = take_codec(op, format, group_size);
  const DenseInput upstream = dense_input(op, dh);
  const int64_t rows = upstream.rows, cols = upstream.cols;
  const Packed gate = packed_input(op, gate_packed, gate_scales, cols, codec);
  check_same_shape(op, "dh", upstream, gate.rows, cols);
  STD_TORCH_CHECK(up_packed.has_value() == up_scales.has_value(), op, ": up_packed and up_scales come together");
  STD_TORCH_CHECK(up_packed.has_value() || !(need_dgate || need_h), op, ": dgate and h need up_packed");
  Packed up = {};
  if (up_packed.has_value()) up = packed_view(op, *up_packed, *up_scales, rows, cols, codec.format, codec.group_size);
  const DenseOutput dgate = dense_result(op, dh, rows, cols, gate_dtype, need_dgate);
  const DenseOutput dup = dense_result(op, dh, rows, cols, up_dtype, need_dup);
  const DenseOutput h = dense_result(op, dh, rows, cols, promoted(gate_dtype, up_dtype), need_h);
  SwigluBackwardArgs args = {gate,
                             up,
                             dtype_of(op, "gate_dtype", gate_dtype),
                             dtype_of(op, "up_dtype", up_dtype),
                             upstream.view,
                             dgate.view,
                             dup.view,
                             h.view};
  merge_rows({&args.gate, &args.up}, {&args.dh, &args.dgate, &args.dup, &args.h});
  Backend(dh).swiglu_backward(op, args);
  return {dgate.tensor, dup.tensor, h.tensor};
}

inline bool take_tanh(const char* op, StringHandle handle) {
  const std::string approximate = take_string(handle);
  STD_TORCH_CHECK(approximate == "none" || approximate == "tanh", op, ": approximate must be 'none' or 'tanh'; got '",
                  approximate, "'");
  return approximate == "tanh";
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> gelu_quantize(const Tensor& x, StringHandle approximate, StringHandle format,
                                                 int64_t group_size, ScalarType scale_dtype) {
  constexpr const char* op = "gelu_quantize";
  const bool tanh = take_tanh(op, approximate);
  const Codec codec = take_codec(op, format, group_size);
  const DenseInput in = dense_input(op, x);
  const PackedOutput out = packed_output(op, x, in.rows, in.cols, codec, scale_dtype);
  const DenseOutput y = dense_result(op, x, in.rows, in.cols, x.scalar_type());
  GeluQuantizeArgs args = {tanh, in.view, y.view, out.view};
  merge_rows({&args.out}, {&args.x, &args.y});
  Backend(x).gelu_quantize(args);
  return {y.tensor, out.packed, out.scales};
}

template <class Backend>
Tensor gelu_dequantize(const Tensor& packed, const Tensor& scales, int64_t cols, StringHandle approximate,
                       StringHandle format, int64_t group_size, ScalarType dtype) {
  constexpr const char* op = "gelu_dequantize";
  const bool tanh = take_tanh(op, approximate);
  const Packed in = packed_input(op, packed, scales, cols, take_codec(op, format, group_size));
  const DenseOutput y = dense_result(op, packed, in.rows, cols, dtype);
  GeluBackwardArgs args = {tanh, in, dtype_of(op, "dtype", dtype), {}, {}, y.view};
  merge_rows({&args.in}, {&args.y});
  Backend(packed).gelu_backward(op, args);
  return y.tensor;
}

template <class Backend>
std::tuple<Tensor, Tensor> gelu_backward(const Tensor& dy, const Tensor& packed, const Tensor& scales,
                                         StringHandle approximate, StringHandle format, int64_t group_size,
                                         ScalarType dtype, bool need_y) {
  constexpr const char* op = "gelu_backward";
  const bool tanh = take_tanh(op, approximate);
  const Codec codec = take_codec(op, format, group_size);
  const DenseInput upstream = dense_input(op, dy);
  const Packed in = packed_input(op, packed, scales, upstream.cols, codec);
  check_same_shape(op, "dy", upstream, in.rows, upstream.cols);
  const DenseOutput dx = dense_result(op, dy, in.rows, in.cols, dtype);
  const DenseOutput y = dense_result(op, dy, in.rows, in.cols, dtype, need_y);
  GeluBackwardArgs args = {tanh, in, dtype_of(op, "dtype", dtype), upstream.view, dx.view, y.view};
  merge_rows({&args.in}, {&args.dy, &args.dx, &args.y});
  Backend(dy).gelu_backward(op, args);
  return {dx.tensor, y.tensor};
}

} // namespace agoq::ops
