"""DistributedDataParallel with the communication hooks, over Gloo."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from all_reduce_twin import digest, emulate, splitmix
from distributed import run_world
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from agoq_ext.collectives import Codec, bytes_sent, plain_all_reduce_bytes, reset_bytes_sent, wire
from agoq_ext.ddp import (
    PlainAllReduceState,
    QuantizedAllReduceState,
    plain_allreduce_hook,
    quantized_allreduce_hook,
    register,
)

# Small enough that the network below fills several buckets.
BUCKET_MB = 0.01


def make_network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 33), nn.Linear(33, 1)]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(32, 32, generator=generator)
    return x, torch.sin(x[:, :4].sum(1, keepdim=True)) + x[:, 4:5]


def step_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)).float() - y).square().mean()


def train(
    rank: int,
    steps: int,
    hook: Any,
    *,
    accumulate: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[list[float], Tensor]:
    """(losses, all parameters) after some steps of AdamW; hook: a function of the DDP model, or None."""
    model = DistributedDataParallel(make_network(dtype), bucket_cap_mb=BUCKET_MB, **options)
    if hook is not None:
        hook(model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        if accumulate:
            before = bytes_sent()
            with model.no_sync():
                step_loss(model, 1000 + step, rank).backward()
            assert bytes_sent() == before
        loss = step_loss(model, step, rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# --- training ----------------------------------------------------------------------------------------------------


def check_training(rank: int, world: int) -> list[tuple[list[float], str]]:
    """Each variant trains like plain DDP and leaves all ranks with the same bits."""
    variants: list[dict[str, Any]] = [
        {"gradient_as_bucket_view": True, "static_graph": True},
        {"find_unused_parameters": True},
        {"accumulate": True},
        {"dtype": torch.bfloat16, "gradient_as_bucket_view": True},
    ]
    outcomes = []
    for variant in variants:
        plain, _ = train(rank, 20, None, **variant)
        reset_bytes_sent()
        losses, parameters = train(rank, 20, register, **variant)
        assert bytes_sent() > 0
        total = torch.tensor([sum(plain[-5:]), sum(losses[-5:])])
        dist.all_reduce(total)
        assert total[1] == pytest.approx(float(total[0]), rel=0.05), variant
        outcomes.append((losses, digest(parameters)))
    return outcomes


def test_training_follows_plain_ddp(tmp_path: Path) -> None:
    results = run_world(tmp_path, 2, check_training)
    for (losses, bits), (_, other) in zip(*results, strict=True):
        assert bits == other, "the ranks' parameters differ"
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), "the network did not learn"


def check_buckets(rank: int, world: int) -> list[list[Tensor]]:
    """The buckets before and after the hook, in order, for one backward pass with stochastic rounding."""
    model = DistributedDataParallel(make_network(), bucket_cap_mb=BUCKET_MB)
    state = QuantizedAllReduceState(format="int4", group_size=32, rounding="stochastic", seed=11)
    buckets, futures = [], []

    def spy(state, bucket):  # DDP wants annotations that are types, or none
        buckets.append([bucket.buffer().clone()])
        futures.append(quantized_allreduce_hook(state, bucket))
        return futures[-1]

    model.register_comm_hook(state, spy)
    for step in range(3):  # the first is one bucket, then DDP cuts anew
        step_loss(model, step, rank).backward()
        for bucket, future in zip(buckets[-len(futures) :], futures, strict=True):
            bucket.append(future.value().clone())
        futures.clear()
    assert state.calls == len(buckets) >= 6
    return buckets


def test_buckets_equal_the_emulation(tmp_path: Path) -> None:
    codec = Codec("int4", 32, rounding="stochastic")
    ranks = run_world(tmp_path, 3, check_buckets)
    for call, buckets in enumerate(zip(*ranks, strict=True)):
        expected = emulate([before for before, _ in buckets], "avg", codec, [splitmix(11, call)] * 3)
        for _, after in buckets:
            assert torch.equal(after, expected), call


def check_plain(rank: int, world: int) -> None:
    """The baseline hook is DDP's own, bit for bit, and counts by the stated convention."""
    _, expected = train(rank, 5, lambda model: model.register_comm_hook(None, allreduce_hook))
    reset_bytes_sent()
    _, parameters = train(
        rank, 5, lambda model: model.register_comm_hook(PlainAllReduceState(), plain_allreduce_hook)
    )
    assert torch.equal(parameters, expected)
    # Each bucket is rounded up by itself.
    assert 0 <= bytes_sent() - 5 * plain_all_reduce_bytes(expected.nbytes, world) < 5 * 10

    fp32 = bytes_sent()
    reset_bytes_sent()
    state = PlainAllReduceState(dist.group.WORLD, torch.bfloat16)
    losses, parameters = train(rank, 5, lambda model: model.register_comm_hook(state, plain_allreduce_hook))
    assert 0 <= bytes_sent() - fp32 / 2 < 5 * 10
    assert not torch.equal(parameters, expected)
    torch.testing.assert_close(parameters, expected, atol=0.02, rtol=0.05)

    def compress(state, bucket):  # DDP refuses the hook itself, by its name, where there is no NCCL
        return bf16_compress_hook(state, bucket)

    _, theirs = train(rank, 5, lambda model: model.register_comm_hook(None, compress))
    assert torch.equal(parameters, theirs)


def test_plain_hook(tmp_path: Path) -> None:
    run_world(tmp_path, 3, check_plain)


def check_wire_bytes(rank: int, world: int) -> tuple[int, int]:
    model = DistributedDataParallel(nn.Linear(1000, 1000, bias=False))
    register(model)
    x = torch.ones(2, 1000)
    model(x).sum().backward()  # the first pass also compares the ranks' options
    reset_bytes_sent()
    model(x).sum().backward()
    shard = wire.Shards.cut(1_000_000, world, 128)
    assert bytes_sent() == 2 * (world - 1) * wire.slot_bytes(shard, Codec())
    return bytes_sent(), plain_all_reduce_bytes(4_000_000, world)


@pytest.mark.parametrize("world", [2, 4])
def test_int8_sends_about_a_quarter_of_fp32(tmp_path: Path, world: int) -> None:
    for ours, plain in run_world(tmp_path, world, check_wire_bytes):
        assert ours == pytest.approx(plain * (1 + 2 / 128) / 4, rel=1e-3)


# --- groups, state, faults ---------------------------------------------------------------------------------------


def check_subgroup(rank: int, world: int) -> str:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[rank // 2]
    model = DistributedDataParallel(make_network(), process_group=group)
    state = register(model, format="fp8_e4m3", group_size=64)
    assert state.process_group is group and state.codec == Codec("fp8_e4m3", 64)
    step_loss(model, 0, rank).backward()
    assert bytes_sent(group) > 0 and bytes_sent() == 0
    return digest(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))


def test_a_model_over_a_subgroup(tmp_path: Path) -> None:
    a, b, c, d = run_world(tmp_path, 4, check_subgroup)
    assert a == b and c == d and a != c


def check_pickled_state(rank: int, world: int) -> None:
    state = QuantizedAllReduceState(
        dist.group.WORLD, "int4", 64, torch.float32, rounding="stochastic", seed=2**64 - 1
    )
    state.calls = 17
    loaded = pickle.loads(pickle.dumps(state))
    assert loaded.process_group is None and state.process_group is dist.group.WORLD
    assert (loaded.codec, loaded.seed, loaded.calls) == (state.codec, 2**64 - 1, 17)
    gradients = []
    for each in (state, loaded):
        model = DistributedDataParallel(make_network())
        model.register_comm_hook(each, quantized_allreduce_hook)
        step_loss(model, 0, rank).backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    assert torch.equal(*gradients)
    plain = pickle.loads(pickle.dumps(PlainAllReduceState(dist.group.WORLD, torch.bfloat16)))
    assert plain.process_group is None and plain.dtype == torch.bfloat16


def test_states_pickle_without_their_group(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_pickled_state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "int3"}, "QuantizedAllReduceState: format must be one of .*; got 'int3'"),
        ({"group_size": 100}, "QuantizedAllReduceState: group_size must be one of .*; got 100"),
        ({"seed": 2**64}, "QuantizedAllReduceState: seed must fit in 64 bits"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizedAllReduceState(**options)


def check_dead_peer(rank: int, world: int) -> None:
    model = DistributedDataParallel(make_network(), bucket_cap_mb=BUCKET_MB)
    register(model)
    for step in range(3):  # DDP's own exchange, to cut its buckets anew, comes before the second
        step_loss(model, step, rank).backward()
    if rank == 1:
        os._exit(3)
    # A future that held its error as a mere value would end here as a failed cast inside DDP.
    with pytest.raises(RuntimeError, match="all_reduce: rank [02] of 3: the exchange failed"):
        step_loss(model, 3, rank).backward()


def test_a_dead_peer_is_an_error_in_backward(tmp_path: Path) -> None:
    run_world(tmp_path, 3, check_dead_peer, dying=[1])


def check_disagreement(rank: int, world: int) -> None:
    model = DistributedDataParallel(make_network())
    register(model, format="int8" if rank else "int4")
    with pytest.raises(RuntimeError, match="disagree: rank 0: .*format=int4.*; rank 1: .*format=int8"):
        step_loss(model, 0, rank).backward()
    # The error leaves DDP in the middle of a step; the group itself is in step.
    with contextlib.suppress(RuntimeError):
        model(batch(0, rank)[0])


def test_ranks_that_disagree_learn_it_in_backward(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_disagreement)
