"""500 random all-reduces: all ranks bit-identical, and within the format's bound of the mean in FP64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from all_reduce_twin import digest, error_bound, random_flat
from distributed import run_world
from torch import Tensor

from agoq_ext import layout
from agoq_ext.collectives import Codec, all_reduce

FORMATS = ("int8", "int4", "fp8_e4m3", "nf4", "fp4_e3m0")
WORLDS = (1, 2, 3, 4)
CASES = 500 // len(WORLDS)
LARGEST = 10_000_000


def check_random(rank: int, world: int, cases: int, largest: int) -> list[str]:
    """The digest of every result; rank 0 compares with the exact mean too."""
    generator = torch.Generator().manual_seed(world)

    def draw(options: tuple) -> object:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    digests = []
    for number in range(cases):
        exponent = float(torch.rand(1, generator=generator))
        numel = 0 if number == 0 else largest if number == 1 else int(largest**exponent)
        codec = Codec(
            draw(FORMATS), draw(layout.GROUP_SIZES), draw(layout.SCALE_DTYPES), draw(layout.ROUNDINGS)
        )
        dtype, min_numel = draw(layout.FLOAT_DTYPES), draw((0, 0, 1024))
        case = 1000 * world + number
        flat = random_flat(case, rank, numel, dtype)
        own = flat.clone()
        work = all_reduce(
            own, "avg", seed=number, min_numel=min_numel, async_op=bool(number % 2), **vars(codec)
        )
        if work is not None:
            work.wait()
        digests.append(digest(own))
        if rank == 0 and numel:
            flats = [random_flat(case, r, numel, dtype) for r in range(world)]
            check_bound(own, flats, codec, exact=world == 1 or numel < min_numel)
    return digests


def check_bound(own: Tensor, flats: list[Tensor], codec: Codec, exact: bool) -> None:
    if len(flats) == 1:
        assert torch.equal(own, flats[0])
        return
    mean = sum(flat.double() for flat in flats) / len(flats)
    bound = mean.abs() * 2 * torch.finfo(own.dtype).eps + 1e-7
    if not exact:
        bound = bound + error_bound(flats, "avg", codec)
    excess = (own.double() - mean).abs() - bound
    assert excess.max() <= 0, (
        f"{codec} {own.dtype} {own.numel()}: {excess.max()} over the bound at {excess.argmax()}"
    )


@pytest.mark.parametrize("world", WORLDS)
def test_random_all_reduces(tmp_path: Path, world: int) -> None:
    results = run_world(tmp_path, world, check_random, 25, 50_000)
    assert all(result == results[0] for result in results)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", WORLDS)
def test_500_random_all_reduces(tmp_path: Path, world: int) -> None:
    results = run_world(tmp_path, world, check_random, CASES, LARGEST, timeout=500, group_timeout=200)
    assert all(result == results[0] for result in results)
