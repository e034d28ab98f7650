"""Two levels of ranks: exchanges inside nodes around the one between them, for every collective."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from all_reduce_twin import digest, error_bound, random_flat
from distributed import run_world
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from agoq_ext import reference
from agoq_ext.collectives import (
    Codec,
    Disagreement,
    ErrorFeedback,
    TwoLevel,
    all_gather,
    all_reduce,
    bytes_sent,
    pipeline,
    reduce_scatter,
    reset_bytes_sent,
)


def coded(x: Tensor, codec: Codec, seed: Tensor | None = None, start: int = 0) -> Tensor:
    """FP32 values of x [n] after one encoding."""
    options = (codec.format, codec.group_size, codec.scale_dtype, codec.rounding, seed, start)
    parts = reference.quantize(x.float(), *options)
    return reference.dequantize(*parts, x.numel(), codec.format, codec.group_size, torch.float32)[0]


def check_two_level(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    digests = []
    for number, (inner_format, codec, numel, op) in enumerate(
        [
            ("float32", Codec("int8"), 10_000, "avg"),
            ("bfloat16", Codec("int4", 64), 4097, "sum"),
            ("int8", Codec("nf4", 32, torch.float32, "stochastic"), 20_001, "avg"),
            ("float32", Codec("fp8_e4m3"), 1, "avg"),
            ("float32", Codec("float32"), 3000, "avg"),
        ]
    ):
        two = TwoLevel.from_mesh(mesh, inner_format)
        everyone = [random_flat(600 + number, r, numel, torch.float32) for r in range(world)]
        own = everyone[rank].clone()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "CHUNK_ELEMENTS", 2048)
            work = all_reduce(own, op, two, **vars(codec), seed=3, async_op=bool(number % 2), min_numel=0)
            if work is not None:
                work.wait()
        digests.append(digest(own))
        factor = 1 / world if op == "avg" else 1.0
        exact = sum(x.double() for x in everyone) * factor
        if codec.is_plain:
            torch.testing.assert_close(own.double(), exact, rtol=1e-5, atol=1e-6)
            continue
        # One rounding inside (of each rank), one of each node's sum, one of the result.
        nodes = [everyone[0] + everyone[1], everyone[2] + everyone[3]]
        bound = error_bound(nodes, "sum", codec) * factor * 1.2
        if inner_format == "bfloat16":
            bound += sum(x.double().abs() for x in everyone) * factor * 2**-8
        elif inner_format != "float32":
            bound += (
                error_bound(everyone, "sum", Codec(inner_format, codec.group_size, rounding=codec.rounding))
                * factor
            )
        excess = (own.double() - exact).abs() - bound
        assert excess.max() <= 0, (number, float(excess.max()))

    two = TwoLevel(mesh.get_group(1), mesh.get_group(0))
    # Feedback between the nodes, and lists.
    keeper, total = ErrorFeedback(), torch.zeros(5000, dtype=torch.float64)
    everyone = [random_flat(620, r, 5000, torch.float32) for r in range(world)]
    exact = sum(x.double() for x in everyone) / world
    for _ in range(16):
        x, small = everyone[rank].clone(), torch.full((3,), float(rank))
        all_reduce([x, small], group=two, format="int4", feedback=keeper)
        assert torch.equal(small, torch.full((3,), 1.5)), "divided by the whole world, once"
        total += x
    alone = everyone[rank].clone()
    all_reduce(alone, group=two, format="int4")
    assert (total / 16 - exact).norm() < (alone - exact).norm() / 6
    digests.append(digest(x))

    # Across the slow links goes a node's share of the codes: each rank sends 2 (M - 1) / M of its quarter.
    reset_bytes_sent(two)
    all_reduce(torch.ones(5000), group=two, format="int4")
    assert bytes_sent(two) > 0

    for odd in (0, 3):  # whichever rank is odd, every rank of every node is told
        with pytest.raises(Disagreement, match="group_size=64.*group_size=32|group_size=32.*group_size=64"):
            all_reduce(torch.ones(5000), group=two, group_size=64 if rank == odd else 32)
    with pytest.raises(ValueError, match="TwoLevel: mesh must have 2 dimensions .* got 1"):
        TwoLevel.from_mesh(mesh["local"])
    with pytest.raises(ValueError, match="TwoLevel: format must be one of"):
        TwoLevel.from_mesh(mesh, "int3")
    dist.barrier()
    return digests


def test_two_levels(tmp_path: Path) -> None:
    results = run_world(tmp_path, 4, check_two_level)
    assert all(result == results[0] for result in results), "the ranks differ"


def check_halves(rank: int, world: int) -> list[str]:
    """reduce_scatter and all_gather: place r of all ranks is place r % 2 of node r // 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    digests = []
    for number, (inner_format, codec, n) in enumerate(
        [
            ("float32", Codec("int8"), 5000),
            ("bfloat16", Codec("int4", 64), 1001),
            ("int8", Codec("nf4", 32, torch.float32, "stochastic"), 3000),
            ("int8", Codec("float32"), 2000),
        ]
    ):
        two = TwoLevel.from_mesh(mesh, inner_format)
        everyone = [random_flat(640 + number, r, world * n, torch.float32) for r in range(world)]
        share, options = torch.empty(n), {**vars(codec), "seed": 3, "min_numel": 0}
        reduce_scatter(share, everyone[rank], "avg", two, **options)
        own = [x[rank * n : (rank + 1) * n] for x in everyone]
        exact = sum(x.double() for x in own) / world
        bound = (
            error_bound([own[0] + own[1], own[2] + own[3]], "sum", codec) / world * 1.2
            if not codec.is_plain
            else 1e-6
        )
        if inner_format == "bfloat16":
            bound += sum(x.double().abs() for x in own) / world * 2**-8
        elif inner_format != "float32" and not codec.is_plain:
            bound += error_bound(own, "avg", Codec(inner_format, codec.group_size)) * 1.2
        excess = (share.double() - exact).abs() - bound
        assert excess.max() <= 0, (number, float(excess.max()))

        gathered, flat = (
            torch.empty(world, n, dtype=torch.bfloat16),
            torch.empty(world, n, dtype=torch.bfloat16),
        )
        mine = everyone[rank][:n].contiguous()
        all_gather(gathered, mine, two, **options)
        all_gather(flat, mine, **options)
        if inner_format == "float32" or codec.is_plain:
            assert torch.equal(gathered, flat), "what came from other nodes is handed on as it is"
        torch.testing.assert_close(gathered, flat, rtol=0.3, atol=float(mine.abs().max()) / 4)
        digests.append(digest(gathered))

    # Lists, feedback between the nodes, and no asynchronous form.
    two, keeper = TwoLevel.from_mesh(mesh), ErrorFeedback()
    out, total = [torch.empty(1200), torch.empty(3)], torch.zeros(1200, dtype=torch.float64)
    everyone = [random_flat(650, r, world * 1200, torch.float32) for r in range(world)]
    small = torch.arange(12.0) + rank
    for _ in range(16):
        reduce_scatter(out, [everyone[rank], small], group=two, format="int4", feedback=keeper)
        total += out[0]
        torch.testing.assert_close(out[1], torch.arange(3.0) + 3 * rank + 1.5)
    exact = sum(x.double() for x in everyone)[rank * 1200 : (rank + 1) * 1200] / world
    alone = torch.empty(1200)
    reduce_scatter(alone, everyone[rank], group=two, format="int4")
    assert (total / 16 - exact).norm() < (alone - exact).norm() / 6
    for call in (reduce_scatter, all_gather):
        pair = (
            (torch.empty(4), torch.empty(16)) if call is reduce_scatter else (torch.empty(16), torch.empty(4))
        )
        with pytest.raises(ValueError, match="async_op must be False for a TwoLevel; got True"):
            call(*pair, group=two, async_op=True)
    dist.barrier()
    return digests


def test_two_level_reduce_scatter_and_all_gather(tmp_path: Path) -> None:
    results = run_world(tmp_path, 4, check_halves)
    assert all(result == results[0] for result in results), "the ranks differ"
