// The codec ops: each checks, allocates and launches, once for every backend.
//
// A backend is constructed from a tensor of the launch (it sets the device and finds the stream) and has one method for
// each kernel. `reference.py` holds the readable twin of every op.
#pragma once

#include <optional>
#include <tuple>

#include "tensor_args.h"

namespace agoq::ops {

template <class Backend>
std::tuple<Tensor, Tensor> quantize_with(const Backend& backend, const Tensor& x, Format format, int group_size,
                                         ScalarType scale_dtype, bool stochastic, const std::optional<Tensor>& seed,
                                         int64_t element_offset) {
  constexpr const char* op = "quantize";
  const DenseInput in = dense_input(op, x);
  scale_dtype_of(op, scale_dtype);
  const int64_t bytes = row_bytes(in.cols, kFormats[static_cast<int>(format)].bits);
  Tensor packed = torch::stable::new_empty(x, {in.rows, bytes}, ScalarType::Byte);
  Tensor scales = torch::stable::new_empty(x, scales_shape(in.rows, in.cols, format, group_size), scale_dtype);
  const Packed out = packed_view(op, packed, scales, in.rows, in.cols, format, group_size);
  backend.quantize({in.view, out, rounding_of(op, stochastic, seed, element_offset)});
  return {packed, scales};
}

template <class Backend>
std::tuple<Tensor, Tensor> quantize(const Tensor& x, StringHandle format, int64_t group_size, ScalarType scale_dtype,
                                    StringHandle rounding, std::optional<Tensor> seed, int64_t element_offset) {
  const Format f = take_format("quantize", format);
  const bool stochastic = take_stochastic("quantize", rounding);
  return quantize_with(Backend(x), x, f, checked_group_size("quantize", group_size), scale_dtype, stochastic, seed,
                       element_offset);
}

template <class Backend>
void quantize_out(const Tensor& x, StringHandle format, int64_t group_size, StringHandle rounding,
                  std::optional<Tensor> seed, int64_t element_offset, const Tensor& packed, const Tensor& scales) {
  constexpr const char* op = "quantize_out";
  const Format f = take_format(op, format);
  const bool stochastic = take_stochastic(op, rounding);
  const DenseInput in = dense_input(op, x);
  const Packed out = packed_view(op, packed, scales, in.rows, in.cols, f, checked_group_size(op, group_size));
  Backend(x).quantize({in.view, out, rounding_of(op, stochastic, seed, element_offset)});
}

template <class Backend>
Tensor dequantize_with(const Backend& backend, const Tensor& packed, const Tensor& scales, int64_t cols, Format format,
                       int group_size, ScalarType dtype) {
  constexpr const char* op = "dequantize";
  STD_TORCH_CHECK(packed.dim() == 2, op, ": packed must be [rows, row_bytes]");
  const Packed in = packed_view(op, packed, scales, packed.size(0), cols, format, group_size);
  Tensor out = torch::stable::new_empty(packed, {packed.size(0), cols}, dtype);
  backend.dequantize({in, dense_output(op, out)});
  return out;
}

template <class Backend>
Tensor dequantize(const Tensor& packed, const Tensor& scales, int64_t cols, StringHandle format, int64_t group_size,
                  ScalarType dtype) {
  const Format f = take_format("dequantize", format);
  return dequantize_with(Backend(packed), packed, scales, cols, f, checked_group_size("dequantize", group_size), dtype);
}

template <class Backend>
void dequantize_out(const Tensor& packed, const Tensor& scales, StringHandle format, int64_t group_size,
                    const Tensor& out) {
  constexpr const char* op = "dequantize_out";
  const Format f = take_format(op, format);
  const Packed in = packed_view(op, packed, scales, rows_of(out), cols_of(out), f, checked_group_size(op, group_size));
  Backend(packed).dequantize({in, dense_output(op, out)});
}

template <class Backend>
void accumulate_(const Tensor& packed, const Tensor& scales, const Tensor& x, double factor, StringHandle format,
                 int64_t group_size, StringHandle rounding, std::optional<Tensor> seed, int64_t element_offset) {
  constexpr const char* op = "accumulate_";
  const Format f = take_format(op, format);
  const bool stochastic = take_stochastic(op, rounding);
  const DenseInput in = dense_input(op, x);
  const Packed inout = packed_view(op, packed, scales, in.rows, in.cols, f, checked_group_size(op, group_size));
  Backend(packed).accumulate(
      {inout, in.view, static_cast<float>(factor), rounding_of(op, stochastic, seed, element_offset)});
}

template <class Backend>
Tensor reduce(const Tensor& packed, const Tensor& scales, int64_t cols, StringHandle format, int64_t group_size,
              double factor, ScalarType dtype) {
  constexpr const char* op = "reduce";
  const Format f = take_format(op, format);
  const Shards in = shards_view(op, packed, scales, cols, f, checked_group_size(op, group_size));
  Tensor out = torch::stable::new_empty(packed, {in.first.rows, cols}, dtype);
  Backend(packed).reduce({in, static_cast<float>(factor), dense_output(op, out)});
  return out;
}

template <class Backend>
void reduce_out(const Tensor& packed, const Tensor& scales, StringHandle format, int64_t group_size, double factor,
                const Tensor& out) {
  constexpr const char* op = "reduce_out";
  const Format f = take_format(op, format);
  const Shards in = shards_view(op, packed, scales, cols_of(out), f, checked_group_size(op, group_size));
  STD_TORCH_CHECK(rows_of(out) == in.first.rows, op, ": out must have the shards' ", in.first.rows, " rows; got ",
                  rows_of(out));
  Backend(packed).reduce({in, static_cast<float>(factor), dense_output(op, out)});
}

template <class Backend>
void reduce_quantize_out(const Tensor& packed, const Tensor& scales, int64_t cols, StringHandle format,
                         int64_t group_size, double factor, StringHandle rounding, std::optional<Tensor> seed,
                         int64_t element_offset, const Tensor& out_packed, const Tensor& out_scales) {
  constexpr const char* op = "reduce_quantize_out";
  const Format f = take_format(op, format);
  const bool stochastic = take_stochastic(op, rounding);
  const int group = checked_group_size(op, group_size);
  const Shards in = shards_view(op, packed, scales, cols, f, group);
  const Packed out = packed_view(op, out_packed, out_scales, in.first.rows, cols, f, group);
  Backend(packed).reduce_quantize(
      {in, static_cast<float>(factor), out, rounding_of(op, stochastic, seed, element_offset)});
}

template <class Backend>
std::tuple<Tensor, Tensor> norm(const Tensor& packed, const Tensor& scales, int64_t cols, StringHandle format,
                                int64_t group_size) {
  constexpr const char* op = "norm";
  const Format f = take_format(op, format);
  STD_TORCH_CHECK(packed.dim() == 2, op, ": packed must be [rows, row_bytes]");
  const Packed in = packed_view(op, packed, scales, packed.size(0), cols, f, checked_group_size(op, group_size));
  Tensor partial = torch::stable::new_empty(packed, {in.rows * ceil_div(cols, kNormChunk)}, ScalarType::Double);
  Tensor sum = torch::stable::new_empty(packed, {}, ScalarType::Double);
  Tensor nonfinite = torch::stable::new_empty(packed, {}, ScalarType::Bool);
  Backend(packed).norm({in, static_cast<double*>(partial.mutable_data_ptr())},
                       static_cast<double*>(sum.mutable_data_ptr()), static_cast<bool*>(nonfinite.mutable_data_ptr()));
  return {sum, nonfinite};
}

} // namespace agoq::ops
