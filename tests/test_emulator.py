"""The emulator's own tests: every class of planted bug is found and named, sound kernels pass, primitives compute
what CUDA's documentation says.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

import numpy as np
import pytest
from emulator import build
from emulator.device import Call, Device, Result, Schedule, pack, schedules
from emulator.probes import (
    BUGS,
    SANITIZERS_ONLY,
    bug_call,
    input_words,
    marked_lines,
    mended_output,
    names_the_bug,
    probe_call,
)
from emulator.structs import DequantizeArgs, Probe
from emulator.worker import run_sanitized

REASON = build.reason_not_to_run()
needs_emulator = pytest.mark.skipif(REASON is not None, reason=str(REASON))

FEW = schedules(random=2)
MANY = schedules(random=8)


# --- planted bugs -------------------------------------------------------------------------------------------


def show(result: Result) -> str:
    return "\n".join(map(str, result.findings)) or f"no finding, status {result.status}"


@pytest.fixture(scope="module")
def checker() -> Device:
    device = Device(build.library("bugs", "check"))
    device.set_step_limit(200_000)
    return device


@needs_emulator
@pytest.mark.parametrize("name", [name for name in BUGS if name not in SANITIZERS_ONLY])
def test_planted_bug_is_named(checker: Device, name: str) -> None:
    places = marked_lines(name)
    for schedule in FEW:
        result = checker.run(bug_call(name, fixed=False), schedule)
        assert any(names_the_bug(f, name, places) for f in result.findings), f"{schedule}: {show(result)}"


@needs_emulator
@pytest.mark.parametrize("name", BUGS)
def test_mended_kernel_passes(checker: Device, name: str) -> None:
    for schedule in MANY:
        result = checker.run(bug_call(name, fixed=True), schedule)
        assert (result.status, result.findings) == (0, []), f"{schedule}: {show(result)}"
        assert result.arrays["out"] == mended_output(BUGS[name]), schedule


@needs_emulator
def test_every_planted_bug_is_in_the_table(checker: Device) -> None:
    planted = {kernel.removesuffix("_fixed") for kernel in checker.kernels if kernel.endswith("_fixed")}
    assert planted == set(BUGS)


@needs_emulator
def test_finding_names_everything(checker: Device) -> None:
    (finding,) = checker.run(bug_call("write_past_end", fixed=False)).findings
    ((file, line),) = marked_lines("write_past_end")
    assert (finding.kind, finding.kernel, finding.buffer) == ("out-of-bounds", "write_past_end<true>", "out")
    assert (Path(finding.file).name, finding.line) == (file, line)
    assert (finding.block, finding.thread) == ("1,0,0", "127,0,0")
    assert "write of 4 bytes: byte 1024 of global 'out' (1024 bytes)" in str(finding)


@needs_emulator
def test_launch_configuration(checker: Device) -> None:
    result = checker.run(probe_call("too_many_threads", input_words(256)))
    assert result.status == 9  # cudaErrorInvalidConfiguration
    assert [f.kind for f in result.findings] == ["launch"]
    assert "block 1056 x 1 x 1" in result.findings[0].message


# --- the other flavours -------------------------------------------------------------------------------------


@needs_emulator
@pytest.mark.parametrize("name", [*SANITIZERS_ONLY, "global_past_end"])
def test_sanitizers_find(name: str) -> None:
    outcome = run_sanitized(build.library("bugs", "asan"), [(bug_call(name, fixed=False), Schedule())])
    ((file, line),) = marked_lines(name)
    assert any(kind in outcome.report for kind in BUGS[name].kinds), outcome.report
    assert f"{file}:{line}" in outcome.report


@needs_emulator
def test_sanitizers_pass_mended_kernels() -> None:
    calls = [(bug_call(name, fixed=True), schedule) for name in BUGS for schedule in FEW]
    outcome = run_sanitized(build.library("bugs", "asan"), calls)
    assert outcome.report == ""
    assert [result.arrays["out"] for result in outcome.results] == [
        mended_output(BUGS[name]) for name in BUGS for _ in FEW
    ]


@needs_emulator
def test_fast_flavour_computes_the_same() -> None:
    fast = Device(build.library("bugs", "fast"))
    assert fast.flavour == "fast"
    for name, bug in BUGS.items():
        for schedule in FEW:
            result = fast.run(bug_call(name, fixed=True), schedule)
            assert (result.status, result.arrays["out"]) == (0, mended_output(bug)), (name, schedule)


# --- what the primitives compute ----------------------------------------------------------------------------


def run_sound(device: Device, call: Call) -> list[tuple[np.ndarray, np.ndarray]]:
    """(out, scratch) words of a kernel under many schedules, without a finding under any."""
    found = []
    for schedule in MANY:
        result = device.run(call, schedule)
        assert (result.status, result.findings) == (0, []), f"{schedule}: {show(result)}"
        found.append(
            (
                np.frombuffer(result.arrays["out"], np.uint32),
                np.frombuffer(result.arrays["scratch"], np.uint32),
            )
        )
    return found


@needs_emulator
def test_shuffles(checker: Device) -> None:
    v, lane = input_words(32), np.arange(32)
    segment = lane // 8 * 8
    expected = [
        np.full(32, v[5]),
        v[segment + (lane + 1) % 8],
        v[lane ^ 3],
        v[np.where((lane ^ 9) < segment + 8, lane ^ 9, lane)],  # a partner in an earlier segment can be read
        v[np.where(lane % 16 < 2, lane, lane - 2)],
        v[np.where(lane % 8 > 4, lane, lane + 3)],
    ]
    for out, _ in run_sound(checker, probe_call("shuffles", v, out_words=6 * 32)):
        assert np.array_equal(out.reshape(6, 32), expected)


@needs_emulator
def test_votes_matches_and_reductions(checker: Device) -> None:
    v = input_words(32) * np.uint32(2) + (np.arange(32, dtype=np.uint32) % 3 == 0)
    signed, full = v.view(np.int32), 0xFFFFFFFF
    bits = np.uint64(1) << np.arange(32, dtype=np.uint64)
    expected = [
        int((v % 2 * bits).sum()), 1, 0,
        [int(((v % 4 == x) * bits).sum()) for x in v % 4],
        (full + 1) % 2**32, 0,
        int(v.sum(dtype=np.uint64)) % 2**32, v.min(), v.max(),
        int(signed.min()) % 2**32, int(signed.max()) % 2**32,
        np.bitwise_and.reduce(v | 255), np.bitwise_or.reduce(v), np.bitwise_xor.reduce(v),
    ]  # fmt: skip
    for out, _ in run_sound(checker, probe_call("votes", v, out_words=14 * 32)):
        for row, value in zip(out.reshape(14, 32), expected, strict=True):
            assert np.array_equal(row, np.broadcast_to(np.uint32(value), 32))


@needs_emulator
def test_blocks_and_block_votes(checker: Device) -> None:
    words = input_words(2048)
    words[700] = 0
    blocks = words.reshape(4, 512)
    votes = np.stack([(blocks % 2).sum(1), (blocks != 0).all(1), (blocks == 0).any(1)], axis=1)
    for out, scratch in run_sound(checker, probe_call("blocks_and_votes", words)):
        assert np.array_equal(out, np.arange(2048))
        assert np.array_equal(scratch[:16], np.bincount(words & 15, minlength=16))
        assert np.array_equal(scratch[16:28].reshape(4, 3), votes)


@needs_emulator
def test_atomics(checker: Device) -> None:
    v = input_words(256)
    total = int(v.sum(dtype=np.uint64)) << 8
    expected = [
        int(v.sum(dtype=np.uint64)) % 2**32, 2**32 - 256, v.max(), 0,
        np.bitwise_or.reduce(v), np.bitwise_xor.reduce(v), 256 % 10, 512,
        total % 2**32, total >> 32, np.float32(128).view(np.uint32), 77,
    ]  # fmt: skip
    for out, scratch in run_sound(checker, probe_call("atomics", v)):
        assert np.array_equal(out, v)
        assert [int(x) for x in scratch[:12]] == [int(x) for x in expected]


@needs_emulator
def test_ldmatrix(checker: Device) -> None:
    halves = np.random.default_rng(1).integers(0, 2**16, (4, 8, 8), dtype=np.uint16)  # [matrix, row, column]
    lane = np.arange(32)
    g, t = lane // 4, lane % 4 * 2

    def registers(matrices: np.ndarray) -> np.ndarray:
        return np.stack([m[g, t].astype(np.uint32) | m[g, t + 1].astype(np.uint32) << 16 for m in matrices])

    straight, transposed = registers(halves), registers(halves.transpose(0, 2, 1))
    expected = np.concatenate([straight, transposed, straight[:2], straight[:1]])
    for out, _ in run_sound(
        checker, probe_call("load_matrices", halves.view(np.uint32).ravel(), out_words=11 * 32)
    ):
        assert np.array_equal(out.reshape(11, 32), expected)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Bit patterns of FP32 values that bf16 holds exactly."""
    bits = x.astype(np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def fragment(matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Packs the elements (rows, columns) [lane, register, half] of a bf16 matrix into 32-bit registers."""
    picked = matrix[rows, columns].astype(np.uint32)
    return picked[..., 0] | picked[..., 1] << 16


@needs_emulator
def test_mma(checker: Device) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.integers(-8, 8, (16, 16)).astype(np.float32), rng.integers(-8, 8, (16, 8)).astype(np.float32)
    c = rng.integers(-99, 99, (16, 8)).astype(np.float32)
    lane = np.arange(32)[:, None, None]
    g, t, half = lane // 4, lane % 4 * 2, np.arange(2)
    register = np.arange(4)[None, :, None]
    a_words = fragment(to_bf16(a), g + register % 2 * 8 + 0 * half, t + register // 2 * 8 + half)
    register = np.arange(2)[None, :, None]
    b_words = fragment(to_bf16(b), t + register * 8 + half, g + 0 * register + 0 * half)
    row = np.arange(32)[:, None] // 4 + np.arange(4) // 2 * 8
    column = np.arange(32)[:, None] % 4 * 2 + np.arange(4) % 2
    words = np.concatenate([a_words.ravel(), b_words.ravel(), c[row, column].view(np.uint32).ravel()])
    for out, _ in run_sound(checker, probe_call("multiply", words)):
        assert np.array_equal(out[:128].view(np.float32).reshape(32, 4), (a @ b + c)[row, column])


@needs_emulator
def test_named_barrier_pipeline(checker: Device) -> None:
    words = input_words(256)
    for out, _ in run_sound(checker, probe_call("named_pipeline", words)):
        assert np.array_equal(out, words.reshape(4, 64)[:, ::-1].ravel())


@needs_emulator
def test_tile_product(checker: Device) -> None:
    a, b = np.random.default_rng(3).integers(-8, 8, (2, 32, 128)).astype(np.float32)
    words = to_bf16(np.stack([a, b])).view(np.uint32).ravel()
    for out, _ in run_sound(checker, probe_call("tile_product", words)):
        assert np.array_equal(out[:1024].view(np.float32).reshape(32, 32), a @ b.T)


@needs_emulator
def test_schedules(checker: Device) -> None:
    def order(schedule: Schedule) -> list[int]:
        return np.frombuffer(
            checker.run(probe_call("tickets", input_words(128)), schedule).arrays["out"], np.uint32
        ).tolist()

    assert order(Schedule("forward")) == list(range(128))
    assert order(Schedule("reverse")) == list(range(128))[::-1]
    assert order(Schedule("random", 1)) == order(Schedule("random", 1))
    assert len({tuple(order(s)) for s in schedules(random=4)}) == 6


# --- the Python side and the build --------------------------------------------------------------------------


@needs_emulator
def test_wrong_struct_is_refused(checker: Device) -> None:
    call = probe_call("tickets", input_words(128))
    with pytest.raises(ValueError, match="tickets: DequantizeArgs has another size"):
        numbers = dict.fromkeys(("scale_dtype", "format", "group_size", "rows", "cols"), 0)
        packed = {"codes": None, "scales": None, **numbers}
        dense = {"data": None, "dtype": 0, "row_stride": 0}
        checker.run(Call("tickets", DequantizeArgs, {"in": packed, "out": dense}, call.arrays))
    with pytest.raises(ValueError, match="no kernel 'gone'"):
        checker.run(Call("gone", Probe, call.fields, call.arrays))


def test_fields_must_be_complete() -> None:
    with pytest.raises(ValueError, match="Probe has the fields in, out, scratch, n; got in, n"):
        pack(Probe, {"in": None, "n": 1}, {})


def test_other_machines_skip_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "x86-64 Linux only" in str(build.reason_not_to_run())
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "find_program", lambda name: None if name == "ninja" else name)
    assert build.reason_not_to_run() in (
        "the emulator needs ninja",
        "the emulator runs on x86-64 Linux only, not on Linux x86_64",
    )


def test_every_wrapper_has_a_twin() -> None:
    cuda = (build.ROOT / "src" / "cuda" / "ptx.cuh").read_text()
    twins = (build.SOURCE / "include" / "emulator" / "ptx.h").read_text().split("namespace agoq::ptx {")[1]
    wrappers = set(re.findall(r"^__device__ __forceinline__ \w+ (\w+)\(", cuda, re.M)) - {"shared_address"}
    assert len(wrappers) > 10
    assert set(re.findall(r"^(?:inline )?\w+ (\w+)\(", twins, re.M)) == wrappers
