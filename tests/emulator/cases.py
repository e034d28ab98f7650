"""The table of the package's kernels: for each, the axes of its cases and how a case becomes a launch with its results.

Results come from `agoq_ext.reference`. A new kernel adds a function that builds a `Trial`, an entry in OPS, its struct
in structs.py and its launcher in kernels/package.cpp.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agoq_ext import layout, reference

from . import structs
from .device import UNWRITTEN, Array, Call, Pointer
from .pairwise import full_product, pairwise

Fields = dict[str, Any]
Case = Mapping[str, Any]

# Where the rows of a dense tensor lie: storage offset in elements, and the row stride for a number of columns.
# "aligned" and "padded" rows may be read by vectors, the others may not; "padded" also has a tail behind whole vectors.
ALIGNMENTS: dict[str, tuple[int, Callable[[int], int]]] = {
    "aligned": (0, lambda cols: cols),
    "offset": (1, lambda cols: cols),
    "strided": (0, lambda cols: cols + 3),
    "padded": (0, lambda cols: layout.round_up(cols, 8) + 8),
}


@dataclass(frozen=True)
class Expected:
    """What a buffer has to hold after the launch.

    Attributes:
        data: its bytes, with UNWRITTEN in gaps.
        dtype: element type for the comparison by tolerance; None where the bits have to be equal.
        atol: of all elements, or a tensor with that of each.
    """

    data: bytes
    dtype: torch.dtype | None = None
    rtol: float = 0.0
    atol: float | Tensor = 0.0


@dataclass(frozen=True)
class Trial:
    """A launch and what it has to leave in its output and inout buffers."""

    call: Call
    expected: dict[str, Expected]


@dataclass(frozen=True)
class Op:
    """One kernel of the table.

    Attributes:
        axes: the values that its cases combine.
        build: from a case to its trial.
        fixed: values of axes that the full product does not multiply, to stay within minutes.
    """

    axes: dict[str, tuple[Any, ...]]
    build: Callable[[Case], Trial]
    fixed: dict[str, Any]

    def cover(self) -> list[Case]:
        """The pairwise cover; and, beyond pairs, every format with rows that kernels may see as one long row."""
        merged = {"rows": 7, "cols": 256, "group_size": 64, "alignment": "aligned"}
        if not {"format", *merged} <= set(self.axes):
            return pairwise(self.axes)
        axes = {name: (merged[name],) if name in merged else values[:1] for name, values in self.axes.items()}
        return [*pairwise(self.axes), *full_product({**axes, "format": self.axes["format"]})]

    def product_axes(self) -> dict[str, tuple[Any, ...]]:
        return {**self.axes, **{name: (value,) for name, value in self.fixed.items()}}


# --- data -----------------------------------------------------------------------------------------------------


def generator(case: Case) -> torch.Generator:
    """Randoms that depend on the case alone."""
    return torch.Generator().manual_seed(zlib.crc32(repr(sorted(case.items())).encode()))


def make_dense(case: Case, g: torch.Generator, dtype: torch.dtype) -> Tensor:
    """[rows, cols] values: ordinary groups, and ones of zeros, constants, denormals, huge, infinite or NaN values."""
    rows, cols, group = case["rows"], case["cols"], case["group_size"]
    x = torch.randn(rows, cols, generator=g) * 10.0 ** torch.randint(-3, 4, (rows, 1), generator=g)
    for row in range(rows):
        for start in range(0, cols, group):
            part = x[row, start : start + group]
            kind, at = torch.randint(24, (2,), generator=g).tolist()
            at %= part.numel()
            if kind == 0:
                part.zero_()
            elif kind == 1:
                part.fill_(-0.75)
            elif kind == 2:
                part.mul_(1e-40)
            elif kind == 3:
                part.mul_(torch.finfo(dtype).max / 20).clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
            elif kind == 4:
                part[at] = torch.inf
            elif kind == 5:
                part[at] = torch.nan
    return x.to(dtype)


def make_packed(case: Case, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Any codes, and scales of all sizes, some of them zero, infinite or NaN."""
    rows, cols, format = case["rows"], case["cols"], case["format"]
    codes = torch.randint(256, layout.packed_shape(rows, cols, format), generator=g).to(torch.uint8)
    shape = layout.scales_shape(rows, cols, format, case["group_size"])
    scales = torch.randn(shape, generator=g) * 10.0 ** torch.randint(-4, 5, shape, generator=g)
    if not layout.FORMATS[format].has_min:
        scales = scales.abs()
    flat = scales.view(-1)
    for special in (0.0, 1e-40, 3e38, torch.inf, torch.nan):
        if torch.rand((), generator=g) < 0.3:
            flat[int(torch.randint(flat.numel(), (), generator=g))] = special
    return codes, scales.to(case["scale_dtype"])


def to_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# --- buffers --------------------------------------------------------------------------------------------------


def dense_array(name: str, role: str, x: Tensor, alignment: str) -> tuple[Array, Fields]:
    """A [rows, cols] tensor in memory, and its `Dense` struct."""
    offset, stride_of = ALIGNMENTS[alignment]
    rows, cols, size = *x.shape, x.element_size()
    stride = stride_of(cols)
    data = bytearray([UNWRITTEN]) * (((rows - 1) * stride + cols) * size)
    content = to_bytes(x)
    for row in range(rows):
        start = row * stride * size
        data[start : start + cols * size] = content[row * cols * size : (row + 1) * cols * size]
    gaps = tuple((((row * stride) + cols) * size, (row + 1) * stride * size) for row in range(rows - 1))
    array = Array(name, role, bytes(data), misalignment=offset * size, gaps=gaps if stride > cols else ())
    return array, {"data": Pointer(name), "dtype": dtype_index(x.dtype), "row_stride": stride}


def dtype_index(dtype: torch.dtype) -> int:
    return structs.DTYPES.index(str(dtype).removeprefix("torch."))


def packed_fields(case: Case, codes: Pointer, scales: Pointer) -> Fields:
    """The `Packed` struct of a case."""
    return {
        "codes": codes,
        "scales": scales,
        "scale_dtype": dtype_index(case["scale_dtype"]),
        "format": structs.FORMATS.index(case["format"]),
        "group_size": case["group_size"],
        "rows": case["rows"],
        "cols": case["cols"],
    }


def packed_arrays(role: str, codes: Tensor, scales: Tensor) -> tuple[Array, Array]:
    """Codes and scales, where they lie in a message: at multiples of 16 bytes."""
    return (
        Array("codes", role, to_bytes(codes), misalignment=16),
        Array("scales", role, to_bytes(scales), misalignment=48),
    )


def rounding_fields(case: Case, g: torch.Generator) -> tuple[tuple[Array, ...], Fields, dict[str, Any]]:
    """The seed's buffer if there is one, the `Rounding` struct, and the reference's arguments."""
    offset = case["element_offset"]
    if case["rounding"] == "nearest":
        fields = {"stochastic": False, "seed": None, "element_offset": offset}
        return (), fields, {"rounding": "nearest", "seed": None, "element_offset": offset}
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), generator=g)
    fields = {"stochastic": True, "seed": Pointer("seed"), "element_offset": offset}
    return (
        (Array("seed", "input", to_bytes(seed)),),
        fields,
        {"rounding": "stochastic", "seed": seed, "element_offset": offset},
    )


def message_of(codes: Tensor, scales: Tensor) -> tuple[Array, Fields]:
    """W shards, [codes, scales] each, one after the other as in a receive buffer, and their `Shards` strides."""
    shards, parts = codes.shape[0], []
    scales_at = layout.round_up(codes[0].numel(), 16)
    total = scales_at + layout.round_up(scales[0].numel() * scales.element_size(), 16)
    for shard in range(shards):
        content = to_bytes(codes[shard]).ljust(scales_at, b"\xaa") + to_bytes(scales[shard])
        parts.append(content.ljust(total, b"\xaa"))
    strides = {"count": shards, "codes_stride": total, "scales_stride": total // scales.element_size()}
    return Array("shards", "input", b"".join(parts)), {"scales_at": scales_at, **strides}


def make_shards(case: Case, g: torch.Generator) -> tuple[Tensor, Tensor, Array, Fields]:
    """Codes and scales [W, ...], their receive buffer, and the `Shards` struct."""
    pairs = [make_packed(case, g) for _ in range(case["shards"])]
    codes, scales = torch.stack([c for c, _ in pairs]), torch.stack([s for _, s in pairs])
    array, fields = message_of(codes, scales)
    first = packed_fields(case, Pointer("shards"), Pointer("shards", fields.pop("scales_at")))
    return codes, scales, array, {"first": first, **fields}


# --- kernels --------------------------------------------------------------------------------------------------


def build_quantize(case: Case) -> Trial:
    g = generator(case)
    x = make_dense(case, g, case["dtype"])
    seed, rounding, arguments = rounding_fields(case, g)
    codes, scales = reference.quantize(
        x, case["format"], case["group_size"], case["scale_dtype"], **arguments
    )
    x_array, dense = dense_array("x", "input", x, case["alignment"])
    fields = {
        "x": dense,
        "out": packed_fields(case, Pointer("codes"), Pointer("scales")),
        "rounding": rounding,
    }
    arrays = (x_array, *packed_arrays("output", codes, scales), *seed)
    expected = {"codes": Expected(to_bytes(codes)), "scales": Expected(to_bytes(scales))}
    return Trial(Call("quantize", structs.QuantizeArgs, fields, arrays), expected)


def build_dequantize(case: Case) -> Trial:
    codes, scales = make_packed(case, generator(case))
    out = reference.dequantize(codes, scales, case["cols"], case["format"], case["group_size"], case["dtype"])
    out_array, dense = dense_array("out", "output", out, case["alignment"])
    fields = {"in": packed_fields(case, Pointer("codes"), Pointer("scales")), "out": dense}
    arrays = (*packed_arrays("input", codes, scales), out_array)
    return Trial(
        Call("dequantize", structs.DequantizeArgs, fields, arrays), {"out": Expected(out_array.data)}
    )


def build_accumulate(case: Case) -> Trial:
    g = generator(case)
    codes, scales = make_packed(case, g)
    x, factor = make_dense(case, g, case["dtype"]), 0.37
    seed, rounding, arguments = rounding_fields(case, g)
    x_array, dense = dense_array("x", "input", x, case["alignment"])
    fields = {
        "inout": packed_fields(case, Pointer("codes"), Pointer("scales")),
        "x": dense,
        "factor": factor,
        "rounding": rounding,
    }
    arrays = (*packed_arrays("inout", codes, scales), x_array, *seed)
    new_codes, new_scales = codes.clone(), scales.clone()
    reference.accumulate_(new_codes, new_scales, x, factor, case["format"], case["group_size"], **arguments)
    expected = {"codes": Expected(to_bytes(new_codes)), "scales": Expected(to_bytes(new_scales))}
    return Trial(Call("accumulate", structs.AccumulateArgs, fields, arrays), expected)


def build_reduce(case: Case) -> Trial:
    codes, scales, shards, shard_fields = make_shards(case, generator(case))
    factor = 1 / case["shards"]
    out = reference.reduce(
        codes, scales, case["cols"], case["format"], case["group_size"], factor, case["dtype"]
    )
    out_array, dense = dense_array("out", "output", out, case["alignment"])
    fields = {"in": shard_fields, "factor": factor, "out": dense}
    call = Call("reduce", structs.ReduceArgs, fields, (shards, out_array))
    return Trial(call, {"out": Expected(out_array.data)})


def build_reduce_quantize(case: Case) -> Trial:
    g = generator(case)
    codes, scales, shards, shard_fields = make_shards(case, g)
    seed, rounding, arguments = rounding_fields(case, g)
    factor, format, group = 1 / case["shards"], case["format"], case["group_size"]
    total = reference.reduce(codes, scales, case["cols"], format, group, factor, torch.float32)
    new_codes, new_scales = reference.quantize(total, format, group, case["scale_dtype"], **arguments)
    fields = {
        "in": shard_fields,
        "factor": factor,
        "out": packed_fields(case, Pointer("codes"), Pointer("scales")),
        "rounding": rounding,
    }
    arrays = (shards, *packed_arrays("output", new_codes, new_scales), *seed)
    expected = {"codes": Expected(to_bytes(new_codes)), "scales": Expected(to_bytes(new_scales))}
    return Trial(Call("reduce_quantize", structs.ReduceQuantizeArgs, fields, arrays), expected)


def build_norm(case: Case) -> Trial:
    codes, scales = make_packed(case, generator(case))
    if case["finite"]:
        scales = torch.where(scales.isfinite() & (scales.abs() < 1e30), scales, torch.ones_like(scales))
    total, nonfinite = reference.norm(codes, scales, case["cols"], case["format"], case["group_size"])
    chunks = case["rows"] * -(-case["cols"] // reference.NORM_CHUNK)
    args = {"in": packed_fields(case, Pointer("codes"), Pointer("scales")), "partial": Pointer("partial")}
    fields = {"args": args, "sum": Pointer("sum"), "nonfinite": Pointer("nonfinite")}
    outputs = [
        Array(name, "output", bytes(size))
        for name, size in (("partial", 8 * chunks), ("sum", 8), ("nonfinite", 1))
    ]
    call = Call("norm", structs.NormCall, fields, (*packed_arrays("input", codes, scales), *outputs))
    return Trial(call, {"sum": Expected(to_bytes(total)), "nonfinite": Expected(to_bytes(nonfinite))})


# --- the table ------------------------------------------------------------------------------------------------

_CODEC: dict[str, tuple[Any, ...]] = {
    "format": tuple(layout.FORMATS),
    "group_size": layout.GROUP_SIZES,
    "scale_dtype": layout.SCALE_DTYPES,
    "cols": (1, 31, 32, 33, 100, 130, 256, 300),
    "rows": (1, 7),
}
_DENSE: dict[str, tuple[Any, ...]] = {"dtype": layout.FLOAT_DTYPES, "alignment": tuple(ALIGNMENTS)}
_ROUNDING: dict[str, tuple[Any, ...]] = {"rounding": layout.ROUNDINGS, "element_offset": (0, 6)}
_SHARDS: dict[str, tuple[Any, ...]] = {"shards": (1, 3)}

OPS = {
    "quantize": Op({**_CODEC, **_DENSE, **_ROUNDING}, build_quantize, {"rows": 7, "element_offset": 6}),
    "dequantize": Op({**_CODEC, **_DENSE}, build_dequantize, {"rows": 7}),
    "accumulate": Op({**_CODEC, **_DENSE, **_ROUNDING}, build_accumulate, {"rows": 7, "element_offset": 6}),
    "reduce": Op({**_CODEC, **_DENSE, **_SHARDS}, build_reduce, {"rows": 7, "shards": 3}),
    "reduce_quantize": Op(
        {**_CODEC, **_ROUNDING, **_SHARDS}, build_reduce_quantize, {"rows": 7, "element_offset": 6}
    ),
    "norm": Op(
        {**_CODEC, "cols": (1, 33, 256, 300, 16384 + 40), "finite": (True, False)}, build_norm, {"rows": 3}
    ),
}
