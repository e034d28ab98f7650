// Sizes and addresses: rows of codes, groups, and the parts of a wire message (docs/formats.md).
#pragma once

#include "formats.h"

namespace agoq {

AGOQ_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
AGOQ_HD constexpr int64_t round_up(int64_t a, int64_t multiple) { return ceil_div(a, multiple) * multiple; }

// Elements of a row with its padding.
AGOQ_HD constexpr int64_t padded_cols(int64_t cols) { return round_up(cols, kBlock); }
AGOQ_HD constexpr int64_t row_bytes(int64_t cols, int bits) { return padded_cols(cols) / 8 * bits; }
AGOQ_HD constexpr int64_t num_groups(int64_t cols, int group_size) { return ceil_div(cols, group_size); }
// Values stored for each group: the scale, and uint4's min.
AGOQ_HD constexpr int scales_per_group(Format format) { return format == Format::uint4 ? 2 : 1; }

struct WireLayout {
  int64_t codes_bytes;
  int64_t scales_offset;
  int64_t scales_bytes;
  int64_t total_bytes;
};

inline constexpr int64_t kWireAlignment = 16;

// The message that carries one flat shard of `numel` elements.
AGOQ_HD constexpr WireLayout wire_layout(int64_t numel, Format format, int group_size, DType scale_dtype) {
  const int scale_bytes = scale_dtype == DType::float32 ? 4 : 2;
  const int64_t codes = row_bytes(numel, kFormats[static_cast<int>(format)].bits);
  const int64_t offset = round_up(codes, kWireAlignment);
  const int64_t scales = num_groups(numel, group_size) * scales_per_group(format) * scale_bytes;
  return {codes, offset, scales, offset + round_up(scales, kWireAlignment)};
}

// Where the planes of a row start, in bytes from the row's first byte, for the block of 32 elements `block`.
// 8-bit codes: `low` is the bytes. 4, 5 and 6 bits: `low` is the nibbles, `bit4` and `bit5` the bit planes.
struct BlockOffsets {
  int64_t low;
  int64_t bit4;
  int64_t bit5;
};

template <int Bits>
AGOQ_HD constexpr BlockOffsets block_offsets(int64_t block, int64_t padded) {
  if constexpr (Bits == 8) return {block * 32, 0, 0};
  return {block * 16, padded / 2 + block * 4, padded / 2 + padded / 8 + block * 4};
}

} // namespace agoq
