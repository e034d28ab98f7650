"""Exact, slow oracle of quantize and dequantize, written from docs/formats.md alone: no code of the package.

Every choice between two neighbouring values is decided with rational numbers (`fractions.Fraction`); NumPy
float32 scalars do the single IEEE operations that the contract asks for. Bytes and bit patterns go in and
out, so that signed zeros, NaN patterns and padding can be compared.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable
from fractions import Fraction
from operator import add, mul, sub, truediv
from typing import Any

import numpy as np
from numpy.typing import NDArray
from oracle_tables import FLOAT_TYPES, FORMATS

PAD_ELEMENTS = 32
WIRE_ALIGNMENT = 16
GROUP_SIZES = (32, 64, 128, 256)
SCALE_DTYPES = ("bfloat16", "float32")
FLOAT_DTYPES = ("float32", "float16", "bfloat16")

Bytes = NDArray[np.uint8]
Words = NDArray[Any]  # uint16 or uint32: bit patterns of one float type
Float32 = NDArray[np.float32]


def fl(operation: Callable[[np.float32, np.float32], np.float32], a: float, b: float) -> float:
    """Result of one IEEE float32 operation (`operator.add`, ...), overflow to infinity included."""
    with np.errstate(all="ignore"):
        return float(operation(np.float32(a), np.float32(b)))


def is_negative(value: float) -> bool:
    """True for a set sign bit, that of -0.0 included."""
    return math.copysign(1.0, value) < 0


# Random numbers


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"), Random123 word order."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0 = 0xD2511F53 * c0
        product1 = 0xCD9E8D57 * c2
        c0, c2 = (product1 >> 32) ^ c1 ^ k0, (product0 >> 32) ^ c3 ^ k1
        c1, c3 = product1 & mask, product0 & mask
        k0 = (k0 + 0x9E3779B9) & mask
        k1 = (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1), a multiple of 2^-24, that rounds element `index` under an int64 `seed`."""
    mask = 0xFFFFFFFF
    key = seed & 0xFFFFFFFFFFFFFFFF
    block = index // 4
    words = philox4x32((block & mask, block >> 32 & mask, 0, 0), (key & mask, key >> 32))
    return math.ldexp(words[index % 4] >> 8, -24)


# Sizes and packing


def padded_cols(cols: int) -> int:
    return -(-cols // PAD_ELEMENTS) * PAD_ELEMENTS


def row_bytes(cols: int, format: str) -> int:
    return padded_cols(cols) * FORMATS[format].bits // 8


def group_count(cols: int, group_size: int) -> int:
    return -(-cols // group_size)


def pack_row(codes: list[int], format: str) -> bytes:
    """Bytes of one row of codes, padded with the zero code: bytes, or a nibble plane, then bit planes."""
    fmt = FORMATS[format]
    codes = codes + [fmt.zero_code] * (padded_cols(len(codes)) - len(codes))
    if fmt.bits == 8:
        return bytes(codes)
    packed = bytearray()
    for low, high in zip(codes[0::2], codes[1::2], strict=True):
        packed.append((low & 15) | (high & 15) << 4)
    for bit in range(4, fmt.bits):
        for start in range(0, len(codes), 32):
            plane = sum((code >> bit & 1) << j for j, code in enumerate(codes[start : start + 32]))
            packed += plane.to_bytes(4, "little")
    return bytes(packed)


def unpack_row(packed: bytes, cols: int, format: str) -> list[int]:
    """The first `cols` codes of one packed row."""
    fmt = FORMATS[format]
    if fmt.bits == 8:
        return list(packed[:cols])
    padded = padded_cols(cols)
    codes = [packed[i // 2] >> 4 * (i % 2) & 15 for i in range(cols)]
    for bit in range(4, fmt.bits):
        start = padded // 2 + (bit - 4) * padded // 8
        for i in range(cols):
            plane = int.from_bytes(packed[start + i // 32 * 4 :][:4], "little")
            codes[i] |= (plane >> i % 32 & 1) << bit
    return codes


# Encode


def group_scale(values: list[float], format: str, scale_dtype: str) -> tuple[int, int]:
    """Bit patterns (scale, min) of one group; min is 0 for every format but uint4."""
    fmt = FORMATS[format]
    dtype = FLOAT_TYPES[scale_dtype]
    if not all(map(math.isfinite, values)):
        return dtype.quiet_nan, 0
    if not fmt.has_min:
        amax = max(map(abs, values))
        return dtype.round(Fraction(amax) / fmt.qmax, "up"), 0
    low, high = min(values), max(values)
    min_bits = dtype.round(Fraction(low), "nearest" if low == high else "down")
    if min_bits == dtype.sign_bit:
        min_bits = 0
    if low == high:
        return 0, min_bits
    step = fl(sub, fl(truediv, high, 15.0), fl(truediv, dtype.decode(min_bits), 15.0))
    return dtype.round(Fraction(step), "up"), min_bits


def encode(t: float, format: str, u: float | None) -> int:
    """Code of a scaled value: nearest where `u` is None, else stochastic with that number in [0, 1)."""
    fmt = FORMATS[format]
    values = fmt.values
    if t >= values[-1]:
        index = len(values) - 1
    elif t <= values[0]:
        index = 0
    else:
        index = bisect_right(values, t) - 1
        low, high = values[index], values[index + 1]
        if u is None:
            from_low, from_high = Fraction(t) - Fraction(low), Fraction(high) - Fraction(t)
            up = from_high < from_low or (from_high == from_low and fmt.codes[index] % 2 == 1)
        else:
            up = u < fl(truediv, fl(sub, t, low), fl(sub, high, low))
        index += up
    if values[index] == 0.0 and is_negative(t) and fmt.negative_zero is not None:
        return fmt.negative_zero
    return fmt.codes[index]


def quantize(
    values: Float32,
    format: str,
    group_size: int,
    scale_dtype: str = "bfloat16",
    rounding: str = "nearest",
    seed: int | None = None,
    element_offset: int = 0,
) -> tuple[Bytes, Words]:
    """Encode float32 [rows, cols] (narrower inputs already widened).

    Returns packed uint8 [rows, row_bytes] and the scales' bit patterns, uint16 or uint32 [rows, groups]
    ([rows, groups, 2] = (scale, min) for uint4). `seed` is needed for rounding="stochastic" only.
    """
    assert values.ndim == 2 and values.dtype == np.float32
    assert group_size in GROUP_SIZES and rounding in ("nearest", "stochastic")
    fmt = FORMATS[format]
    dtype = FLOAT_TYPES[scale_dtype]
    rows, cols = values.shape
    packed = np.zeros((rows, row_bytes(cols, format)), np.uint8)
    pairs = np.zeros((rows, group_count(cols, group_size), 2), dtype.word)
    for row in range(rows):
        codes: list[int] = []
        for group, start in enumerate(range(0, cols, group_size)):
            members = [float(v) for v in values[row, start : start + group_size]]
            scale_bits, min_bits = group_scale(members, format, scale_dtype)
            pairs[row, group] = scale_bits, min_bits
            scale, shift = dtype.decode(scale_bits), dtype.decode(min_bits)
            for col, x in enumerate(members, start):
                if scale == 0.0 or math.isnan(scale):
                    codes.append(fmt.zero_code)
                    continue
                t = fl(truediv, fl(sub, x, shift) if fmt.has_min else x, scale)
                u = None
                if rounding == "stochastic":
                    assert seed is not None
                    u = uniform(seed, element_offset + row * cols + col)
                codes.append(encode(t, format, u))
        packed[row] = np.frombuffer(pack_row(codes, format), np.uint8)
    return packed, pairs if fmt.has_min else pairs[..., 0]


# Decode


@functools.lru_cache(maxsize=65536)
def decode(code: int, scale_bits: int, min_bits: int, format: str, scale_dtype: str, out_dtype: str) -> int:
    """Bit pattern in `out_dtype` of one code under its group's scale and min."""
    fmt, dtype = FORMATS[format], FLOAT_TYPES[out_dtype]
    value = fmt.decoded[code]
    scale, shift = (FLOAT_TYPES[scale_dtype].decode(bits) for bits in (scale_bits, min_bits))
    if not (math.isfinite(scale) and math.isfinite(shift) and math.isfinite(value)):
        return dtype.quiet_nan
    result = fl(mul, value, scale)
    if fmt.has_min:
        result = fl(add, result, shift)
    largest = dtype.decode(dtype.largest)
    result = min(max(result, -largest), largest)
    if result == 0.0:
        return dtype.sign_bit if is_negative(result) else 0
    return dtype.round(Fraction(result), "nearest")


def dequantize(
    packed: Bytes, scales: Words, cols: int, format: str, group_size: int, scale_dtype: str, out_dtype: str
) -> Words:
    """Decode packed uint8 [rows, row_bytes] and the scales' patterns to patterns [rows, cols]."""
    rows = packed.shape[0]
    out = np.zeros((rows, cols), FLOAT_TYPES[out_dtype].word)
    for row in range(rows):
        for col, code in enumerate(unpack_row(packed[row].tobytes(), cols, format)):
            entry = scales[row, col // group_size]
            pair = (int(entry[0]), int(entry[1])) if FORMATS[format].has_min else (int(entry), 0)
            out[row, col] = decode(code, *pair, format, scale_dtype, out_dtype)
    return out


# Wire


def wire_sizes(elements: int, format: str, group_size: int, scale_dtype: str) -> tuple[int, int]:
    """Bytes of the codes part and of the scales part of the message for one shard, padding included."""

    def align(size: int) -> int:
        return -(-size // WIRE_ALIGNMENT) * WIRE_ALIGNMENT

    words = group_count(elements, group_size) * (2 if FORMATS[format].has_min else 1)
    return align(row_bytes(elements, format)), align(words * FLOAT_TYPES[scale_dtype].width // 8)


def wire_message(
    packed: Bytes, scales: Words, elements: int, format: str, group_size: int, scale_dtype: str
) -> bytes:
    """The message for one shard (one row of `elements` columns): codes, then scales, padded with zeros."""
    codes_size, scales_size = wire_sizes(elements, format, group_size, scale_dtype)
    codes = packed.tobytes().ljust(codes_size, b"\0")
    little_endian = np.dtype(FLOAT_TYPES[scale_dtype].word).newbyteorder("<")
    return codes + scales.astype(little_endian).tobytes().ljust(scales_size, b"\0")
