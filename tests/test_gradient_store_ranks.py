"""GradientStore over Gloo worlds: the mean, identical bits, when buckets travel, shards, faults and resuming."""

from __future__ import annotations

import copy
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from all_reduce_twin import digest
from distributed import run_world
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import agoq_ext
from agoq_ext.gradients.store import GradientStore


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(96, 200), nn.GELU(), nn.Linear(200, 130, bias=False), nn.LayerNorm(130))


def batch(rank: int, index: int) -> Tensor:
    return torch.randn(16, 96, generator=torch.Generator().manual_seed(100 * index + rank))


def backward(model: nn.Module, rank: int, index: int) -> None:
    model(batch(rank, index)).square().mean().backward()


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def accumulate(store: GradientStore, model: nn.Module, rank: int, step: int) -> None:
    with store.no_sync():
        backward(model, rank, 2 * step)
    backward(model, rank, 2 * step + 1)


def check_mean(rank: int, world: int, rounding: str) -> tuple[str, str]:
    model = make_model(seed=rank)  # the constructor gives all ranks rank 0's parameters
    store = GradientStore(model, group_size=32, rounding=rounding, bucket_bytes=4096, seed=1)
    twin = make_model()
    assert torch.equal(flat(model.parameters()), flat(twin.parameters()))
    assert len(store.buckets) > 3
    accumulate(store, model, rank, 0)
    assert store._reduction.launched == len(
        store.buckets
    )  # while backward ran, before anything was asked for
    store.synchronize()
    for other in range(world):
        for index in range(2):
            backward(twin, other, index)
    got = flat(store.gradient(p) for p in model.parameters())
    want = flat(p.grad for p in twin.parameters()) / world
    error = float((got - want).norm() / want.norm())
    assert 0 < error < (0.02 if rounding == "nearest" else 0.04), error
    norm = store.norm().item()
    assert norm == pytest.approx(got.double().norm().item(), rel=1e-12)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    store.step(optimizer, max_norm=norm / 2)
    for step in range(1, 3):
        accumulate(store, model, rank, step)
        store.step(optimizer, max_norm=1.0)
    return digest(got), digest(flat(model.parameters()))


@pytest.mark.parametrize(("world", "rounding"), [(2, "nearest"), (3, "stochastic"), (4, "nearest")])
def test_mean_and_identical_bits(tmp_path: Path, world: int, rounding: str) -> None:
    assert len(set(run_world(tmp_path, world, check_mean, rounding))) == 1


def check_only_on_the_last(rank: int, world: int) -> None:
    model = make_model()
    store = GradientStore(model, bucket_bytes=4096)
    agoq_ext.collectives.reset_bytes_sent()
    with store.no_sync():
        backward(model, rank, 0)
    assert agoq_ext.collectives.bytes_sent() == 0 and store._reduction.launched == 0
    backward(model, rank, 1)
    store.synchronize()
    numel = sum(p.numel() for p in model.parameters())
    sent = agoq_ext.collectives.bytes_sent()
    assert 2 * (world - 1) / world * numel < sent < 2.2 * (world - 1) / world * numel
    with pytest.raises(RuntimeError, match="got a gradient after its bucket was exchanged"):
        backward(model, rank, 2)


def test_buckets_travel_on_the_last_micro_batch_only(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_only_on_the_last)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return self.layers[chosen](x)


def check_unused(rank: int, world: int) -> str:
    """Ranks use different layers, so gradients arrive at different places: what has none counts as zero."""
    model = Branches()
    store = GradientStore(model, bucket_bytes=2048)
    x = torch.ones(2, 64)
    for _ in range(2):  # the second time codes of the first are there
        model(x, rank).square().mean().backward()
        store.synchronize()
        for index, layer in enumerate(model.layers):
            twin = Branches().layers[index]
            twin.load_state_dict(layer.state_dict())
            twin(x).square().mean().backward()
            want = twin.weight.grad / world if index < world else torch.zeros(64, 64)
            torch.testing.assert_close(store.gradient(layer.weight), want, rtol=0.05, atol=1e-4)
        store.clear()
    return digest(flat(store.gradient(p) for p in model.parameters()))


def test_ranks_that_use_different_parameters(tmp_path: Path) -> None:
    assert len(set(run_world(tmp_path, 2, check_unused))) == 1


def check_training(rank: int, world: int, kind: str) -> float:
    model = make_model()
    teacher = make_model(seed=7)
    target = torch.randn(64, 130, generator=torch.Generator().manual_seed(5))
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(6))
    del teacher
    mine = slice(rank, None, world)
    if kind == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    else:
        wrapped = model
        store = GradientStore(
            model, sharded=kind != "store", gather="int8" if kind == "sharded int8" else None
        )
        groups = [{"params": [p]} for p in model.parameters()]
        optimizer = torch.optim.AdamW(groups if kind == "store" else store.local(groups), 3e-3)
    for _ in range(60):
        nn.functional.mse_loss(wrapped(x[mine]), target[mine]).backward()
        if kind == "ddp":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            store.step(optimizer, max_norm=1.0)
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x), target).item()
    everyone = [None] * world
    dist.all_gather_object(everyone, digest(flat(model.parameters())))
    assert len(set(everyone)) == 1, f"{kind}: the ranks differ"
    return loss


@pytest.mark.parametrize("kind", ["store", "sharded", "sharded int8"])
def test_training_follows_ddp(tmp_path: Path, kind: str) -> None:
    plain, stored = (run_world(tmp_path, 3, check_training, each)[0] for each in ("ddp", kind))
    assert stored == pytest.approx(plain, rel=0.02)


def check_shards(rank: int, world: int) -> None:
    model = make_model()
    store = GradientStore(model, sharded=True, bucket_bytes=8192)
    local = store.local(model.parameters())
    numel = sum(p.numel() for p in model.parameters())
    sizes = [0] * world
    dist.all_gather_object(sizes, sum(p.numel() for p in local))
    assert sum(sizes) == numel and max(sizes) < numel / world + 128 * len(store.buckets)
    accumulate(store, model, rank, 0)
    twin = make_model()
    for other in range(world):
        for index in range(2):
            backward(twin, other, index)
    want = (flat(p.grad for p in twin.parameters()) / world).double().norm().item()
    assert store.norm().item() == pytest.approx(want, rel=5e-3)
    before = flat(model.parameters()).clone()
    store.step(torch.optim.SGD(local, 0.5))
    moved = flat(model.parameters()) - before
    expected = -0.5 * flat(p.grad for p in twin.parameters()) / world
    assert float((moved - expected).norm() / expected.norm()) < 0.01
    with pytest.raises(ValueError, match="Adafactor: it keeps statistics"):
        store.step(torch.optim.Adafactor(local))
    with pytest.raises(ValueError, match=r"pieces of store\.local"):
        store.step(torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shards_cover_the_model(tmp_path: Path, world: int) -> None:
    run_world(tmp_path, world, check_shards)


def check_resume(rank: int, world: int, directory: Path, sharded: bool) -> None:
    def make(seed: int) -> tuple[nn.Module, GradientStore, torch.optim.Optimizer]:
        model = make_model(seed)
        store = GradientStore(
            model, rounding="stochastic", seed=2, sharded=sharded, gather="int8" if sharded else None
        )
        parameters = store.local(model.parameters()) if sharded else model.parameters()
        return model, store, torch.optim.AdamW(parameters, 1e-2)

    model, store, optimizer = make(0)
    for step in range(2):
        accumulate(store, model, rank, step)
        store.step(optimizer)
    with store.no_sync():
        backward(model, rank, 4)
    saved = {"store": store, "model": model.state_dict()}
    dcp.save(saved, checkpoint_id=directory)
    own = copy.deepcopy(optimizer.state_dict())
    backward(model, rank, 5)
    store.step(optimizer)
    want = flat(model.parameters()).clone()

    model, store, optimizer = make(1)
    weights = model.state_dict()
    dcp.load({"store": store, "model": weights}, checkpoint_id=directory)
    model.load_state_dict(weights)
    optimizer.load_state_dict(own)
    backward(model, rank, 5)
    store.step(optimizer)
    assert torch.equal(flat(model.parameters()), want)


@pytest.mark.parametrize("sharded", [False, True])
def test_resumes_bit_for_bit_within_a_step(tmp_path: Path, sharded: bool) -> None:
    run_world(tmp_path, 2, check_resume, tmp_path / "checkpoint", sharded)


def check_disagreement(rank: int, world: int) -> str:
    try:
        GradientStore(make_model(), group_size=(32, 64)[rank])
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_are_told(tmp_path: Path) -> None:
    for message in run_world(tmp_path, 2, check_disagreement):
        assert "group_size=32" in message and "group_size=64" in message


def check_death(rank: int, world: int) -> float:
    model = make_model()
    store = GradientStore(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backward(model, rank, 0)
    store.step(optimizer)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    backward(model, rank, 1)
    with pytest.raises(RuntimeError, match="exchange failed"):
        store.step(optimizer)
    return time.monotonic() - began


def test_a_killed_peer_is_an_error(tmp_path: Path) -> None:
    took = run_world(tmp_path, 3, check_death, dying=[1], group_timeout=5)
    assert max(t for t in took if t is not None) < 10
