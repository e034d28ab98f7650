"""Float types and code tables of the oracle: what every bit pattern is worth, exactly.

A float type is named by its torch name without the prefix: "float32", "bfloat16", "float16".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np


@dataclass(frozen=True)
class FloatType:
    """An IEEE 754 binary interchange layout: sign, exponent and fraction bits, with infinities and NaN."""

    exponent_bits: int
    fraction_bits: int
    quiet_nan: int

    @property
    def width(self) -> int:
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def word(self) -> type[np.unsignedinteger[Any]]:
        return np.uint16 if self.width == 16 else np.uint32

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @property
    def largest(self) -> int:
        """Bit pattern of the largest finite value."""
        return self.infinity - 1

    @property
    def sign_bit(self) -> int:
        return 1 << (self.width - 1)

    @property
    def smallest_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return 2 - (1 << (self.exponent_bits - 1))

    def decode(self, bits: int) -> float:
        """Value of a bit pattern; exact, because a Python float holds every value of these types."""
        sign = -1.0 if bits & self.sign_bit else 1.0
        magnitude = bits & (self.sign_bit - 1)
        if magnitude > self.infinity:
            return math.nan
        if magnitude == self.infinity:
            return sign * math.inf
        exponent = magnitude >> self.fraction_bits
        fraction = magnitude & ((1 << self.fraction_bits) - 1)
        if exponent == 0:
            exponent = 1
        else:
            fraction += 1 << self.fraction_bits
        return sign * math.ldexp(fraction, exponent - 1 + self.smallest_exponent - self.fraction_bits)

    def round(self, value: Fraction, direction: str) -> int:
        """Bit pattern of a value rounded "up" (to +inf), "down" or "nearest" (even), kept finite."""
        if value < 0:
            mirrored = {"up": "down", "down": "up", "nearest": "nearest"}[direction]
            return self.sign_bit | self.round(-value, mirrored)
        if value == 0:
            return 0
        numerator, denominator = value.as_integer_ratio()
        exponent = numerator.bit_length() - denominator.bit_length()
        if numerator << max(-exponent, 0) < denominator << max(exponent, 0):
            exponent -= 1  # now 2^exponent <= value < 2^(exponent + 1)
        exponent = max(exponent, self.smallest_exponent)
        shift = self.fraction_bits - exponent
        unit = denominator << max(-shift, 0)
        steps, rest = divmod(numerator << max(shift, 0), unit)
        if direction == "up":
            steps += rest > 0
        elif direction == "nearest":
            steps += 2 * rest > unit or (2 * rest == unit and steps % 2 == 1)
        # Patterns of non-negative values count upwards, so a carry into the exponent comes out right.
        bits = steps + ((exponent - self.smallest_exponent) << self.fraction_bits)
        return min(bits, self.largest)


FLOAT_TYPES = {
    "float32": FloatType(8, 23, 0x7FC00000),
    "bfloat16": FloatType(8, 7, 0x7FC0),
    "float16": FloatType(5, 10, 0x7E00),
}


@dataclass(frozen=True)
class Format:
    """One storage format: its code values in increasing order and what each of its patterns reads as."""

    name: str
    bits: int
    qmax: int  # the scale is amax / qmax
    values: tuple[float, ...]  # the values that are written, increasing, zero once
    codes: tuple[int, ...]  # the code of each of them
    decoded: tuple[float, ...]  # value of every pattern; NaN where it stands for nothing finite
    negative_zero: int | None  # the code written for a negative value that rounds to zero

    @property
    def zero_code(self) -> int:
        return self.codes[self.values.index(0.0)]

    @property
    def has_min(self) -> bool:
        return self.name == "uint4"


# fmt: off
NF4_VALUES = tuple(float(np.float32(value)) for value in (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
))
# fmt: on


def _integer_format(name: str, bits: int) -> Format:
    qmax = 2 ** (bits - 1) - 1
    patterns = range(2**bits)
    if bits == 8:  # two's complement
        decoded = [float(p - 256 if p >= 128 else p) for p in patterns]
    else:  # offset by 2^(bits - 1)
        decoded = [float(p - 2 ** (bits - 1)) for p in patterns]
    values = [float(v) for v in range(-qmax, qmax + 1)]
    return Format(
        name, bits, qmax, tuple(values), tuple(decoded.index(v) for v in values), tuple(decoded), None
    )


def _index_format(name: str, qmax: int, values: tuple[float, ...]) -> Format:
    return Format(name, 4, qmax, values, tuple(range(16)), values, None)


def _sign_magnitude_format(name: str, magnitudes: list[float], qmax: int, keeps_zero_sign: bool) -> Format:
    """A format whose top bit is the sign, from the magnitudes of its lower patterns (NaN: not finite)."""
    half = len(magnitudes)
    decoded = magnitudes + [-m for m in magnitudes]
    if not keeps_zero_sign:
        decoded[half] = 0.0
    written = [p for p in range(2 * half) if not math.isnan(decoded[p]) and p != half]
    written.sort(key=lambda p: decoded[p])
    values = tuple(decoded[p] for p in written)
    bits = half.bit_length()
    return Format(name, bits, qmax, values, tuple(written), tuple(decoded), half if keeps_zero_sign else None)


def _fp8_magnitudes(exponent_bits: int, fraction_bits: int, largest: float) -> list[float]:
    """Values of the patterns 0 to 127 of an OCP 8-bit float; those above `largest` (infinity, NaN) as NaN."""
    smallest_exponent = 2 - 2 ** (exponent_bits - 1)
    magnitudes = []
    for pattern in range(128):
        exponent, fraction = divmod(pattern, 2**fraction_bits)
        if exponent:
            fraction += 2**fraction_bits
        value = math.ldexp(fraction, max(exponent, 1) - 1 + smallest_exponent - fraction_bits)
        magnitudes.append(value if value <= largest else math.nan)
    return magnitudes


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _integer_format("int8", 8),
        _integer_format("int6", 6),
        _integer_format("int5", 5),
        _integer_format("int4", 4),
        _index_format("uint4", 15, tuple(float(i) for i in range(16))),
        _index_format("nf4", 1, NF4_VALUES),
        _sign_magnitude_format("fp4_e2m1", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], 6, True),
        _sign_magnitude_format("fp4_e3m0", [0.0] + [2.0 ** (e - 7) for e in range(1, 8)], 1, False),
        _sign_magnitude_format("fp8_e4m3", _fp8_magnitudes(4, 3, 448.0), 448, True),
        _sign_magnitude_format("fp8_e5m2", _fp8_magnitudes(5, 2, 57344.0), 57344, True),
    )
}
