"""The CUDA kernels, compiled for the emulator from src/cuda/*.cu, against the reference, under the checker.

Every kernel of `emulator.cases` and `emulator.fused_cases` runs its pairwise cover of formats, group sizes, dtypes,
roundings, tails and alignments under several schedules; the full product runs under the mark `slow`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulator import build, cases, structs
from emulator.cases import Case, Expected, Trial
from emulator.device import Call, Device, Schedule, schedules
from emulator.fused_cases import FUSED_OPS
from emulator.pairwise import full_product, pairwise
from emulator.worker import run_sanitized

from agoq_ext import layout

REASON = build.reason_not_to_run()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

OPS = {**cases.OPS, **FUSED_OPS}
SCHEDULES = schedules(random=1)
OUTPUT_CODES = ("quantize", "row_norm_quantize", "swiglu_quantize", "gelu_quantize")
COVER = [(name, case) for name, op in OPS.items() for case in op.cover()]


def case_id(value: Any) -> str | None:
    if isinstance(value, dict):
        return "-".join(str(v).removeprefix("torch.") for v in value.values())
    return None


@pytest.fixture(scope="module")
def checker() -> Device:
    return Device(build.library("package", "check"))


def complaint(expected: Expected, found: bytes) -> str | None:
    """How a buffer differs from what it has to hold; None if it does not."""
    if found == expected.data:
        return None
    if expected.dtype is None:
        at = next(i for i, (a, b) in enumerate(zip(expected.data, found, strict=True)) if a != b)
        different = sum(a != b for a, b in zip(expected.data, found, strict=True))
        pair = f"{found[at]:#04x}, not {expected.data[at]:#04x}"
        return f"{different} of {len(found)} bytes differ, the first is byte {at}: {pair}"
    want, got = (
        torch.frombuffer(bytearray(data), dtype=expected.dtype).double() for data in (expected.data, found)
    )
    error, allowed = (got - want).abs(), expected.atol + expected.rtol * want.abs()
    near = (error <= allowed) & want.isfinite() | (got == want) | (got.isnan() & want.isnan())
    if near.all():
        return None
    wrong, at = int((~near).sum()), int((~near).nonzero()[0])
    return f"{wrong} of {near.numel()} elements differ, the first is element {at}: {got[at]}, not {want[at]}"


def check(device: Device, trial: Trial, schedule: Schedule) -> None:
    result = device.run(trial.call, schedule)
    assert (result.status, result.findings) == (0, []), f"{schedule}:\n" + "\n".join(
        map(str, result.findings)
    )
    for name, expected in trial.expected.items():
        difference = complaint(expected, result.arrays[name])
        assert difference is None, f"{schedule}: {name}: {difference}"


@pytest.mark.parametrize(("name", "case"), COVER, ids=case_id)
def test_kernel(checker: Device, name: str, case: Case) -> None:
    trial = OPS[name].build(case)
    for schedule in SCHEDULES:
        check(checker, trial, schedule)


@pytest.mark.parametrize("name", ["row_norm_quantize", "row_norm_backward"])
def test_rows_that_shared_memory_does_not_hold(checker: Device, name: str) -> None:
    first = {axis: values[0] for axis, values in OPS[name].axes.items()}
    long = {"cols": 24640, "rows": 3, "dtype": torch.bfloat16, "parts": "pairs"}
    for centered in (False, True):
        case = {**first, **long, "centered": centered}
        check(checker, OPS[name].build({k: v for k, v in case.items() if k in first}), Schedule("random", 1))


@pytest.mark.parametrize("name", ["reduce", "reduce_quantize"])
def test_1024_shards(checker: Device, name: str) -> None:
    first = {axis: values[0] for axis, values in OPS[name].axes.items()}
    for format, scale_dtype in (("int8", torch.float32), ("int5", torch.bfloat16), ("uint4", torch.bfloat16)):
        case = {**first, "format": format, "scale_dtype": scale_dtype, "cols": 40, "shards": 1024}
        check(checker, OPS[name].build(case), Schedule("random", 1))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("format", layout.FORMATS)
@pytest.mark.parametrize("name", OPS)
def test_kernel_full_product(checker: Device, name: str, format: str) -> None:
    order = 0
    for case in full_product({**OPS[name].product_axes(), "format": (format,)}):
        order += 1
        try:
            check(checker, OPS[name].build(case), SCHEDULES[order % len(SCHEDULES)])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OPS)
def test_kernel_under_sanitizers(name: str) -> None:
    trials = [OPS[name].build(case) for case in OPS[name].cover()]
    outcome = run_sanitized(
        build.library("package", "asan"), [(trial.call, Schedule("random", 1)) for trial in trials]
    )
    assert outcome.report == ""
    for trial, result in zip(trials, outcome.results, strict=True):
        for buffer, expected in trial.expected.items():
            assert complaint(expected, result.arrays[buffer]) is None, (trial.call, buffer)


@pytest.mark.parametrize(("rows", "cols"), [(0, 128), (3, 0)])
def test_empty_tensors_launch_nothing(checker: Device, rows: int, cols: int) -> None:
    case = {"format": "int4", "group_size": 128, "scale_dtype": torch.bfloat16, "rows": rows, "cols": cols}
    packed = {**cases.packed_fields(case, None, None)}  # type: ignore[arg-type]
    dense = {"data": None, "dtype": 0, "row_stride": cols}
    rounding = {"stochastic": False, "seed": None, "element_offset": 0}
    shards = {"first": packed, "count": 2, "codes_stride": 0, "scales_stride": 0}
    calls = [
        Call("quantize", structs.QuantizeArgs, {"x": dense, "out": packed, "rounding": rounding}, ()),
        Call("dequantize", structs.DequantizeArgs, {"in": packed, "out": dense}, ()),
        Call(
            "accumulate",
            structs.AccumulateArgs,
            {"inout": packed, "x": dense, "factor": 1.0, "rounding": rounding},
            (),
        ),
        Call("reduce", structs.ReduceArgs, {"in": shards, "factor": 1.0, "out": dense}, ()),
        Call(
            "reduce_quantize",
            structs.ReduceQuantizeArgs,
            {"in": shards, "factor": 1.0, "out": packed, "rounding": rounding},
            (),
        ),
    ]
    for call in calls:
        result = checker.run(call)
        assert (result.status, result.findings) == (0, []), call.kernel


MISALIGNED_ADDRESS = 716  # cudaErrorMisalignedAddress


def moved(call: Call, role: str) -> Call:
    """The call with its first buffer of codes one byte off."""
    first = next(array for array in call.arrays if array.name.endswith("codes") or array.name == "shards")
    assert first.role == role
    away = replace(first, misalignment=first.misalignment + 1)
    return replace(call, arrays=tuple(away if array is first else array for array in call.arrays))


@pytest.mark.parametrize("name", [name for name in OPS if name != "part_sum"])
def test_codes_that_are_not_aligned_are_refused(checker: Device, name: str) -> None:
    case = next(case for case in OPS[name].cover() if case.get("shards", 3) == 3)
    trial = OPS[name].build(case)
    role = "inout" if name == "accumulate" else "output" if name in OUTPUT_CODES else "input"
    result = checker.run(moved(trial.call, role))
    assert (result.status, result.findings) == (MISALIGNED_ADDRESS, [])


def test_every_launcher_has_cases(checker: Device) -> None:
    assert set(checker.kernels) == set(OPS)
    launchers = (build.ROOT / "src" / "cuda" / "kernels.h").read_text()
    assert all(f"launch_{name}(" in launchers for name in OPS)
    assert launchers.count("int launch_") == len(OPS)


@pytest.mark.parametrize("name", OPS)
def test_cover_is_complete(name: str) -> None:
    axes = OPS[name].axes
    cover = pairwise(axes)
    for a in axes:
        for b in axes:
            if a < b:
                met = {(case[a], case[b]) for case in cover}
                assert len(met) == len(axes[a]) * len(axes[b])
    assert len(cover) < 130


def test_a_wrong_result_is_told() -> None:
    assert complaint(Expected(b"\0\1"), b"\0\1") is None
    assert (
        complaint(Expected(b"\0\1\2"), b"\0\3\2")
        == "1 of 3 bytes differ, the first is byte 1: 0x03, not 0x01"
    )
    one, near = (torch.tensor([x]).numpy().tobytes() for x in (1.0, 1.001))
    assert complaint(Expected(one, torch.float32, rtol=0.01), near) is None
    assert "element 0" in str(complaint(Expected(one, torch.float32, rtol=1e-5), near))
    assert complaint(Expected(one, torch.float32, atol=torch.tensor([0.01])), near) is None
    assert complaint(Expected(one, torch.float32, atol=torch.tensor([1e-5])), near) is not None
    for value in (math.nan, math.inf):
        special = torch.tensor([value]).numpy().tobytes()
        assert complaint(Expected(special, torch.float32, rtol=0.01), special) is None
        assert complaint(Expected(special, torch.float32, rtol=0.01), one) is not None
        assert complaint(Expected(one, torch.float32, rtol=0.01, atol=1.0), special) is not None
