"""The further forms of the collectives: reduce-scatter, all-gather, lists, chunks, error feedback, two levels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from all_reduce_twin import cast, emulate, error_bound, random_flat, seed_of
from distributed import run_world
from torch import Tensor

from agoq_ext import reference
from agoq_ext.collectives import (
    Codec,
    ErrorFeedback,
    all_gather,
    all_reduce,
    bytes_sent,
    feedback,
    pipeline,
    reduce_scatter,
    reset_bytes_sent,
    segments,
    transport,
    wire,
)


def coded(x: Tensor, codec: Codec, seed: Tensor | None = None, start: int = 0) -> Tensor:
    """FP32 values of x [n] after one encoding."""
    options = (codec.format, codec.group_size, codec.scale_dtype, codec.rounding, seed, start)
    parts = reference.quantize(x.float(), *options)
    return reference.dequantize(*parts, x.numel(), codec.format, codec.group_size, torch.float32)[0]


# --- reduce_scatter and all_gather -------------------------------------------------------------------------------


def check_scatter_and_gather(rank: int, world: int) -> None:
    codecs = [
        Codec(),
        Codec("int4", 32, torch.float32, "stochastic"),
        Codec("fp8_e4m3", 64),
        Codec("nf4", 256),
        Codec("fp4_e3m0", 128, torch.bfloat16, "stochastic"),
        Codec("float32"),
        Codec("bfloat16"),
    ]
    sizes = [1, 33, 500, 129, 4097, 257, 1000]
    dtypes = [torch.float32, torch.bfloat16, torch.float16] * 3
    for number, (codec, n, dtype) in enumerate(zip(codecs, sizes, dtypes, strict=False)):
        inputs = [random_flat(200 + number, r, world * n, dtype) for r in range(world)]
        options: dict[str, Any] = {**vars(codec), "seed": 5, "min_numel": 0, "async_op": bool(number % 2)}
        out = torch.empty(n, dtype=dtype)
        work = reduce_scatter(out, inputs[rank], "avg", factor=0.5, **options)
        if work is not None:
            assert work.wait() and work.result() == [out]
        share = slice(rank * n, (rank + 1) * n)
        if codec.is_plain:
            sent = [x[share].to(wire.PLAIN_FORMATS[codec.format]).float() for x in inputs]
        else:
            sent = [coded(x[share], codec, seed_of(codec, 5, r, 0), rank * n) for r, x in enumerate(inputs)]
        total = sent[0].clone()
        for each in sent[1:]:
            total += each
        assert torch.equal(out, cast(total * torch.tensor(0.5 / world), dtype)), codec

        gathered = torch.empty(world, n, dtype=dtype)
        work = all_gather(gathered, inputs[rank][:n], **options)
        if work is not None:
            work.wait()
        for r, row in enumerate(gathered):
            mine = inputs[r][:n]
            if codec.is_plain:
                expected = mine.to(wire.PLAIN_FORMATS[codec.format])
            else:
                expected = coded(mine, codec, seed_of(codec, 5, r, 0), r * n)
            assert torch.equal(row, cast(expected.float(), dtype)), (codec, r)

    # Strided outputs and inputs.
    inputs = [random_flat(220, r, world * 60, torch.float32) for r in range(world)]
    out = torch.zeros(12, 5).t()
    reduce_scatter(out, inputs[rank].view(5 * world, 12).t().contiguous().t(), "sum", min_numel=0)
    expected = sum(coded(x[rank * 60 : rank * 60 + 60], Codec()) for x in inputs)
    torch.testing.assert_close(out.reshape(-1), expected)
    out = torch.zeros(60, world).t()
    all_gather(out, inputs[rank][:60], min_numel=0)
    assert torch.equal(out, torch.stack([coded(x[:60], Codec()) for x in inputs]))

    # Lists; those below the threshold exact.
    shapes = [(3, 100), (7,), (64, 32), (), (0,)]
    ins = [
        [random_flat(230 + i, r, world * math.prod(s), torch.float32) for i, s in enumerate(shapes)]
        for r in range(world)
    ]
    outs = [torch.empty(s) for s in shapes]
    reduce_scatter(outs, ins[rank], "sum", min_numel=50)
    for i, (s, out) in enumerate(zip(shapes, outs, strict=True)):
        n = math.prod(s)
        parts = [x[i][rank * n : rank * n + n] for x in ins]
        if n >= 50:
            parts = [coded(p, Codec()) for p in parts]
        assert torch.equal(out.reshape(-1), sum(parts[1:], parts[0])), i
    larges = [torch.empty(world, *s) for s in shapes]
    all_gather(
        larges, [x[: math.prod(s)].view(s) for x, s in zip(ins[rank], shapes, strict=True)], min_numel=50
    )
    for i, (s, large) in enumerate(zip(shapes, larges, strict=True)):
        n = math.prod(s)
        for r in range(world):
            part = ins[r][i][:n]
            assert torch.equal(large[r].reshape(-1), coded(part, Codec()) if n >= 50 else part)


def test_reduce_scatter_and_all_gather(tmp_path: Path) -> None:
    run_world(tmp_path, 3, check_scatter_and_gather)


def test_pairs_that_do_not_fit(tmp_path: Path) -> None:
    run_world(tmp_path, 1, check_pairs)


def check_pairs(rank: int, world: int) -> None:
    with pytest.raises(
        ValueError, match="reduce_scatter: input must have world x output = 1 x 3 elements; got 4"
    ):
        reduce_scatter(torch.ones(3), torch.ones(4))
    with pytest.raises(ValueError, match="all_gather: output must have as many tensors as input, 2; got 1"):
        all_gather([torch.ones(3)], [torch.ones(3), torch.ones(3)])
    with pytest.raises(ValueError, match="all_reduce: tensor must not hold a tensor twice"):
        x = torch.ones(3)
        all_reduce([x, x])
    with pytest.raises(ValueError, match="all_reduce: factor must be finite; got nan"):
        all_reduce(torch.ones(3), factor=math.nan)
    with pytest.raises(ValueError, match="all_reduce: min_numel must not be negative; got -1"):
        all_reduce(torch.ones(3), min_numel=-1)
    # A group of one: exact, and the factor all the same.
    x = random_flat(240, 0, 2000, torch.float32)
    y, z = x.clone(), torch.empty(2000)
    all_reduce([y], factor=0.25)
    reduce_scatter(z, x, "sum", factor=0.25)
    assert torch.equal(y, x * 0.25) and torch.equal(z, y)
    all_gather(z, x)
    assert torch.equal(z, x)


# --- lists, factor, threshold ------------------------------------------------------------------------------------


def check_lists(rank: int, world: int) -> int:
    numels = [10, 2000, 0, 300, 140_000, 1023, 1024, 7]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.float32, torch.bfloat16] * 2
    lists = [[random_flat(300 + i, r, n, dtypes[i]) for i, n in enumerate(numels)] for r in range(world)]
    own = [t.clone() for t in lists[rank]]
    own[1] = own[1].view(40, 50).t().contiguous().t()  # not contiguous
    reset_bytes_sent()
    work = all_reduce(own, "avg", factor=3.0, async_op=True)
    assert work is not None and work.wait() and work.get_future().value() is own or work.result() == own
    sent = bytes_sent()
    for i, (n, result) in enumerate(zip(numels, own, strict=True)):
        parts = [x[i] for x in lists]
        exact = sum(p.double() for p in parts) * 3 / world
        if n < 1024:
            total = parts[0].float()
            for p in parts[1:]:
                total = total + p.float()
            expected = total * torch.tensor(3.0 / world)
        else:
            expected = emulate([p.float() * 1.0 for p in parts], "sum", Codec(), [0] * world)
            bound = 3 / world * error_bound(parts, "sum", Codec()) + exact.abs() * 0.01
            assert ((result.reshape(-1).double() - exact).abs() <= bound).all(), i
            continue
        assert torch.equal(result.reshape(-1), cast(expected, result.dtype)), i
    return sent


def test_lists_are_packed(tmp_path: Path) -> None:
    for sent in run_world(tmp_path, 3, check_lists):
        # Two packs and one large tensor: 3 pairs of exchanges, one record.
        assert sent < 2 * 2 / 3 * (144_000 * 1.02 + 4 * 1500) + 6000


@pytest.mark.parametrize("min_numel", [0, 500])
def test_segments(min_numel: int) -> None:
    tensors = [torch.full((n,), float(n)) for n in (3, 700, 0, segments.SMALL_ELEMENTS, 40)]
    dealt = segments.deal(tensors, Codec("int4", 64), min_numel)
    assert sorted(int(t[0]) for s in dealt for t in s.tensors) == [3, 40, 700, segments.SMALL_ELEMENTS]
    assert [s.index for s in dealt] == list(range(len(dealt)))
    for segment in dealt:
        assert all(offset % 64 == 0 for offset in segment.offsets)
        assert all((t.numel() < min_numel) == segment.codec.is_plain for t in segment.tensors)
        flat = segment.load()
        segment.store(flat * 2)
        assert all(torch.equal(t, torch.full_like(t, 2.0 * t.numel())) for t in segment.tensors)
    many = segments.deal([torch.empty(100_000) for _ in range(50)], Codec(), 0)
    assert all(s.numel <= segments.PACK_ELEMENTS + 128 * 50 for s in many) and len(many) == 5


# --- chunks ------------------------------------------------------------------------------------------------------


def check_chunks(rank: int, world: int) -> None:
    for codec in (Codec("int8", 64), Codec("uint4", 32, rounding="stochastic"), Codec("bfloat16", 32)):
        for numel in (1, 5000, 10_007):
            results: list[list[Tensor]] = []
            for elements in (2**20, 64 * world, 1024):
                x = random_flat(400, rank, numel, torch.float32)
                out, gathered = torch.empty(numel), torch.empty(world, numel)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(pipeline, "CHUNK_ELEMENTS", elements)
                    options: dict[str, Any] = {**vars(codec), "seed": 9, "min_numel": 0}
                    all_reduce(x, **options)
                    reduce_scatter(out, random_flat(401, rank, numel * world, torch.float32), **options)
                    all_gather(gathered, random_flat(402, rank, numel, torch.float32), **options)
                results.append([x, out, gathered])
            for other in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), (codec, numel)


def test_chunks_do_not_change_a_bit(tmp_path: Path) -> None:
    run_world(tmp_path, 3, check_chunks)


def test_a_chunk_is_encoded_while_others_are_on_the_wire() -> None:
    """The order of the steps: an exchange is waited for only after that of the next chunk has been issued."""
    log: list[str] = []

    class Flight:
        def __init__(self, name: str) -> None:
            self.name = name
            log.append(f"issue {name}")

        def wait(self) -> None:
            log.append(f"wait {self.name}")

    def job(number: int) -> Any:
        log.append(f"encode {number}")
        yield Flight(f"scatter {number}")
        log.append(f"reduce {number}")
        yield Flight(f"gather {number}")
        log.append(f"decode {number}")

    pipeline.run(job(number) for number in range(9))
    at = log.index
    for number in range(7):
        assert at(f"issue scatter {number + 2}") < at(f"wait scatter {number}")
    for number in range(5):
        assert at(f"issue gather {number + 1}") < at(f"wait gather {number}")
    in_flight = most = 0
    for line in log:
        in_flight += line.startswith("issue") - line.startswith("wait")
        most = max(most, in_flight)
    assert most <= transport.HostTransport.THREADS and log[-1] == "decode 8"


def check_temporary_memory(rank: int, world: int) -> None:
    """The high-water mark of the process grows by the chunks in flight, not with the tensor."""

    def high_water() -> int:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    all_reduce(torch.ones(3 * 2**20))
    x = torch.ones(24 * 2**20)
    before = high_water()
    all_reduce(x)
    # int8: each of at most five chunks holds up to four buffers of 2^19 codes; the tensor has 96 MiB.
    assert high_water() - before < 20 * 2**20


def test_temporary_memory_is_bounded(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_temporary_memory)


# --- error feedback ----------------------------------------------------------------------------------------------


def check_feedback(rank: int, world: int, directory: Path) -> None:
    everyone = [random_flat(500, r, 3000, torch.float32) for r in range(world)]
    exact = sum(x.double() for x in everyone) / world
    options: dict[str, Any] = {"format": "int4", "min_numel": 0}

    def mean_error(steps: int, keeper: ErrorFeedback | None) -> float:
        total = torch.zeros(3000, dtype=torch.float64)
        for _ in range(steps):
            x = everyone[rank].clone()
            all_reduce(x, **options, feedback=keeper)
            total += x
        return float((total / steps - exact).norm() / exact.norm())

    once, keeper = mean_error(1, None), ErrorFeedback()
    assert mean_error(20, None) == pytest.approx(once), "without feedback the error is the same every time"
    assert mean_error(20, keeper) < once / 8, "with feedback it averages out"
    own = wire.Shards.cut(3000, world, 128).size(rank)
    assert keeper.nbytes == 4 * (3000 + own)

    # A NaN passes once and leaves no trace.
    bad = everyone[rank].clone()
    bad[7] = math.nan if rank == 0 else 0.0
    all_reduce(bad, **options, feedback=keeper)
    assert bad[:128].isnan().all() and bad[128:].isfinite().all()
    after = everyone[rank].clone()
    all_reduce(after, **options, feedback=keeper)
    assert after.isfinite().all()

    # A checkpoint of all ranks, loaded into a fresh object, goes on with the same bits.
    dcp.save({"feedback": keeper}, checkpoint_id=directory / "checkpoint")
    expected, got = everyone[rank].clone(), everyone[rank].clone()
    all_reduce(expected, **options, feedback=keeper)
    fresh = ErrorFeedback()
    dcp.load({"feedback": fresh}, checkpoint_id=directory / "checkpoint")
    assert fresh.nbytes == keeper.nbytes
    all_reduce(got, **options, feedback=fresh)
    assert torch.equal(got, expected)
    plain = everyone[rank].clone()
    all_reduce(plain, **options)
    assert not torch.equal(plain, expected)
    fresh.reset()
    assert fresh.nbytes == 0

    # reduce_scatter and all_gather feed back what they send.
    for _ in range(2):
        out, large = torch.empty(1000), torch.empty(world * 1000)
        reduce_scatter(out, torch.cat(everyone)[: world * 1000], feedback=fresh, **options)
        all_gather(large, everyone[rank][:1000].clone(), feedback=fresh, **options)
    assert fresh.nbytes == 4 * (world * 1000 + 1000)


def test_error_feedback(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_feedback, tmp_path)


def test_feedback_keeps_what_an_encoding_loses() -> None:
    codec, x = Codec("int4", 32), random_flat(510, 0, 100, torch.float32)
    slot = torch.empty(codec.message(100).total_bytes, dtype=torch.uint8)
    residual = torch.zeros(100)
    feedback.encode_part(x, slot, codec, None, 0, residual)
    assert torch.equal(residual, x - coded(x, codec)) and residual.abs().max() > 0
    again = x + residual
    feedback.encode_part(x, slot, codec, None, 0, residual)
    assert torch.equal(residual, again - coded(again, codec))
