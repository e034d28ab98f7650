// `_host`: sizes, addresses and format constants for Python, from the same headers as the kernels; no torch.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "../core/codec.h"
#include "../core/layout.h"

namespace py = pybind11;

namespace {

using agoq::DType;
using agoq::Format;

Format format_of(const std::string& name) {
  for (int i = 0; i < agoq::kNumFormats; ++i)
    if (name == agoq::kFormats[i].name) return static_cast<Format>(i);
  throw py::value_error("unknown format '" + name + "'");
}

int bits_of(const std::string& format) { return agoq::kFormats[static_cast<int>(format_of(format))].bits; }

py::tuple wire_layout(int64_t numel, const std::string& format, int group_size, int scale_bytes) {
  const DType dtype = scale_bytes == 4 ? DType::float32 : DType::bfloat16;
  const agoq::WireLayout w = agoq::wire_layout(numel, format_of(format), group_size, dtype);
  return py::make_tuple(w.codes_bytes, w.scales_offset, w.scales_bytes, w.total_bytes);
}

// Byte offsets of a block of 32 elements: of its row, and of its low, bit-4 and bit-5 planes in the row.
py::tuple block_address(int64_t row, int64_t block, int64_t cols, const std::string& format) {
  const int bits = bits_of(format);
  const int64_t padded = agoq::padded_cols(cols);
  const agoq::BlockOffsets at = bits == 8   ? agoq::block_offsets<8>(block, padded)
                                : bits == 6 ? agoq::block_offsets<6>(block, padded)
                                : bits == 5 ? agoq::block_offsets<5>(block, padded)
                                            : agoq::block_offsets<4>(block, padded);
  return py::make_tuple(row * agoq::row_bytes(cols, bits), at.low, at.bit4, at.bit5);
}

double code_value(uint32_t code, const std::string& format) {
  return agoq::with_format(format_of(format), [&](auto f) { return agoq::decode<decltype(f)::value>(code); });
}

} // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Sizes, addresses and format constants of agoq_ext, from the kernels' own headers.";
  m.def("formats", [] {
    py::dict table;
    for (const agoq::FormatInfo& f : agoq::kFormats) table[f.name] = py::make_tuple(f.bits, f.qmax, f.zero_code);
    return table;
  });
  m.def("row_bytes", [](int64_t cols, const std::string& format) { return agoq::row_bytes(cols, bits_of(format)); });
  m.def("num_groups", [](int64_t cols, int group_size) { return agoq::num_groups(cols, group_size); });
  m.def("wire_layout", &wire_layout, py::arg("numel"), py::arg("format"), py::arg("group_size"),
        py::arg("scale_bytes"));
  m.def("block_address", &block_address, py::arg("row"), py::arg("block"), py::arg("cols"), py::arg("format"));
  m.def("code_value", &code_value, py::arg("code"), py::arg("format"));
}
