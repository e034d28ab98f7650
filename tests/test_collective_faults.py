"""Collectives that cannot work: wrong arguments, ranks that disagree, dead and silent peers; and how they end."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from all_reduce_twin import emulate, random_flat
from distributed import run_world

from agoq_ext.collectives import (
    Codec,
    Disagreement,
    bytes_sent,
    channel,
    functions,
    reset_bytes_sent,
    setup,
    wire,
)

# Small tensors make small tests; the threshold has its own.
all_reduce = functools.partial(functions.all_reduce, min_numel=0)

# --- errors and faults -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tensor": [1.0]}, TypeError, "all_reduce: tensor must be a torch.Tensor; got list"),
        (
            {"tensor": torch.ones(3, dtype=torch.int64)},
            TypeError,
            "all_reduce: tensor's dtype must be float32, float16 or bfloat16; got torch.int64",
        ),
        ({"tensor": torch.ones(3, dtype=torch.float64)}, TypeError, "got torch.float64"),
        ({"tensor": torch.ones(3).to_sparse()}, TypeError, "tensor must be a dense .strided. tensor"),
        (
            {"tensor": torch.ones(3, 1).expand(3, 4)},
            ValueError,
            "tensor must not overlap itself.*shape .3, 4.",
        ),
        ({"op": "max"}, ValueError, "all_reduce: op must be 'avg' or 'sum'; got 'max'"),
        ({"format": "int3"}, ValueError, "all_reduce: format must be one of int8, .*; got 'int3'"),
        ({"group_size": 48}, ValueError, "all_reduce: group_size must be one of 32, 64, 128, 256; got 48"),
        ({"scale_dtype": torch.float16}, ValueError, "all_reduce: scale_dtype must be .*; got torch.float16"),
        ({"rounding": "up"}, ValueError, "all_reduce: rounding must be .*; got 'up'"),
        ({"rounding": "stochastic", "seed": 2**64}, ValueError, "all_reduce: seed must fit in 64 bits"),
        ({"group": 7}, TypeError, "all_reduce: group must be a process group .*; got 7"),
        ({}, RuntimeError, "all_reduce: torch.distributed is not initialized and no group is given"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        all_reduce(**{"tensor": torch.ones(3), **arguments})


def test_a_group_without_a_store() -> None:
    with pytest.raises(
        RuntimeError, match="all_reduce: rank 0 of 2: .* needs a group whose ranks met through a store"
    ):
        all_reduce(torch.ones(3), group=dist.ProcessGroup(0, 2))


def check_disagreement(rank: int, world: int) -> None:
    def disagreement(call: Any, *parts: str) -> None:
        with pytest.raises(Disagreement) as caught:
            call()
        for part in parts:
            assert part in str(caught.value), str(caught.value)

    tensor = random_flat(110, rank, 1000, torch.float32)
    before = tensor.clone()
    disagreement(
        lambda: all_reduce(tensor, format="int8" if rank == 0 else "int4"),
        "all_reduce: the ranks of the group disagree: rank 0: agoq_ext",
        "format=int8",
        "format=int4",
    )
    disagreement(lambda: all_reduce(tensor, group_size=(32, 64, 64)[rank]), "group_size=32", "group_size=64")
    scale_dtype = (torch.bfloat16, torch.float32, torch.bfloat16)[rank]
    disagreement(
        lambda: setup(scale_dtype=scale_dtype), "scale_dtype=torch.bfloat16", "scale_dtype=torch.float32"
    )
    work = all_reduce(tensor, rounding=("nearest", "nearest", "stochastic")[rank], async_op=True)
    disagreement(work.wait, "rounding=nearest", "rounding=stochastic")
    with pytest.raises(RuntimeError, match="the ranks of the group disagree"):
        work.get_future().wait()
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), Disagreement)
    disagreement(lambda: all_reduce(tensor, "sum" if rank else "avg"), "op=sum", "op=avg")
    disagreement(lambda: all_reduce(tensor[: 1000 - rank]), "numel=1000", "numel=998")
    disagreement(lambda: all_reduce(torch.ones(rank)), "numel=0", "numel=2")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(channel, "__version__", "9.9")
        disagreement(lambda: all_reduce(tensor), "agoq_ext 9.9")
    assert torch.equal(tensor, before)
    # Every rank knows, so the group is in step and stays usable.
    all_reduce(tensor)
    assert torch.equal(
        tensor, emulate([random_flat(110, r, 1000, torch.float32) for r in range(3)], "avg", Codec(), [0] * 3)
    )
    # A comparison is made once for each kind of call, unless all calls are to be compared.
    reset_bytes_sent()
    all_reduce(tensor)
    sent = bytes_sent()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.INFO)
        all_reduce(tensor)
    assert bytes_sent() == 2 * sent + 2 * channel.RECORD_BYTES


def test_ranks_that_disagree(tmp_path: Path) -> None:
    run_world(tmp_path, 3, check_disagreement)


def failure_of(call: Any) -> tuple[str, float]:
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value), time.monotonic() - start


def wait_for_files(directory: Path, rank: int, ranks: list[int]) -> None:
    """Waits for the other survivors: a process that exits closes its connections, which would hide who did not."""
    (directory / f"done-{rank}").touch()
    while not all((directory / f"done-{other}").exists() for other in ranks):
        time.sleep(0.02)


def check_killed_peer(rank: int, world: int, directory: Path, phase: str, async_op: bool) -> None:
    all_reduce(torch.ones(5000))
    if rank == 1:
        if phase == "before":
            os._exit(3)
        original = wire.reduce if phase == "reduce" else wire.decode
        assert original is not None
        setattr(wire, phase, lambda *args: os._exit(3))
    tensor = random_flat(120, rank, 5000, torch.float32)
    before = tensor.clone()
    if async_op:
        work = all_reduce(tensor, async_op=True)
        later = all_reduce(torch.ones(5000), async_op=True)
        message, seconds = failure_of(work.wait)
        assert failure_of(work.get_future().wait)[0].count(message)
        assert "an earlier exchange on this group failed" in failure_of(later.wait)[0]
        assert work.is_completed() and not work.is_success()
    else:
        message, seconds = failure_of(lambda: all_reduce(tensor))
    assert message.startswith(f"all_reduce: rank {rank} of 3: the exchange failed: ")
    assert seconds < 15, "a closed connection is noticed at once, not after the group's timeout of 20 s"
    assert torch.equal(tensor, before)
    message, seconds = failure_of(lambda: all_reduce(torch.ones(5000)))
    assert message.startswith(
        "all_reduce: an earlier exchange on this group failed, so the group cannot be used"
    )
    assert seconds < 1


@pytest.mark.parametrize(("phase", "async_op"), [("before", False), ("before", True), ("reduce", True)])
def test_a_killed_peer_is_an_error_on_all_others(tmp_path: Path, phase: str, async_op: bool) -> None:
    """Nobody hangs (torchft#141, torchft#169)."""
    run_world(tmp_path, 3, check_killed_peer, tmp_path, phase, async_op, dying=[1])


def check_silent_peer(rank: int, world: int, directory: Path) -> None:
    all_reduce(torch.ones(5000))
    if rank == 0:
        message, seconds = failure_of(lambda: all_reduce(torch.ones(5000)))
        assert "the exchange failed" in message and "imed out" in message, message
        assert 3.5 < seconds < 15
    else:
        while not (directory / "done-0").exists():
            time.sleep(0.02)
        # The rank that gave up has closed its connections: the late one learns at once.
        message, seconds = failure_of(lambda: all_reduce(torch.ones(5000)))
        assert "the exchange failed" in message and seconds < 3
    wait_for_files(directory, rank, [0, 1])


def test_a_silent_peer_is_an_error_within_the_timeout(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_silent_peer, tmp_path, group_timeout=4)


def check_absent_peer(rank: int, world: int) -> None:
    if rank == 0:
        message, seconds = failure_of(lambda: setup())
        assert message.startswith("setup: rank 0 of 2: the exchange failed: ")
        assert 1.5 < seconds < 12
    else:
        time.sleep(4)


def test_a_peer_that_never_sets_up_is_an_error_within_the_timeout(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_absent_peer, group_timeout=2)


def check_local_failure(rank: int, world: int) -> None:
    """One rank runs out of memory, say: the others are told, and its own error names the cause."""
    all_reduce(torch.ones(5000))
    if rank == 1:

        def broken(*args: Any) -> None:
            raise MemoryError("no room for the shards")

        wire.encode = broken
    message, seconds = failure_of(lambda: all_reduce(torch.ones(5000)))
    assert ("no room for the shards" in message) == (rank == 1)
    assert seconds < 15, "the peers are told at once, not after the group's timeout of 20 s"
    dist.barrier()


def test_a_local_failure_reaches_the_peers(tmp_path: Path) -> None:
    run_world(tmp_path, 3, check_local_failure)


def check_other_call(rank: int, world: int) -> None:
    """One rank makes a call that all have made before, the other a new one: an error, though not a clear one."""
    all_reduce(torch.ones(100))
    failure_of(lambda: all_reduce(torch.ones(100 if rank else 100_000)))


def test_known_and_new_calls_that_do_not_match_fail(tmp_path: Path) -> None:
    # Gloo ends the process of a rank that is sent more than it expects.
    run_world(tmp_path, 2, check_other_call, group_timeout=2, dying=[0, 1])


# --- lifetime ----------------------------------------------------------------------------------------------------


def workers() -> int:
    return sum(thread.name == "agoq_ext" for thread in threading.enumerate())


def check_lifetime(rank: int, world: int, directory: Path) -> None:
    assert workers() == 0
    for round in range(3):
        all_reduce(torch.full((1000,), float(rank)))
        pending = all_reduce(torch.full((1000,), float(rank)), async_op=True)
        assert workers() == 1
        dist.destroy_process_group()
        pending.wait()  # what was issued ends
        torch.testing.assert_close(pending.result()[0], torch.full((1000,), 0.5), rtol=0.01, atol=0)
        gc.collect()
        deadline = time.monotonic() + 10
        while workers() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert workers() == 0, "the worker of a destroyed group is still there"
        store = dist.FileStore(str(directory / f"store-{round}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def test_the_worker_ends_with_its_group(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_lifetime, tmp_path)


def check_memory(rank: int, world: int) -> None:
    """Nothing of a finished call stays alive in the worker."""
    import weakref

    tensor = torch.ones(1000)
    work = all_reduce(tensor, async_op=True)
    work.wait()
    reference_to_tensor = weakref.ref(tensor)
    del tensor, work
    deadline = time.monotonic() + 10
    while reference_to_tensor() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert reference_to_tensor() is None


def test_an_idle_worker_keeps_no_tensor(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_memory)


def leave_in_flight(rank: int, world: int) -> None:
    all_reduce(torch.ones(1000))
    if rank == 0:
        all_reduce(torch.ones(1000), async_op=True)  # never matched


def test_a_call_in_flight_does_not_keep_a_process_from_exiting(tmp_path: Path) -> None:
    run_world(tmp_path, 2, leave_in_flight, timeout=30, group_timeout=600)
