"""The format table and the sizes that follow from it.

Everything here is arithmetic on shapes: how many bytes a row of codes takes, how many groups it has, and where
the parts of a wire message lie. The native `_host` module computes the same numbers; a test holds them equal.
docs/formats.md is the contract.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

GROUP_SIZES = (32, 64, 128, 256)
SCALE_DTYPES = (torch.bfloat16, torch.float32)
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDINGS = ("nearest", "stochastic")
LAYOUTS = ("rows",)

# A row of codes is padded to a multiple of this many elements with the format's zero code.
ROW_ALIGNMENT = 32
# Each part of a wire message (codes, then scales) is padded to a multiple of this many bytes.
WIRE_ALIGNMENT = 16


@dataclass(frozen=True)
class Format:
    """One code: its width and the constants of its scale.

    Attributes:
        name: the public name.
        bits: bits a code takes in packed storage.
        qmax: the largest code value; a group's scale is its largest magnitude divided by this, rounded up.
            For `uint4` the group's range is divided by it.
        zero_code: the stored pattern that pads rows and fills all-zero groups.
    """

    name: str
    bits: int
    qmax: int
    zero_code: int

    @property
    def has_min(self) -> bool:
        """Whether a group stores (scale, min) rather than a scale alone."""
        return self.name == "uint4"


FORMATS = {
    f.name: f
    for f in (
        Format("int8", 8, 127, 0),
        Format("int6", 6, 31, 32),
        Format("int5", 5, 15, 16),
        Format("int4", 4, 7, 8),
        Format("uint4", 4, 15, 0),
        Format("nf4", 4, 1, 7),
        Format("fp4_e2m1", 4, 6, 0),
        Format("fp4_e3m0", 4, 1, 0),
        Format("fp8_e4m3", 8, 448, 0),
        Format("fp8_e5m2", 8, 57344, 0),
    )
}


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def as_rows(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, cols) of a shape: cols is the last dimension, rows the product of the others; a scalar is 1 x 1."""
    if len(shape) == 0:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]


def row_bytes(cols: int, format: str) -> int:
    """Bytes of one packed row of `cols` elements."""
    return round_up(cols, ROW_ALIGNMENT) * FORMATS[format].bits // 8


def num_groups(cols: int, group_size: int) -> int:
    """Groups in one row of `cols` elements; the last one may be short."""
    return -(-cols // group_size)


def packed_shape(rows: int, cols: int, format: str) -> tuple[int, int]:
    """Shape of the uint8 tensor that holds the codes of a [rows, cols] tensor."""
    return rows, row_bytes(cols, format)


def scales_shape(rows: int, cols: int, format: str, group_size: int) -> tuple[int, ...]:
    """Shape of the scales of a [rows, cols] tensor: [rows, groups], or [rows, groups, 2] = (scale, min)."""
    groups = num_groups(cols, group_size)
    return (rows, groups, 2) if FORMATS[format].has_min else (rows, groups)


@dataclass(frozen=True)
class WireLayout:
    """Where the parts of one wire message lie, in bytes: codes at 0, scales at `scales_offset`."""

    codes_bytes: int
    scales_offset: int
    scales_bytes: int
    total_bytes: int


def wire_layout(numel: int, format: str, group_size: int, scale_dtype: torch.dtype) -> WireLayout:
    """The message that carries one flat shard of `numel` elements (docs/formats.md, "Wire")."""
    codes = row_bytes(numel, format)
    offset = round_up(codes, WIRE_ALIGNMENT)
    scales = math.prod(scales_shape(1, numel, format, group_size)) * scale_dtype.itemsize
    return WireLayout(codes, offset, scales, offset + round_up(scales, WIRE_ALIGNMENT))


def check_format(op: str, format: str, *, argument: str = "format") -> None:
    """Raises ValueError unless `format` names a known format."""
    if format not in FORMATS:
        raise ValueError(f"{op}: {argument} must be one of {', '.join(FORMATS)}; got {format!r}")


def check_group_size(op: str, group_size: int) -> None:
    """Raises ValueError unless `group_size` is supported."""
    if group_size not in GROUP_SIZES:
        raise ValueError(
            f"{op}: group_size must be one of {', '.join(map(str, GROUP_SIZES))}; got {group_size!r}"
        )


def check_scale_dtype(op: str, scale_dtype: torch.dtype) -> None:
    """Raises ValueError unless `scale_dtype` is supported."""
    if scale_dtype not in SCALE_DTYPES:
        raise ValueError(f"{op}: scale_dtype must be torch.bfloat16 or torch.float32; got {scale_dtype}")


def check_rounding(op: str, rounding: str) -> None:
    """Raises ValueError unless `rounding` is supported."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"{op}: rounding must be 'nearest' or 'stochastic'; got {rounding!r}")


def check_float_dtype(op: str, dtype: torch.dtype, *, argument: str) -> None:
    """Raises TypeError unless `dtype` is float32, float16 or bfloat16."""
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{op}: {argument} must be float32, float16 or bfloat16; got {dtype}")
