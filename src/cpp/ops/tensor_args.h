// From torch tensors to the kernels' argument structs: dtype mapping, views as [rows, cols], and shape checks.
//
// The Python wrappers check first, with ValueErrors that users read; the checks here keep a direct call of
// torch.ops.agoq.* from touching memory out of bounds.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "../core/args.h"
#include "../core/layout.h"
#include "box.h"

namespace agoq::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Takes ownership of a `str` argument.
inline std::string take_string(StringHandle handle) {
  size_t length = 0;
  const char* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  std::string text(data, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

inline Format take_format(const char* op, StringHandle handle) {
  const std::string name = take_string(handle);
  for (int i = 0; i < kNumFormats; ++i)
    if (name == kFormats[i].name) return static_cast<Format>(i);
  throw std::runtime_error(std::string(op) + ": format must be a known format; got '" + name + "'");
}

inline bool take_stochastic(const char* op, StringHandle handle) {
  const std::string rounding = take_string(handle);
  STD_TORCH_CHECK(rounding == "nearest" || rounding == "stochastic", op,
                  ": rounding must be 'nearest' or 'stochastic'; got '", rounding, "'");
  return rounding == "stochastic";
}

inline int checked_group_size(const char* op, int64_t group_size) {
  STD_TORCH_CHECK(group_size == 32 || group_size == 64 || group_size == 128 || group_size == 256, op,
                  ": group_size must be one of 32, 64, 128, 256; got ", group_size);
  return static_cast<int>(group_size);
}

inline DType dtype_of(const char* op, const char* argument, ScalarType type) {
  if (type == ScalarType::Float) return DType::float32;
  if (type == ScalarType::Half) return DType::float16;
  STD_TORCH_CHECK(type == ScalarType::BFloat16, op, ": ", argument, " must be float32, float16 or bfloat16");
  return DType::bfloat16;
}

inline DType scale_dtype_of(const char* op, ScalarType type) {
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, op,
                  ": scales must be bfloat16 or float32");
  return type == ScalarType::Float ? DType::float32 : DType::bfloat16;
}

inline int64_t cols_of(const Tensor& x) { return x.dim() == 0 ? 1 : x.size(x.dim() - 1); }

inline int64_t rows_of(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  return rows;
}

// The stride between rows of `x` if it can be read as [rows, cols] where it lies, else -1.
inline int64_t row_stride_of(const Tensor& x) {
  const int64_t dims = x.dim();
  if (x.is_contiguous()) return cols_of(x);
  if (dims < 2 || (x.size(dims - 1) > 1 && x.stride(dims - 1) != 1)) return -1;
  const int64_t stride = x.stride(dims - 2);
  int64_t expected = stride;
  for (int64_t i = dims - 2; i >= 0; --i) {
    if (x.size(i) != 1 && x.stride(i) != expected) return -1;
    expected *= x.size(i);
  }
  return stride;
}

// `x` as the kernels read it; a copy where its strides do not allow that. Keeps the tensor alive.
struct DenseInput {
  Tensor tensor;
  Dense view;
  int64_t rows, cols;
};

inline DenseInput dense_input(const char* op, const Tensor& x) {
  const DType dtype = dtype_of(op, "x", x.scalar_type());
  const int64_t stride = row_stride_of(x);
  Tensor tensor = stride >= 0 ? x : torch::stable::contiguous(x);
  const int64_t cols = cols_of(x);
  void* data = const_cast<void*>(tensor.const_data_ptr());
  return {tensor, {data, dtype, stride >= 0 ? stride : cols}, rows_of(x), cols};
}

inline Dense dense_output(const char* op, const Tensor& out) {
  STD_TORCH_CHECK(out.is_contiguous(), op, ": out must be contiguous");
  return {out.mutable_data_ptr(), dtype_of(op, "out", out.scalar_type()), cols_of(out)};
}

// Whether `tensor` has this shape and its dimensions from `first` on are contiguous.
inline bool has_shape(const Tensor& tensor, const std::vector<int64_t>& shape, int64_t first = 0) {
  if (tensor.dim() != static_cast<int64_t>(shape.size())) return false;
  int64_t expected = 1, elements = 1;
  for (int64_t size : shape) elements *= size;
  for (int64_t i = tensor.dim() - 1; i >= 0; --i) {
    if (tensor.size(i) != shape[i]) return false;
    if (i >= first && elements > 0 && shape[i] > 1 && tensor.stride(i) != expected) return false;
    expected *= shape[i];
  }
  return true;
}

inline std::vector<int64_t> scales_shape(int64_t rows, int64_t cols, Format format, int group_size) {
  std::vector<int64_t> shape = {rows, num_groups(cols, group_size)};
  if (scales_per_group(format) == 2) shape.push_back(2);
  return shape;
}

// Codes and scales of a [rows, cols] tensor, checked. Mutable pointers; inputs are never written through them.
inline Packed packed_view(const char* op, const Tensor& packed, const Tensor& scales, int64_t rows, int64_t cols,
                          Format format, int group_size) {
  STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Byte, op, ": packed must be uint8");
  STD_TORCH_CHECK(cols >= 0, op, ": cols must not be negative; got ", cols);
  const int64_t bytes = row_bytes(cols, kFormats[static_cast<int>(format)].bits);
  STD_TORCH_CHECK(has_shape(packed, {rows, bytes}), op, ": packed must be contiguous with shape (", rows, ", ", bytes,
                  ")");
  STD_TORCH_CHECK(has_shape(scales, scales_shape(rows, cols, format, group_size)), op,
                  ": scales must be contiguous, one for each of (", rows, ", ", num_groups(cols, group_size),
                  ") groups");
  return {static_cast<uint8_t*>(const_cast<void*>(packed.const_data_ptr())),
          const_cast<void*>(scales.const_data_ptr()),
          scale_dtype_of(op, scales.scalar_type()),
          format,
          group_size,
          rows,
          cols};
}

// W stacked shards: packed [W, rows, row_bytes] and scales [W, rows, groups(, 2)] whose first strides are free.
inline Shards shards_view(const char* op, const Tensor& packed, const Tensor& scales, int64_t cols, Format format,
                          int group_size) {
  STD_TORCH_CHECK(packed.dim() == 3 && packed.size(0) >= 1, op, ": packed must be [W, rows, row_bytes] with W >= 1");
  STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Byte, op, ": packed must be uint8");
  STD_TORCH_CHECK(cols >= 0, op, ": cols must not be negative; got ", cols);
  const int64_t count = packed.size(0), rows = packed.size(1);
  std::vector<int64_t> shape = scales_shape(rows, cols, format, group_size);
  shape.insert(shape.begin(), count);
  STD_TORCH_CHECK(has_shape(packed, {count, rows, row_bytes(cols, kFormats[static_cast<int>(format)].bits)}, 1) &&
                      has_shape(scales, shape, 1),
                  op, ": packed and scales must be [W, rows, ...] of ", cols,
                  " columns, contiguous after the first dimension");
  const Packed first = {static_cast<uint8_t*>(const_cast<void*>(packed.const_data_ptr())),
                        const_cast<void*>(scales.const_data_ptr()),
                        scale_dtype_of(op, scales.scalar_type()),
                        format,
                        group_size,
                        rows,
                        cols};
  return {first, count, packed.stride(0), scales.stride(0)};
}

// `seed` stays alive in the caller while the kernel runs.
inline Rounding rounding_of(const char* op, bool stochastic, const std::optional<Tensor>& seed,
                            int64_t element_offset) {
  STD_TORCH_CHECK(element_offset >= 0, op, ": element_offset must not be negative; got ", element_offset);
  if (!stochastic) return {false, nullptr, element_offset};
  STD_TORCH_CHECK(seed.has_value() && seed->scalar_type() == ScalarType::Long && seed->numel() == 1, op,
                  ": stochastic rounding needs a seed, an int64 tensor of one element");
  return {true, static_cast<const int64_t*>(seed->const_data_ptr()), element_offset};
}

} // namespace agoq::ops
