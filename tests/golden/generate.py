"""Writes the golden files, one per format, from the exact oracle; with --check compares them with it.

    python tests/golden/generate.py            write tests/golden/<format>.json.gz
    python tests/golden/generate.py --check    exit 1 and name the first difference, writing nothing

Everything is deterministic: inputs come from integers and from `random.Random.random`, which Python keeps
stable. Comparison is of the JSON contents, since compressed bytes may differ between zlib versions.
docs/formats.md describes the files.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import math
import random
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import oracle  # noqa: E402
from oracle_tables import FLOAT_TYPES, FORMATS  # noqa: E402

VERSION = 1
THRESHOLD_SEED = 0x5EED5EED5EED
FLT_MAX = float(np.finfo(np.float32).max)
Rows = list[list[float]]
Case = dict[str, Any]


def to_hex(words: oracle.Words | oracle.Bytes) -> list[str]:
    """One string per row: fixed-width hexadecimal numerals of the elements, in order."""
    width = words.dtype.itemsize * 2
    return ["".join(f"{int(word):0{width}x}" for word in row.reshape(-1)) for row in words]


def from_hex(lines: list[str], word: type[np.unsignedinteger[Any]], elements: int) -> oracle.Words:
    """The [rows, elements] array that `to_hex` wrote."""
    stored = np.frombuffer(bytes.fromhex("".join(lines)), np.dtype(word).newbyteorder(">"))
    return stored.astype(word).reshape(len(lines), elements)


# Inputs


def as_dtype(rows: Rows, dtype: str) -> oracle.Float32:
    """The values rounded to `dtype` (infinities and NaN kept), as float32."""
    kind = FLOAT_TYPES[dtype]

    def one(value: float) -> float:
        if not math.isfinite(value) or value == 0.0:
            return value
        return kind.decode(kind.round(Fraction(value), "nearest"))

    return np.array([[one(value) for value in row] for row in rows], np.float32)


def random_rows(rows: int, cols: int, seed: int) -> Rows:
    """Bell-shaped values of a different size and offset in each row, a few of them outliers."""
    draw = random.Random(seed).random
    out = []
    for row in range(rows):
        size = 2.0 ** (8 * draw() - 6)
        offset = (0.0, 0.75, -2.5)[row % 3] * size
        out.append(
            [
                (draw() + draw() + draw() + draw() - 2.0) * size * (16.0 if draw() < 0.02 else 1.0) + offset
                for _ in range(cols)
            ]
        )
    return out


def edge_rows(qmax: int) -> Rows:
    """Groups of 32 with extreme, tiny, equal and non-finite values."""
    inf, nan, tiny = math.inf, math.nan, 2.0**-149
    one_ulp = 1.0 + 2.0**-23
    # amax / qmax exactly a denormal scale, and a hair above it, which a rounded division loses.
    exact = np.float32(qmax * 2.0**-133)
    above = np.nextafter(exact, np.float32(1.0))
    alternating = [(-1.0) ** i * (i + 1) / 32 for i in range(32)]
    heads: Rows = [
        [0.0] * 32,
        [-0.0] * 32,
        [0.0, -0.0] * 16,
        [-0.0, -1.0, 1.0, -1e-10, 1e-10, -tiny, tiny, 0.25],
        [1e-36] * 32,
        [a * 1e-36 for a in alternating],
        [a * 1e-40 for a in alternating],
        [a * 1.2e-37 for a in alternating],
        [tiny, 0.0],
        [-tiny, 0.0, tiny],
        [tiny] * 32,
        [-tiny] * 32,
        [i * tiny for i in range(32)],
        [a * FLT_MAX for a in alternating],
        [FLT_MAX, 1.0, -1.0, 2.0**64, -(2.0**120)],
        [-FLT_MAX, 1.0, 2.0**127],
        [FLT_MAX] * 32,
        [-FLT_MAX] * 32,
        [FLT_MAX, -FLT_MAX] * 16,
        [65504.0, -65504.0, 65505.0, 65520.0, 1.0, 0.1],
        [a * 1e5 for a in alternating],
        [nan] + alternating[1:],
        alternating[:31] + [inf],
        alternating[:15] + [-inf] + alternating[16:],
        [inf, -inf, nan, FLT_MAX],
        [0.1] * 32,
        [-0.1] * 32,
        [1.0, one_ulp] * 16,
        [-1.0, -one_ulp] * 16,
        [5.0 + i / 32 for i in range(32)],
        [-5.0 - i / 32 for i in range(32)],
        [2.0**20 + i / 8 for i in range(32)],
        [1.0] + [2.0**-i for i in range(1, 32)],
        [-3.0] * 31 + [2.0],
        [float(exact)],
        [float(above), float(-exact)],
        [(5 * qmax + 1) * tiny, -tiny],
    ]
    return [head + [0.0] * (32 - len(head)) for head in heads]


def narrow_edge_rows(dtype: str) -> Rows:
    """Groups of 32 at the ends of a 16-bit type's range."""
    kind = FLOAT_TYPES[dtype]
    largest, smallest = kind.decode(kind.largest), kind.decode(1)
    heads: Rows = [
        [largest, -largest, largest / 2, 1.0],
        [largest] * 32,
        [smallest, -smallest],
        [i * smallest for i in range(32)],
        [kind.decode(kind.infinity), 1.0],
        [math.nan, 1.0],
        [-0.0] * 32,
        [0.1] * 32,
    ]
    return [head + [0.0] * (32 - len(head)) for head in heads]


def tie_rows(format: str, scale: float) -> Rows:
    """Groups of 32 with an exact scale: each code value, each midpoint of two, and its float32 neighbours.

    The first element fixes the scale; uint4 has its min of 0 in the second.
    """
    fmt = FORMATS[format]
    points: list[float] = list(fmt.values) + [-0.0]
    for low, high in zip(fmt.values, fmt.values[1:], strict=False):
        middle = np.float32((low + high) / 2)
        below, above = (np.nextafter(middle, np.float32(end)) for end in (-math.inf, math.inf))
        points += [float(below), float(middle), float(above)]
    head = [float(fmt.qmax), 0.0]
    return [
        [value * scale for value in (head + points[start : start + 30] + [0.0] * 30)[:32]]
        for start in range(0, len(points), 30)
    ]


def threshold_rows(format: str, seed: int) -> Rows:
    """One group of 32 whose scaled values sit exactly on, or one step above, the random number that rounds them.

    On it the lower of the two neighbours is right, above it the higher one. Exact for all formats but nf4.
    """
    fmt = FORMATS[format]
    step = np.float32(fmt.values[fmt.values.index(0.0) + 1])
    row = [float(fmt.qmax), 0.0]
    for index in range(2, 32):
        u = np.float32(oracle.uniform(seed, index))
        if index % 4 == 3 and fmt.values[0] < 0:
            row.append(float((u - np.float32(1)) * step))
        else:
            row.append(float((np.nextafter(u, np.float32(1)) if index % 2 else u) * step))
    return [row]


# Cases


def make_inputs(format: str) -> dict[str, tuple[str, oracle.Float32]]:
    """Name -> (input dtype, float32 [rows, cols])."""
    inputs: dict[str, tuple[str, oracle.Float32]] = {}
    shapes = [(1, 1), (3, 31), (2, 33), (2, 64), (2, 100), (2, 130), (1, 300), (2, 300)]
    for index, (rows, cols) in enumerate(shapes):
        dtype = oracle.FLOAT_DTYPES[index % 3]
        inputs[f"random-{rows}x{cols}"] = dtype, as_dtype(random_rows(rows, cols, 1000 + index), dtype)
    inputs["edges"] = "float32", as_dtype(edge_rows(FORMATS[format].qmax), "float32")
    for dtype in ("float16", "bfloat16"):
        inputs[f"edges-{dtype}"] = dtype, as_dtype(narrow_edge_rows(dtype), dtype)
    inputs["ties"] = "float32", as_dtype(tie_rows(format, 0.25), "float32")
    inputs["thresholds"] = "float32", as_dtype(threshold_rows(format, THRESHOLD_SEED), "float32")
    for shape in ((0, 5), (2, 0)):
        inputs["empty-{}x{}".format(*shape)] = "float32", np.zeros(shape, np.float32)
    return inputs


def quantize_settings() -> Iterator[tuple[str, int, str, str, int, int]]:
    """(input, group_size, scale_dtype, rounding, seed, element_offset) of every case."""
    by_group_size = {
        32: ("random-2x33", "random-3x31", "random-2x100", "random-2x130"),
        64: ("random-2x130", "random-2x100", "random-2x64", "random-1x1"),
        128: ("random-1x300", "random-2x130", "random-2x33", "random-2x130"),
        256: ("random-2x300", "random-1x300", "random-2x100", "random-3x31"),
    }
    number = 0
    for group_size, names in by_group_size.items():
        kinds = [(s, r) for s in oracle.SCALE_DTYPES for r in ("nearest", "stochastic")]
        for name, (scale_dtype, rounding) in zip(names, kinds, strict=True):
            number += 1
            yield name, group_size, scale_dtype, rounding, number, 0
    for scale_dtype in oracle.SCALE_DTYPES:
        yield "edges", 32, scale_dtype, "nearest", 0, 0
        yield "edges-float16", 32, scale_dtype, "nearest", 0, 0
        yield "edges-bfloat16", 64, scale_dtype, "nearest", 0, 0
    yield "edges", 32, "bfloat16", "stochastic", 77, 0
    yield "ties", 32, "bfloat16", "nearest", 0, 0
    yield "ties", 32, "float32", "stochastic", -1, 0
    yield "thresholds", 32, "float32", "stochastic", THRESHOLD_SEED, 0
    # Seeds and offsets that need all 64 bits, and offsets that are no multiple of 4.
    yield "random-2x33", 32, "bfloat16", "stochastic", -(2**63), 3
    yield "random-2x33", 64, "float32", "stochastic", 0x0123456789ABCDEF, 2**34 + 2
    yield "random-2x33", 32, "float32", "stochastic", 2**63 - 1, 2**40 - 1
    for name in ("empty-0x5", "empty-2x0"):
        yield name, 32, "bfloat16", "nearest", 0, 0


def decoded(
    packed: oracle.Bytes, scales: oracle.Words, cols: int, case: Case, format: str, dtypes: tuple[str, ...]
) -> dict[str, list[str]]:
    group_size, scale_dtype = case["group_size"], case["scale_dtype"]
    return {
        dtype: to_hex(oracle.dequantize(packed, scales, cols, format, group_size, scale_dtype, dtype))
        for dtype in dtypes
    }


def quantize_case(format: str, values: oracle.Float32, case: Case) -> Case:
    """The case with its packed bytes, scales and decoded values filled in."""
    packed, scales = oracle.quantize(
        values,
        format,
        case["group_size"],
        case["scale_dtype"],
        case["rounding"],
        case["seed"],
        case["element_offset"],
    )
    # The decode cases cover every code in every output dtype; leaving some out here keeps the files small.
    every = case["rounding"] == "nearest" and case["input"] != "ties"
    dtypes = oracle.FLOAT_DTYPES if every else oracle.FLOAT_DTYPES[:1]
    outputs = {"packed": to_hex(packed), "scales": to_hex(scales)}
    return case | outputs | {"decoded": decoded(packed, scales, values.shape[1], case, format, dtypes)}


def decode_case(format: str, scale_dtype: str) -> Case:
    """Every code (those that are never written included) under ordinary, extreme and non-finite scales."""
    fmt = FORMATS[format]
    kind = FLOAT_TYPES[scale_dtype]
    codes = list(range(2**fmt.bits)) * max(1, 32 >> fmt.bits)
    codes = codes[::-1] + codes[:1]  # cols is no multiple of 32
    cols, group_size = len(codes), 256 if fmt.bits == 8 else 64
    ordinary = kind.round(Fraction(3, 7), "nearest")
    scale_bits = [ordinary, 0, 1, kind.largest, kind.infinity, kind.quiet_nan]
    scale_bits += [kind.sign_bit | kind.quiet_nan | 1, kind.infinity + 1]
    pairs = [(bits, 0) for bits in scale_bits]
    if fmt.has_min:
        pairs += [
            (ordinary, min_bits)
            for min_bits in (kind.infinity, kind.sign_bit | kind.infinity, kind.quiet_nan, kind.largest)
        ]
        pairs += [
            (kind.largest, kind.sign_bit | kind.largest),
            (ordinary, kind.sign_bit | ordinary),
            (0, ordinary),
        ]
    packed = np.array([list(oracle.pack_row(codes, format))] * len(pairs), np.uint8)
    groups = oracle.group_count(cols, group_size)
    scales = np.array([[pair] * groups for pair in pairs], kind.word)
    scales = scales if fmt.has_min else scales[..., 0]
    case: Case = {"cols": cols, "group_size": group_size, "scale_dtype": scale_dtype}
    outputs = {"packed": to_hex(packed), "scales": to_hex(scales)}
    return case | outputs | {"decoded": decoded(packed, scales, cols, case, format, oracle.FLOAT_DTYPES)}


def wire_case(format: str, elements: int, group_size: int, scale_dtype: str) -> Case:
    """Sizes of one shard's message; for the short ones also its bytes, of nearest-rounded known values."""
    sizes = oracle.wire_sizes(elements, format, group_size, scale_dtype)
    case: Case = {"elements": elements, "group_size": group_size, "scale_dtype": scale_dtype}
    case |= {"codes_bytes": sizes[0], "scales_bytes": sizes[1]}
    if elements <= 33:
        values = np.array([[(i * 37 % 101 - 50) / 16 for i in range(elements)]], np.float32)
        packed, scales = oracle.quantize(values, format, group_size, scale_dtype)
        message = oracle.wire_message(packed, scales, elements, format, group_size, scale_dtype)
        case |= {"input": to_hex(values.view(np.uint32))[0], "message": message.hex()}
    return case


def golden(format: str) -> Case:
    """Contents of one golden file."""
    inputs = make_inputs(format)
    cases = []
    for name, group_size, scale_dtype, rounding, seed, offset in quantize_settings():
        stochastic = rounding == "stochastic"
        case = {
            "input": name,
            "group_size": group_size,
            "scale_dtype": scale_dtype,
            "rounding": rounding,
            "seed": seed if stochastic else None,
            "element_offset": offset,
        }
        cases.append(quantize_case(format, inputs[name][1], case))
    return {
        "version": VERSION,
        "format": format,
        "inputs": {
            name: {"dtype": dtype, "cols": values.shape[1], "bits": to_hex(values.view(np.uint32))}
            for name, (dtype, values) in inputs.items()
        },
        "quantize": cases,
        "decode": [decode_case(format, scale_dtype) for scale_dtype in oracle.SCALE_DTYPES],
        "wire": [
            wire_case(format, elements, group_size, scale_dtype)
            for elements, group_size, scale_dtype in (
                (0, 32, "bfloat16"),
                (1, 32, "bfloat16"),
                (33, 32, "float32"),
                (100, 64, "bfloat16"),
                (1000, 128, "bfloat16"),
                (2**31 + 5, 256, "float32"),
            )
        ],
    }


def path_of(format: str) -> Path:
    return HERE / f"{format}.json.gz"


@functools.cache
def load(format: str) -> Case:
    """The committed golden file; shared between callers, not to be changed."""
    contents: Case = json.loads(gzip.decompress(path_of(format).read_bytes()))
    return contents


def first_difference(expected: Any, found: Any, where: str = "") -> str | None:
    """Path of the first place where two JSON values differ, with both sides."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() | found.keys()):
            if key not in expected or key not in found:
                return f"{where}.{key} exists on one side only"
            if difference := first_difference(expected[key], found[key], f"{where}.{key}"):
                return difference
        return None
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return next(
            filter(
                None, map(first_difference, expected, found, [f"{where}[{i}]" for i in range(len(found))])
            ),
            None,
        )
    return None if expected == found else f"{where}: oracle {expected!r}, file {found!r}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--check", action="store_true", help="compare with the committed files, write nothing"
    )
    arguments = parser.parse_args()
    differences = 0
    for format in FORMATS:
        contents = golden(format)
        if arguments.check:
            difference = first_difference(contents, load(format))
            print(f"{format}: {difference or 'same'}")
            differences += difference is not None
        else:
            text = json.dumps(contents, separators=(",", ":")).encode()
            path_of(format).write_bytes(gzip.compress(text, 9, mtime=0))
            print(f"{format}: {len(text)} bytes of JSON, {path_of(format).stat().st_size} compressed")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
