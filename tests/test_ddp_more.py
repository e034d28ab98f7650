"""The DDP hook with uneven inputs (Join), with error feedback and under AdamW, and the memory that it takes."""

from __future__ import annotations

import ctypes
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from all_reduce_twin import digest
from distributed import run_world
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from agoq_ext.ddp import register
from agoq_ext.training import process


def make_model(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    return DistributedDataParallel(layers, bucket_cap_mb=0.02, **options)


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def inputs(rank: int, step: int = 0) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    model(x).square().mean().backward()
    return gradients(model)


def check_join(rank: int, world: int) -> str:
    model = make_model()
    register(model, format="int8", error_feedback=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Join([model]):
        for step in range(3 + 2 * rank):  # the ranks have different numbers of batches
            optimizer.zero_grad()
            model(inputs(rank, step)).square().mean().backward()
            optimizer.step()
    return digest(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))


def test_join(tmp_path: Path) -> None:
    assert len(set(run_world(tmp_path, 3, check_join))) == 1


def check_feedback(rank: int, world: int, directory: Path) -> None:
    exact = backward(make_model(), inputs(rank)).double()

    def mean_error(steps: int, **options: Any) -> float:
        model = make_model(gradient_as_bucket_view=True, static_graph=True)
        register(model, format="int4", **options)
        total = sum(backward(model, inputs(rank)).double() for _ in range(steps))
        return float((total / steps - exact).norm() / exact.norm())

    assert mean_error(17, error_feedback=True) < mean_error(17) / 6

    # A checkpoint goes on with the same bits, through pickle and through DCP.
    model = make_model()
    state = register(model, format="int4", error_feedback=True, rounding="stochastic", seed=4)
    for step in range(4):
        backward(model, inputs(rank, step))
    dcp.save({"hook": state}, checkpoint_id=directory / "checkpoint")
    pickled = pickle.dumps(state)
    expected = backward(model, inputs(rank, 4)).clone()

    def resumed(load: Any) -> Tensor:
        other = make_model()
        fresh = register(other, format="int4", error_feedback=True, rounding="stochastic", seed=4)
        backward(
            other, inputs(rank)
        )  # DDP cuts its buckets anew after the first, as in a run that is resumed
        backward(other, inputs(rank))
        load(fresh)
        return backward(other, inputs(rank, 4))

    assert torch.equal(
        resumed(lambda s: dcp.load({"hook": s}, checkpoint_id=directory / "checkpoint")), expected
    )
    assert torch.equal(resumed(lambda s: s.load_state_dict(pickle.loads(pickled).state_dict())), expected)
    assert not torch.equal(resumed(lambda s: None), expected)


def test_feedback_and_its_checkpoint(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_feedback, tmp_path)


# --- training with AdamW -----------------------------------------------------------------------------------------


def check_adamw(rank: int, world: int) -> dict[str, float]:
    """The mean over ranks and the last 20 steps of the loss, by what is exchanged."""

    def train(**options: Any) -> float:
        model = make_model()
        if options:
            register(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        losses = []
        for step in range(120):
            x = inputs(rank, step)
            optimizer.zero_grad()
            loss = (model(x) - torch.tanh(x.roll(1, 1))).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        total = torch.tensor([losses[0], sum(losses[-20:]) / 20], dtype=torch.float64)
        dist.all_reduce(total)
        assert total[1] < 0.2 * total[0]
        return float(total[1]) / world

    return {
        "fp32": train(),
        "int8": train(format="int8", error_feedback=True),
        "int4": train(format="int4", error_feedback=True),
        "fp4_e3m0": train(format="fp4_e3m0", error_feedback=True),
    }


def test_feedback_under_adamw(tmp_path: Path) -> None:
    """Adam divides by the gradient's own size, so what feedback delays is not simply made up for; it stays close."""
    losses = run_world(tmp_path, 2, check_adamw)[0]
    for format, most in (("int8", 1.001), ("int4", 1.01), ("fp4_e3m0", 1.02)):
        assert losses[format] < most * losses["fp32"], (format, losses)


# --- memory ------------------------------------------------------------------------------------------------------

BUCKET = 5 * 2**20


def check_memory(rank: int, world: int, hook: str | None) -> int:
    """How far backward passes raise the resident memory above what it is between them: 24 MiB in buckets of 5 MiB."""
    # Large blocks go back to the system when they are freed, so that resident memory is what is in use.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(24)))
    model = DistributedDataParallel(layers, bucket_cap_mb=BUCKET / 2**20, gradient_as_bucket_view=True)
    if hook is not None:
        register(model, format=hook)

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model(torch.ones(2, 512)).sum().backward()

    for _ in range(
        3
    ):  # DDP cuts its buckets anew after the first pass; the second compares the ranks' options
        step()
    dist.barrier()
    before = process.resident_bytes()
    process.reset_peak()
    for _ in range(5):
        step()
    return process.peak_resident_bytes() - before


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="no /proc to reset a high-water mark in"
)
def test_peak_memory_is_within_a_bucket_of_plain_ddp(tmp_path: Path) -> None:
    plain = max(run_world(tmp_path, 2, check_memory, None))
    for format in ("int8", "int4"):
        more = max(run_world(tmp_path, 2, check_memory, format)) - plain
        assert more < BUCKET, f"{format}: {more / 2**20:.1f} MiB more than plain DDP"
