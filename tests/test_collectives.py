"""Quantized all-reduces in worlds of 1 to 4 local ranks over Gloo: values, order, futures, bytes."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from all_reduce_twin import cast, digest, emulate, error_bound, random_flat
from distributed import run_world
from torch import Tensor

from agoq_ext import layout
from agoq_ext.collectives import (
    Codec,
    bytes_sent,
    channel,
    functions,
    reset_bytes_sent,
    setup,
    transport,
    wire,
)
from agoq_ext.collectives.call import OPS

# Small tensors make small tests; the threshold has its own.
all_reduce = functools.partial(functions.all_reduce, min_numel=0)

# --- worlds ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One all_reduce, the same on all ranks."""

    number: int
    numel: int
    dtype: torch.dtype
    op: str
    codec: Codec
    async_op: bool

    def flat(self, rank: int) -> Tensor:
        return random_flat(self.number, rank, self.numel, self.dtype)

    def seed(self, rank: int) -> int:
        return 2**63 - 5 + 3 * self.number + rank  # some do not fit int64


def make_cases(world: int) -> list[Case]:
    """Every format three times; sizes from 0 to 100 000, among them those at the edges of groups and shards."""
    generator = torch.Generator().manual_seed(world)

    def draw(options: Any) -> Any:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    edges = [0, 1, 31, 33, 127, 128, 129, 255 * world, 256 * world, 256 * world + 1]
    cases = []
    for number in range(30):
        numel = (
            edges[number] if number < len(edges) else int(10 ** (4.3 * torch.rand(1, generator=generator)))
        )
        codec = Codec(
            list(layout.FORMATS)[number % len(layout.FORMATS)],
            draw(layout.GROUP_SIZES),
            draw(layout.SCALE_DTYPES),
            draw(layout.ROUNDINGS),
        )
        dtype, op = draw(layout.FLOAT_DTYPES), draw(OPS)
        cases.append(Case(number, numel, dtype, op, codec, async_op=bool(number % 3)))
    cases.append(Case(30, 100_000, torch.float32, "avg", Codec(), True))
    return cases


def run_cases(rank: int, world: int, cases: list[Case]) -> tuple[list[str], list[Tensor] | None]:
    """All results' digests, and on rank 0 the results; asynchronous ones are waited for at the end, last first."""
    flats, works = [], []
    for case in cases:
        flat = case.flat(rank)
        work = all_reduce(
            flat, case.op, None, **vars(case.codec), seed=case.seed(rank), async_op=case.async_op
        )
        assert (work is None) == (not case.async_op)
        flats.append(flat)
        works.append(work)
    for flat, work in reversed(list(zip(flats, works, strict=True))):
        if work is not None:
            assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
            assert work.result()[0] is flat and work.get_future().value()[0] is flat
    return [digest(flat) for flat in flats], flats if rank == 0 else None


@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_reduce_equals_the_emulation_on_every_rank(tmp_path: Path, world: int) -> None:
    """Also on the owner of a shard, which holds a more precise sum (b12x#44), and for sizes that no cut divides."""
    cases = make_cases(world)
    results = run_world(tmp_path, world, run_cases, cases)
    values = results[0][1]
    for number, case in enumerate(cases):
        assert len({digests[number] for digests, _ in results}) == 1, f"ranks differ: {case}"
        flats = [case.flat(rank) for rank in range(world)]
        seeds = [case.seed(rank) for rank in range(world)]
        expected = cast(emulate(flats, case.op, case.codec, seeds), case.dtype)
        assert torch.equal(values[number], expected), case
        if case.numel:
            exact = sum(flat.double() for flat in flats) * (1 / world if case.op == "avg" else 1)
            bound = error_bound(flats, case.op, case.codec) + exact.abs() * 2 * torch.finfo(case.dtype).eps
            if case.dtype == torch.float16:
                exact = exact.clamp(-65504, 65504)
            excess = (values[number].double() - exact).abs() - bound
            assert excess.max() <= 0, f"{case}: {excess.max()} over the bound at {excess.argmax()}"


def check_shapes(rank: int, world: int) -> None:
    """Shapes, strides and kinds of tensor that are not a fresh 1-D one."""

    def expected(tensors: list[Tensor]) -> Tensor:
        flat = emulate([t.reshape(-1) for t in tensors], "avg", Codec(), [0] * world)
        return flat.reshape(tensors[0].shape)

    def everyone(*shape: int) -> list[Tensor]:
        return [random_flat(50, r, math.prod(shape), torch.float32).reshape(shape) for r in range(world)]

    for shape in [(), (1,), (7, 3), (2, 3, 0), (3, 5, 7, 2)]:
        tensors = everyone(*shape)
        all_reduce(tensors[rank])
        assert torch.equal(tensors[rank], expected(everyone(*shape)))

    # Transposed, strided and channels-last: elements count in row-major order of the shape.
    for view in (
        lambda t: t.t(),
        lambda t: t[::3, 1::2],
        lambda t: t[:20, :20].reshape(1, 4, 10, 10).contiguous(memory_format=torch.channels_last),
    ):
        bases = everyone(40, 30)
        target = view(bases[rank])
        before = target.clone()
        work = all_reduce(target, async_op=True)
        work.wait()
        assert torch.equal(target, expected([view(t) for t in everyone(40, 30)]))
        assert not torch.equal(target, before)
    bases = everyone(40, 30)
    all_reduce(bases[rank][::3, 1::2])
    untouched = torch.ones(40, 30, dtype=torch.bool)
    untouched[::3, 1::2] = False
    assert torch.equal(bases[rank][untouched], everyone(40, 30)[rank][untouched])

    # A slice at an odd offset.
    bases = everyone(501)
    all_reduce(bases[rank][1:])
    assert torch.equal(bases[rank][1:], expected([t[1:] for t in everyone(501)]))
    assert bases[rank][0] == everyone(501)[rank][0]

    # Ranks may differ in shape, strides and dtype, not in the number of elements.
    own = everyone(6, 50)[rank]
    target = own.t().contiguous().t() if rank == 0 else own.reshape(3, 100)
    all_reduce(target)
    assert torch.equal(target.reshape(6, 50), expected(everyone(6, 50)))

    leaf = everyone(300)[rank].requires_grad_()
    all_reduce(leaf)
    assert torch.equal(leaf.detach(), expected(everyone(300))) and leaf.is_leaf
    with torch.inference_mode():
        inference = everyone(300)[rank].clone()
        all_reduce(inference)
        assert torch.equal(inference, expected(everyone(300)))
        inference = everyone(40, 30)[rank].clone().t()
        all_reduce(inference)
        assert torch.equal(inference, expected([t.t() for t in everyone(40, 30)]))

    # Autograd notices that a tensor that it saved has changed.
    weight = torch.ones(300, requires_grad=True)
    saved = everyone(300)[rank]
    product = weight * saved
    all_reduce(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_shapes_and_strides(tmp_path: Path) -> None:
    """Scalars, three dimensions, sizes that neither W nor 2 W divides (torchft#203, DeepSpeed#5056)."""
    run_world(tmp_path, 3, check_shapes)


def check_non_finite(rank: int, world: int) -> None:
    for format in ("int8", "uint4", "nf4", "fp8_e4m3", "fp4_e3m0"):
        for bad in (math.nan, math.inf, -math.inf):
            flats = [random_flat(60, r, 1000, torch.float32) + 1 for r in range(world)]
            flats[1][300] = bad  # group 4 of 64, in the shard of rank 0; rank 1 alone holds it
            own = flats[rank].clone()
            all_reduce(own, format=format, group_size=64)
            nan = torch.zeros(1000, dtype=torch.bool)
            nan[256:320] = True
            assert torch.equal(own.isnan(), nan), (format, bad)
            flats[1][300] = 0.0
            clean = emulate(flats, "avg", Codec(format, 64), [0] * world)
            assert torch.equal(own[~nan], clean[~nan]), (format, bad)


def check_overflow(rank: int, world: int) -> None:
    """A sum beyond FP32 is NaN; one beyond float16 its largest value."""
    huge = torch.ones(256)
    huge[:128] = 3e38
    all_reduce(huge, "sum")
    assert huge[:128].isnan().all() and huge[128:].isfinite().all()
    large = torch.full((128,), 6e4, dtype=torch.float16)
    all_reduce(large, "sum")
    assert (large == 65504).all()


def test_overflow(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_overflow)


def test_non_finite_values_stay_in_their_group(tmp_path: Path) -> None:
    run_world(tmp_path, 3, check_non_finite)


def check_order(rank: int, world: int) -> None:
    """Many calls in flight, among plain collectives on the same group, waited for in another order on each rank."""
    expected, flats, works, plain = [], [], [], []
    for number in range(24):
        numel = 50_000 if number % 4 == 0 else 10 + number
        codec = Codec(("int8", "int4")[number % 2])
        everyone = [random_flat(number, r, numel, torch.float32) for r in range(world)]
        expected.append(emulate(everyone, "sum", codec, [0] * world))
        flats.append(everyone[rank])
        if number % 5 == 4:
            all_reduce(flats[-1], "sum", **vars(codec))
            works.append(None)
        else:
            works.append(all_reduce(flats[-1], "sum", **vars(codec), async_op=True))
        total = torch.full((3,), float(number + rank))
        plain.append((total, dist.all_reduce(total, async_op=True)))
        if number % 7 == 6:
            dist.barrier()
    order = torch.randperm(24, generator=torch.Generator().manual_seed(rank)).tolist()
    for number in order:
        if works[number] is not None:
            value = works[number].get_future().wait()[0] if number % 2 else works[number].result()[0]
            works[number].wait()
            assert value is flats[number]
        plain[number][1].wait()
        assert torch.equal(flats[number], expected[number]), number
        assert plain[number][0][0] == world * number + sum(range(world))


def test_calls_in_flight_match_in_issue_order(tmp_path: Path) -> None:
    """A gradient must not be read before its exchange is over (DeepSpeed#5059, pytorch#49477: NaN or zero losses)."""
    run_world(tmp_path, 3, check_order)


def check_future(rank: int, world: int) -> None:
    tensor = torch.full((200_000,), float(rank))
    work = all_reduce(tensor, async_op=True)
    # A callback sees the decoded result, whatever thread runs it.
    mean = work.get_future().then(lambda future: float(future.value()[0][-1]))
    assert mean.wait() == pytest.approx((world - 1) / 2, rel=0.01)
    assert isinstance(work, dist.Work)

    # A callback may wait for its own work.
    work = all_reduce(tensor, async_op=True)
    assert work.get_future().then(lambda future: work.wait()).wait() is True
    # A timeout leaves the work in flight.
    if rank == 0:
        work = all_reduce(torch.ones(8), async_op=True)
        with pytest.raises(TimeoutError, match="all_reduce: not finished after 0:00:00.010000"):
            work.wait(timedelta(milliseconds=10))
    dist.barrier()
    if rank == 1:
        work = all_reduce(torch.ones(8), async_op=True)
    assert work.wait(timedelta(seconds=20))

    # A callback that waits for a later call on the same group would wait for its own thread.
    def wait_inside(future: Any) -> str:
        try:
            all_reduce(torch.ones(8))
        except RuntimeError as error:
            return str(error)
        return "no error"

    encode, attached = wire.encode, threading.Event()

    def held(*args: Any) -> None:
        attached.wait(10)  # a callback attached to a work that is over would run here, not on the worker
        encode(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "encode", held)
        refused = all_reduce(torch.ones(8), async_op=True).get_future().then(wait_inside)
        attached.set()
        work = all_reduce(torch.ones(8), async_op=True)
        refused.wait()
        work.wait()
    assert refused.value() == "all_reduce: a callback must not wait for a later collective on the same group"


def test_futures(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_future)


def check_subgroups(rank: int, world: int) -> list[int]:
    """Overlapping groups, set up by their first call; a rank in many groups meets one in few."""
    members = [[0, 2], [1, 3], [0, 1, 3], [3, 2]]
    groups = [dist.new_group(ranks) for ranks in members]
    # Rank 0 uses the default group's channel too before it meets rank 2, and so on: histories differ.
    all_reduce(torch.ones(100))
    counts = []
    for ranks, group in zip(members, groups, strict=True):
        if rank not in ranks:
            with pytest.raises(
                TypeError, match="all_reduce: group must be a process group that this rank is a member"
            ):
                all_reduce(torch.ones(4), group=group)
            continue
        everyone = [random_flat(70, r, 3000, torch.float32) for r in ranks]
        own = everyone[group.rank()].clone()
        all_reduce(own, group=group, seed=0)
        assert torch.equal(own, emulate(everyone, "avg", Codec(), [0] * len(ranks)))
        total = torch.full((64,), 2.0)
        all_reduce(total, "sum", group=group, async_op=True).wait()
        torch.testing.assert_close(total, torch.full((64,), 2.0 * len(ranks)), rtol=0.01, atol=0)
        counts.append(bytes_sent(group))
    # In opposite orders on different ranks: groups do not wait for each other.
    works = []
    for index in range(4) if rank % 2 else reversed(range(4)):
        if rank in members[index]:
            works.append(all_reduce(torch.ones(77), group=groups[index], async_op=True))
    for work in works:
        work.wait()
    return counts


def test_subgroups(tmp_path: Path) -> None:
    run_world(tmp_path, 4, check_subgroups)


def check_device_transport(rank: int, world: int) -> None:
    """The exchange through the caller's own group, as it runs over NCCL, gives the same bits."""
    transport_used = []

    class Spy(transport.DeviceTransport):
        def _all_to_all(self, received: Tensor, sent: Tensor) -> Any:
            transport_used.append(self)
            return super()._all_to_all(received, sent)

    for codec in (Codec(), Codec("int5", 32, torch.float32, "stochastic")):
        tensor = random_flat(80, rank, 5001, torch.bfloat16)
        host, device = tensor.clone(), tensor.clone()
        all_reduce(host, **vars(codec), seed=3)
        reset_bytes_sent()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channel, "exchanges_on_device", lambda group, device: True)
            patch.setattr(channel, "DeviceTransport", Spy)
            all_reduce(device, **vars(codec), seed=3)
        assert torch.equal(host, device) and len(transport_used) == 1
        transport_used.clear()
        assert bytes_sent() == 2 * (world - 1) * wire.slot_bytes(
            wire.Shards.cut(5001, world, codec.group_size), codec
        )


def test_exchange_through_the_callers_group(tmp_path: Path) -> None:
    run_world(tmp_path, 3, check_device_transport)


def check_world_of_one(rank: int, world: int) -> None:
    tensor = random_flat(90, 0, 1000, torch.float32)
    before = tensor.clone()
    for op in OPS:
        assert all_reduce(tensor, op) is None
        work = all_reduce(tensor, op, async_op=True)
        assert work.is_completed() and work.wait() and work.get_future().value()[0] is tensor
    setup()
    assert torch.equal(tensor, before) and bytes_sent() == 0
    with pytest.raises(ValueError, match="all_reduce: format must be one of"):
        all_reduce(tensor, format="int3")


def test_a_world_of_one_is_the_identity(tmp_path: Path) -> None:
    """A lone peer trains with its own gradients, not with zeros (hivemind#447)."""
    run_world(tmp_path, 1, check_world_of_one)


def check_seeds(rank: int, world: int) -> list[str]:
    options: dict[str, Any] = {"format": "int4", "rounding": "stochastic"}

    def result(**more: Any) -> Tensor:
        tensor = random_flat(100, rank, 2000, torch.float32)
        all_reduce(tensor, **options, **more)
        return tensor

    assert torch.equal(result(seed=5), result(seed=torch.tensor([5])))
    assert not torch.equal(result(seed=5), result(seed=6))
    torch.manual_seed(1)
    first, second = result(), result()
    torch.manual_seed(1)
    assert torch.equal(first, result()) and not torch.equal(first, second)
    # The seed of an asynchronous call is read when it is issued.
    seed = torch.tensor([5])
    tensor = random_flat(100, rank, 2000, torch.float32)
    work = all_reduce(tensor, **options, seed=seed, async_op=True)
    seed.fill_(9)
    work.wait()
    assert torch.equal(tensor, result(seed=5))
    # Unbiased: the mean over seeds approaches the mean over ranks.
    exact = sum(random_flat(100, r, 2000, torch.float32) for r in range(world)) / world
    mean = sum(result(seed=s) for s in range(200)) / 200
    nearest = random_flat(100, rank, 2000, torch.float32)
    all_reduce(nearest, format="int4")
    assert (mean - exact).norm() < 0.15 * (nearest - exact).norm()
    return [digest(first), digest(second), digest(mean)]


def test_stochastic_rounding(tmp_path: Path) -> None:
    results = run_world(tmp_path, 2, check_seeds)
    assert results[0] == results[1]
