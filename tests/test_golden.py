"""The committed golden bytes against the exact oracle, the pure-torch reference and the CPU ops.

Every comparison is of bit patterns; a failure names the case and its first differing element.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from golden import generate
from oracle_tables import FLOAT_TYPES, FORMATS, NF4_VALUES

BACKENDS = ("reference", "cpu")
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "formats.md"

Patterns = np.ndarray[Any, np.dtype[Any]]


def ops_of(backend: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(quantize, dequantize) of a backend, imported late so that the oracle's own tests need no build."""
    if backend == "reference":
        from agoq_ext import reference

        return reference.quantize, reference.dequantize
    import agoq_ext  # noqa: F401  (loads the library that registers the ops)

    return torch.ops.agoq.quantize, torch.ops.agoq.dequantize


def to_tensor(patterns: Patterns, dtype: str) -> torch.Tensor:
    """Tensor of float type `dtype` with these bit patterns."""
    signed = np.int16 if patterns.dtype.itemsize == 2 else np.int32
    return torch.from_numpy(patterns.view(signed).copy()).view(getattr(torch, dtype))


def to_patterns(tensor: torch.Tensor) -> Patterns:
    """Bit patterns of a tensor's elements, uint8, uint16 or uint32."""
    signed, unsigned = {
        1: (torch.uint8, np.uint8),
        2: (torch.int16, np.uint16),
        4: (torch.int32, np.uint32),
    }[tensor.element_size()]
    return tensor.contiguous().view(signed).numpy().view(unsigned)


def difference(what: str, expected: Patterns, found: torch.Tensor) -> str | None:
    """Description of the first element that differs, None when all agree."""
    if tuple(found.shape) != expected.shape:
        return f"{what}: shape {tuple(found.shape)}, golden {expected.shape}"
    if found.element_size() != expected.dtype.itemsize:
        return f"{what}: dtype {found.dtype}, golden {expected.dtype}"
    patterns = to_patterns(found)
    wrong = np.argwhere(patterns != expected)
    if not len(wrong):
        return None
    at = tuple(int(i) for i in wrong[0])
    digits = expected.dtype.itemsize * 2
    values = f"{int(patterns[at]):0{digits}x}, golden {int(expected[at]):0{digits}x}"
    return f"{what}{list(at)}: {values} ({len(wrong)} of {expected.size} differ)"


def stored(case: dict[str, Any], format: str, cols: int) -> tuple[Patterns, Patterns]:
    """Golden (packed, scales) of a case."""
    packed = generate.from_hex(case["packed"], np.uint8, oracle.row_bytes(cols, format))
    groups = oracle.group_count(cols, case["group_size"])
    parts = 2 if FORMATS[format].has_min else 1
    scales = generate.from_hex(case["scales"], FLOAT_TYPES[case["scale_dtype"]].word, groups * parts)
    return packed, scales.reshape(len(packed), groups, 2) if parts == 2 else scales


def quantize_differences(
    quantize: Callable[..., Any], golden: dict[str, Any], case: dict[str, Any]
) -> Iterator[str | None]:
    source = golden["inputs"][case["input"]]
    bits = generate.from_hex(source["bits"], np.uint32, source["cols"])
    packed, scales = quantize(
        to_tensor(bits, "float32").to(getattr(torch, source["dtype"])),
        golden["format"],
        case["group_size"],
        getattr(torch, case["scale_dtype"]),
        case["rounding"],
        None if case["seed"] is None else torch.tensor([case["seed"]], dtype=torch.int64),
        case["element_offset"],
    )
    expected_packed, expected_scales = stored(case, golden["format"], source["cols"])
    yield difference("scales", expected_scales, scales)
    yield difference("packed", expected_packed, packed)


def dequantize_differences(
    dequantize: Callable[..., Any], golden: dict[str, Any], case: dict[str, Any]
) -> Iterator[str | None]:
    cols = golden["inputs"][case["input"]]["cols"] if "input" in case else case["cols"]
    packed, scales = stored(case, golden["format"], cols)
    for dtype, lines in case["decoded"].items():
        found = dequantize(
            torch.from_numpy(packed),
            to_tensor(scales, case["scale_dtype"]),
            cols,
            golden["format"],
            case["group_size"],
            getattr(torch, dtype),
        )
        yield difference(f"decoded {dtype}", generate.from_hex(lines, FLOAT_TYPES[dtype].word, cols), found)


def fail_on_differences(
    differences: Callable[..., Iterator[str | None]],
    op: Callable[..., Any],
    format: str,
    parts: tuple[str, ...],
) -> None:
    """Run every case, so that one failure (an exception included) does not hide the next."""
    golden = generate.load(format)
    keys = ("input", "group_size", "scale_dtype", "rounding", "seed", "element_offset")
    problems = []
    for case in [case for part in parts for case in golden[part]]:
        try:
            found = [text for text in differences(op, golden, case) if text]
        except Exception as error:
            found = [f"raised {error!r}"]
        name = " ".join(f"{key}={case[key]}" for key in keys if case.get(key) is not None)
        problems += [f"{name}: {text}" for text in found]
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize("format", FORMATS)
def test_committed_files_match_oracle(format: str) -> None:
    assert generate.first_difference(generate.golden(format), generate.load(format)) is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", FORMATS)
def test_quantize_matches_golden(format: str, backend: str) -> None:
    quantize, _ = ops_of(backend)
    fail_on_differences(quantize_differences, quantize, format, ("quantize",))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", FORMATS)
def test_dequantize_matches_golden(format: str, backend: str) -> None:
    _, dequantize = ops_of(backend)
    fail_on_differences(dequantize_differences, dequantize, format, ("quantize", "decode"))


@pytest.mark.parametrize("format", FORMATS)
def test_wire_cases_hold_codes_then_scales(format: str) -> None:
    for case in generate.load(format)["wire"]:
        sizes = case["codes_bytes"], case["scales_bytes"]
        assert all(size % oracle.WIRE_ALIGNMENT == 0 for size in sizes)
        if "message" not in case:
            continue
        message = bytes.fromhex(case["message"])
        assert len(message) == sum(sizes)
        values = generate.from_hex([case["input"]], np.uint32, case["elements"]).view(np.float32)
        packed, scales = oracle.quantize(values, format, case["group_size"], case["scale_dtype"])
        scales_bytes = scales.tobytes()  # little-endian, as every machine that torch runs on
        assert message[: packed.size] == packed.tobytes()
        assert message[sizes[0] : sizes[0] + len(scales_bytes)] == scales_bytes
        assert not any(message[packed.size : sizes[0]] + message[sizes[0] + len(scales_bytes) :])


# The oracle itself


def test_philox_known_answers() -> None:
    """The known-answer vectors that Random123 publishes for philox4x32-10."""
    ones = 0xFFFFFFFF
    vectors = {
        ((0, 0, 0, 0), (0, 0)): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ((ones, ones, ones, ones), (ones, ones)): "408f276d 41c83b0e a20bc7c6 6d5451fd",
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
        ): "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    for (counter, key), words in vectors.items():
        assert " ".join(f"{word:08x}" for word in oracle.philox4x32(counter, key)) == words


def test_nf4_code_book_derives_from_normal_quantiles() -> None:
    """QLoRA's construction in double precision; the constants come from single precision, hence 1.2e-7."""
    quantile, offset = NormalDist().inv_cdf, 0.9677083
    positive = [quantile(offset + (0.5 - offset) * i / 8) for i in range(8)]
    negative = [-quantile(offset + (0.5 - offset) * i / 7) for i in range(7)]
    derived = sorted([*positive, 0.0, *negative])
    assert NF4_VALUES == pytest.approx([value / derived[-1] for value in derived], abs=1.2e-7)
    assert (NF4_VALUES[0], NF4_VALUES[7], NF4_VALUES[15]) == (-1.0, 0.0, 1.0)


@pytest.mark.parametrize("format, dtype", [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_fp8_patterns_are_those_of_torch(format: str, dtype: str) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).float().tolist()
    for value, decoded in zip(values, FORMATS[format].decoded, strict=True):
        if math.isfinite(value):
            assert struct.pack("<d", value) == struct.pack("<d", decoded)
        else:
            assert math.isnan(decoded)


@pytest.mark.parametrize("format", FORMATS)
def test_code_values_never_move(format: str) -> None:
    """Under a scale of 1, a code value keeps its code for the smallest and for the largest random number."""
    fmt = FORMATS[format]
    for value, code in zip(fmt.values, fmt.codes, strict=True):
        assert {oracle.encode(value, format, u) for u in (None, 0.0, 1 - 2**-24)} == {code}


@pytest.mark.parametrize("format", ["int4", "int5", "uint4"])
def test_worked_examples_of_the_document(format: str) -> None:
    values = np.array([[(i * 7 % 32 - 14) / 2 for i in range(33)]], np.float32)
    packed, scales = oracle.quantize(values, format, 32)
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    assert packed.tobytes().hex(" ") in text
    assert " ".join(f"{int(word):04x}" for word in scales.reshape(-1)) in text
