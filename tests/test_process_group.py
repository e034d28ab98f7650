"""The process group "agoq" under torch.distributed's own functions and under what trainers build on it."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from all_reduce_twin import digest, emulate, random_flat
from distributed import run_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from agoq_ext import process_group
from agoq_ext.collectives import Codec, Disagreement, bytes_sent, reset_bytes_sent
from agoq_ext.process_group import Options

# Quantizes everything that it may, so that small tensors make small tests.
SMALL = Options(min_bytes=0)
LARGE = 5000  # elements, above the threshold below which small tensors travel as float32


def start(
    rank: int,
    world: int,
    directory: Path,
    name: str,
    options: Any = SMALL,
    backend: str = "agoq",
    timeout: float = 20,
) -> None:
    """Replaces the default group by one of our backend."""
    if dist.is_initialized():
        dist.barrier()  # a group that one rank takes down while another still connects is an error there
        dist.destroy_process_group()
    store = dist.FileStore(str(directory / name), world)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, pg_options=options, timeout=limit
    )


def everyone(
    world: int, numel: int = LARGE, case: int = 700, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [random_flat(case, r, numel, dtype) for r in range(world)]


def check_plain_functions(rank: int, world: int, directory: Path) -> None:
    """torch.distributed's functions: what is quantized, what passes through, and that both are right."""
    start(rank, world, directory, "functions", backend=("agoq", "cpu:agoq,cuda:agoq")[world % 2])
    assert dist.get_backend().startswith(("agoq", "cpu:agoq")) and isinstance(
        dist.group.WORLD, process_group.ProcessGroup
    )
    xs = everyone(world)
    expected = {
        op: emulate(xs, name, Codec(), [0] * world)
        for op, name in ((dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.AVG, "avg"))
    }
    for op, value in expected.items():
        own = xs[rank].clone()
        dist.all_reduce(own, op)
        assert torch.equal(own, value), op
        own = xs[rank].clone()
        work = dist.all_reduce(own, op, async_op=True)
        assert work.wait() and torch.equal(own, value) and work.is_completed()
        own = xs[rank].clone()
        future = dist.all_reduce(own, op, async_op=True).get_future()
        assert torch.equal(future.wait()[0], value)
    half = xs[rank].bfloat16()
    dist.all_reduce(half)
    assert torch.equal(
        half, emulate([x.bfloat16().float() for x in xs], "sum", Codec(), [0] * world).bfloat16()
    )
    total = [torch.ones(LARGE), torch.ones(2000)]
    dist.all_reduce_coalesced(total)
    torch.testing.assert_close(total[0], torch.full((LARGE,), float(world)), rtol=0.01, atol=0)

    share = torch.empty(LARGE)
    whole = [random_flat(710, r, LARGE * world, torch.float32) for r in range(world)]
    dist.reduce_scatter_tensor(share, whole[rank], dist.ReduceOp.AVG)
    exact = sum(w[rank * LARGE : (rank + 1) * LARGE] for w in whole) / world
    assert 0 < (share - exact).norm() / exact.norm() < 0.03
    again = torch.empty(LARGE)
    dist.reduce_scatter(again, list(whole[rank].chunk(world)), dist.ReduceOp.AVG)
    assert torch.equal(again, share)

    # The rest passes through: exact, and no byte of ours.
    reset_bytes_sent()
    large = torch.arange(LARGE) + rank
    dist.all_reduce(large)
    assert torch.equal(large, torch.arange(LARGE) * world + sum(range(world)))
    for op, value in ((dist.ReduceOp.MAX, world - 1), (dist.ReduceOp.MIN, 0)):
        x = torch.full((LARGE,), float(rank))
        dist.all_reduce(x, op)
        assert torch.equal(x, torch.full((LARGE,), float(value)))
    double = torch.full((LARGE,), 0.1, dtype=torch.float64)
    dist.all_reduce(double)
    torch.testing.assert_close(double, torch.full((LARGE,), 0.1 * world, dtype=torch.float64))
    x = xs[rank].clone()
    dist.broadcast(x, 1)
    assert torch.equal(x, xs[1])
    gathered = torch.empty(world * LARGE)
    dist.all_gather_into_tensor(gathered, xs[rank])
    assert torch.equal(gathered, torch.cat(xs))
    parts = [torch.empty(LARGE) for _ in range(world)]
    dist.all_gather(parts, xs[rank])
    assert all(torch.equal(a, b) for a, b in zip(parts, xs, strict=True))
    swapped = torch.empty(world)
    dist.all_to_all_single(swapped, torch.full((world,), float(rank)))
    assert swapped.tolist() == [float(r) for r in range(world)]
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(world)]
    if rank == 0:
        dist.send(xs[0], 1)
    elif rank == 1:
        dist.recv(x, 0)
        assert torch.equal(x, xs[0])
    dist.reduce(torch.ones(3), 0)
    dist.scatter(torch.empty(3), [torch.ones(3)] * world if rank == 0 else None)
    dist.gather(torch.ones(3), [torch.empty(3)] * world if rank == 0 else None)
    dist.barrier()
    assert bytes_sent() == 0

    # Many in flight, ours and Gloo's, matched in the order of issue and waited for in another.
    ours, theirs = [], []
    for number in range(8):
        own, count = xs[rank] * (number + 1), torch.full((4,), number + rank)
        ours.append((own, dist.all_reduce(own, async_op=True)))
        theirs.append((count, dist.all_reduce(count, async_op=True)))
    for number in reversed(range(8)) if rank else range(8):
        ours[number][1].wait()
        theirs[number][1].wait()
        expected_sum = emulate([x * (number + 1) for x in xs], "sum", Codec(), [0] * world)
        assert torch.equal(ours[number][0], expected_sum)
        assert theirs[number][0][0] == number * world + sum(range(world))


@pytest.mark.parametrize("world", [2, 3])
def test_functions(tmp_path: Path, world: int) -> None:
    """Among them what Gloo refuses: AVG, bfloat16 (pytorch#111131), lists to all (pytorch#88245; ours need none).

    And a SUM is not scaled (torchft#286).
    """
    run_world(tmp_path, world, check_plain_functions, tmp_path)


def check_options(rank: int, world: int, directory: Path) -> None:
    start(rank, world, directory, "default", None)
    group = dist.group.WORLD
    assert group.options == Options("int8", 128, "nearest", 2**20, ("all_reduce", "reduce_scatter"))
    x = everyone(world, 2**18 - 1)
    own = x[rank].clone()
    dist.all_reduce(own)  # just below 1 MiB: exact
    torch.testing.assert_close(own, x[0] + x[1])
    dist.all_reduce(own, dist.ReduceOp.AVG)  # which Gloo does not have
    torch.testing.assert_close(own, x[0] + x[1])
    reset_bytes_sent()
    dist.all_reduce(torch.ones(2**18))
    assert 0 < bytes_sent() < 2**18 * 1.02 + 300

    start(rank, world, directory, "gather", Options("int4", 32, operations=("all_gather",), min_bytes=4000))
    own, gathered = torch.rand(LARGE), torch.empty(world, LARGE)
    dist.all_gather_into_tensor(gathered, own)
    error = (gathered[rank] - own).abs().max()
    assert 0 < error < 1 / 14 + 0.01
    total = own.clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, gathered.sum(0), rtol=0, atol=0.2)
    # A group made without options has those of the default group; one with options its own.
    assert dist.new_group(range(world)).options == dist.group.WORLD.options
    assert dist.new_group(range(world), pg_options=Options("nf4")).options.format == "nf4"

    # The environment fills what is not given, and overrides nothing that is.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGOQ_FORMAT", "int4")
        patch.setenv("AGOQ_MIN_BYTES", "123")
        patch.setenv("AGOQ_OPERATIONS", "all_reduce, all_gather")
        assert Options() == Options("int4", 128, "nearest", 123, ("all_reduce", "all_gather"))
        assert Options(format="int8", min_bytes=7).format == "int8" and Options(min_bytes=7).min_bytes == 7
        patch.setenv("AGOQ_MIN_BYTES", "many")
        with pytest.raises(ValueError, match="Options: AGOQ_MIN_BYTES must be int; got 'many'"):
            Options()


def test_options(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_options, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "int3"}, "Options: format must be one of .*; got 'int3'"),
        ({"group_size": 48}, "Options: group_size must be one of .*; got 48"),
        ({"rounding": "up"}, "Options: rounding must be .*; got 'up'"),
        ({"min_bytes": -1}, "Options: min_bytes must not be negative; got -1"),
        ({"operations": ("broadcast",)}, "Options: operations must be among .*; got 'broadcast'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**options)


def check_disagreement(rank: int, world: int, directory: Path) -> None:
    for number, (mine, yours) in enumerate([("int8", "int4"), ("nf4", "int8")]):
        with pytest.raises(Disagreement, match=f"rank 0: .*'{mine}'.*; rank 1: .*'{yours}'"):
            start(rank, world, directory, f"options-{number}", Options(format=yours if rank else mine))
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(process_group, "__version__", "9.9")
        with pytest.raises(Disagreement, match="agoq_ext 0.1.0.*agoq_ext 9.9"):
            start(rank, world, directory, "version")
    with pytest.raises(TypeError, match="pg_options must be agoq_ext.process_group.Options; got dict"):
        start(rank, world, directory, "type", {"format": "int8"})


def test_ranks_compare_version_and_options(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_disagreement, tmp_path)


# --- what is built on groups -------------------------------------------------------------------------------------


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 1))


def step_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(32, 32, generator=generator)
    return (model(x).float() - torch.sin(x[:, :4].sum(1, keepdim=True)) - x[:, 4:5]).square().mean()


def train(model: nn.Module, optimizer: Any, rank: int, steps: int = 15) -> float:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = step_loss(model, step, rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses
    total = torch.tensor(sum(losses[-5:]), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def full(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def bits(model: nn.Module) -> str:
    return digest(torch.cat([full(p).reshape(-1).float() for p in model.parameters()]))


def check_trainers(rank: int, world: int, directory: Path) -> list[str]:
    def ddp() -> tuple[nn.Module, Any]:
        model = DistributedDataParallel(make_network(), bucket_cap_mb=0.01)
        return model, torch.optim.AdamW(model.parameters(), 3e-3)

    def zero() -> tuple[nn.Module, Any]:
        model = DistributedDataParallel(make_network())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)
        return model, optimizer

    def fsdp(mesh_shape: tuple[int, ...], policy: Any = None) -> tuple[nn.Module, Any]:
        names = ("replicate", "shard")[-len(mesh_shape) :]
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        model = make_network()
        more = {} if policy is None else {"mp_policy": policy}
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, **more)
        fully_shard(model, mesh=mesh, **more)
        return model, torch.optim.AdamW(model.parameters(), 3e-3)

    makers = {
        "ddp": ddp,
        "zero": zero,
        "fsdp": lambda: fsdp((world,)),
        "fsdp bf16": lambda: fsdp((world,), MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
        "hsdp": lambda: fsdp((2, world // 2)),
    }
    outcomes: dict[str, list[float]] = {name: [] for name in makers}
    digests = []
    for backend in ("gloo", "agoq"):
        start(rank, world, directory, backend, None if backend == "gloo" else SMALL, backend)
        for name, make in makers.items():
            model, optimizer = make()
            outcomes[name].append(train(model, optimizer, rank))
            digests.append(bits(model))
    for name, (plain, ours) in outcomes.items():
        assert ours == pytest.approx(plain, rel=0.05), name
        assert ours != plain, f"{name}: nothing was quantized"
    return digests


def test_trainers(tmp_path: Path) -> None:
    """DDP, ZeroRedundancyOptimizer, FSDP2 and HSDP train as over Gloo, and leave all ranks with the same bits."""
    results = run_world(tmp_path, 4, check_trainers, tmp_path, timeout=150)
    assert all(result == results[0] for result in results)


def check_average(rank: int, world: int, directory: Path) -> None:
    def gradients(wrap: bool) -> list[Tensor]:
        model = make_network()
        if wrap:
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        losses = [step_loss(model, 0, r) for r in ([rank] if wrap else range(world))]
        (sum(losses) / len(losses)).backward()
        grads = [p.grad for p in model.parameters()]
        return [g.full_tensor() if wrap else g for g in grads]

    expected = gradients(False)
    for name, options in (("exact", Options(min_bytes=2**30)), ("int8", Options(min_bytes=0))):
        start(rank, world, directory, f"average-{name}", options)
        for found, exact in zip(gradients(True), expected, strict=True):
            limit = 1e-5 if name == "exact" else 0.03
            assert (found - exact).norm() < limit * exact.norm(), name


def test_fsdp2_averages(tmp_path: Path) -> None:
    """Gradients, not losses: under AdamW nobody sees that AVG on Gloo has summed (pytorch#162338)."""
    run_world(tmp_path, 2, check_average, tmp_path)


def check_functional(rank: int, world: int, directory: Path) -> None:
    start(rank, world, directory, "functional")
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    xs = everyone(world)
    line = [r for r in range(world) if r // (world // 2) == rank // (world // 2)]

    def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = funcol.all_reduce(x, "sum", dist.group.WORLD)
        mean = funcol.all_reduce(x, "avg", (mesh, 1))
        share = funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)
        return total + 0, mean + 0, share + 0

    expected = emulate(xs, "sum", Codec(), [0] * world)
    mean = emulate([xs[r] for r in line], "avg", Codec(), [0] * len(line))
    eager = both(xs[rank].clone())
    assert torch.equal(eager[0], expected) and torch.equal(eager[1], mean)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(xs[rank].clone())
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b)
    # Integers through the same function are exact.
    assert torch.equal(
        funcol.all_reduce(torch.arange(9), "sum", dist.group.WORLD) + 0, torch.arange(9) * world
    )

    # new_group: only the members exchange, each group for itself.
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = xs[rank].clone()
    dist.all_reduce(own, group=pairs[rank // 2])
    pair = [rank // 2 * 2, rank // 2 * 2 + 1]
    assert torch.equal(own, emulate([xs[r] for r in pair], "sum", Codec(), [0, 0]))


def test_functional_collectives_meshes_and_new_groups(tmp_path: Path) -> None:
    """Compiled ones give the bits of eager ones (ColossalAI#6025, pytorch#109774)."""
    run_world(tmp_path, 4, check_functional, tmp_path, timeout=100)


# --- faults ------------------------------------------------------------------------------------------------------


def failure_of(call: Any) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value), time.monotonic() - began


def check_dead_peer(rank: int, world: int, directory: Path) -> None:
    start(rank, world, directory, "dead")
    model = DistributedDataParallel(make_network(), bucket_cap_mb=0.01)
    for step in range(3):
        step_loss(model, step, rank).backward()
    if rank == 1:
        os._exit(3)
    # An error that C++ took for a value would let DDP go on with gradients of its own.
    message, seconds = failure_of(lambda: step_loss(model, 3, rank).backward())
    assert "the exchange failed" in message and seconds < 15
    message, seconds = failure_of(lambda: dist.all_reduce(torch.ones(LARGE)))
    assert "an earlier exchange on this group failed" in message and seconds < 1
    dist.destroy_process_group()


def test_a_dead_peer_is_an_error_in_ddp(tmp_path: Path) -> None:
    run_world(tmp_path, 3, check_dead_peer, tmp_path, dying=[1])


def check_silent_peer(rank: int, world: int, directory: Path) -> None:
    start(rank, world, directory, "silent", timeout=3)
    dist.all_reduce(torch.ones(LARGE))
    if rank == 0:
        work = dist.all_reduce(torch.ones(LARGE), async_op=True)
        message, seconds = failure_of(work.wait)
        assert "imed out" in message and 2 < seconds < 12
    else:
        while not (directory / "gave-up").exists():
            time.sleep(0.02)
    (directory / "gave-up").touch()
    began = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - began < 2


def test_a_silent_peer_is_an_error_within_the_timeout(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_silent_peer, tmp_path)


def check_unequal(rank: int, world: int, directory: Path) -> None:
    start(rank, world, directory, "unequal")
    x = torch.ones(LARGE + 128 * rank)
    for call in (lambda: dist.all_reduce(x), lambda: dist.all_reduce(x, async_op=True).wait()):
        message, _ = failure_of(call)
        assert all(f"rank {r}: " in message and f"numel={LARGE + 128 * r}" in message for r in range(world))
    assert (x == 1).all()
    dist.all_reduce(x[:LARGE])  # all ranks know, so the group is still in step
    assert (x[:LARGE] - world).abs().max() < 0.1 and (x[LARGE:] == 1).all()


def test_unequal_sizes_are_an_error_on_every_rank(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_unequal, tmp_path)


def check_abort(rank: int, world: int, directory: Path) -> None:
    start(rank, world, directory, "abort", timeout=60)
    dist.all_reduce(torch.ones(LARGE))
    if rank == 0:
        x = torch.ones(LARGE)
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(TimeoutError):
            work.wait(datetime.timedelta(seconds=0.3))
        began = time.monotonic()
        dist.group.WORLD.abort()
        message, _ = failure_of(work.wait)
        assert "aborted" in message and time.monotonic() - began < 2
        message, _ = failure_of(lambda: dist.all_reduce(torch.ones(LARGE)))
        assert "aborted" in message
        dist.destroy_process_group()
        assert time.monotonic() - began < 4
        (directory / "aborted").touch()
    while not (directory / "aborted").exists():
        time.sleep(0.02)


def test_abort_ends_what_is_in_flight(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_abort, tmp_path)
