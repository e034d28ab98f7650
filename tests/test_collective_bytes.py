"""What the collectives count as sent, against the kernel's own count where a network namespace can be made."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_world

from agoq_ext import layout
from agoq_ext.collectives import (
    Codec,
    bytes_sent,
    channel,
    functions,
    plain_all_reduce_bytes,
    reset_bytes_sent,
    setup,
)

all_reduce = functools.partial(functions.all_reduce, min_numel=0)


def check_bytes(rank: int, world: int) -> None:
    reset_bytes_sent()
    setup()
    assert bytes_sent() == (world - 1) * channel.RECORD_BYTES
    codec, numel = Codec("int4", 64), 10_000
    all_reduce(torch.ones(numel), format="int4", group_size=64)
    reset_bytes_sent()
    for async_op in (False, True):
        work = all_reduce(torch.ones(numel), format="int4", group_size=64, async_op=async_op)
    work.wait()
    shard = layout.round_up(math.ceil(numel / world), 64)
    message = layout.round_up(shard // 2, 16) + layout.round_up(shard // 64 * 2, 16)
    assert codec.message(shard).total_bytes == message
    assert bytes_sent() == 2 * 2 * (world - 1) * message
    reset_bytes_sent(dist.group.WORLD)
    assert bytes_sent() == 0
    all_reduce(torch.ones(0), format="int4", group_size=64)
    assert bytes_sent() == (world - 1) * channel.RECORD_BYTES  # nothing but the comparison of a new call


def test_bytes_sent(tmp_path: Path) -> None:
    run_world(tmp_path, 3, check_bytes)


def loopback_bytes() -> int:
    """Bytes sent over the loopback device of this network namespace since it exists."""
    line = next(
        line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")
    )
    return int(line.split(":")[1].split()[8])


def join_private_network(rank: int, world: int, directory: Path) -> None:
    """Moves this thread to a network namespace that the ranks have to themselves, and the default group with it."""
    dist.destroy_process_group()
    libc, namespace = ctypes.CDLL(None, use_errno=True), directory / "namespace"
    if rank == 0:
        assert libc.unshare(0x40000000) == 0  # CLONE_NEWNET
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        namespace.symlink_to(f"/proc/{os.getpid()}/ns/net")
    else:
        while not namespace.is_symlink():
            time.sleep(0.01)
        with namespace.open() as handle:
            assert libc.setns(handle.fileno(), 0) == 0
    store = dist.FileStore(str(directory / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def check_kernel_bytes(rank: int, world: int, directory: Path) -> None:
    """What the kernel counts over all ranks is what they count, but for TCP's headers and Gloo's."""
    join_private_network(rank, world, directory)
    tensor = torch.randn(1_000_000)

    def kernel_and_own_bytes(call: Callable[[], Any]) -> tuple[int, int]:
        """The least of three calls: what TCP sends again on a busy machine only adds to the kernel's count."""
        call()
        counts = []
        for _ in range(3):
            dist.barrier()
            reset_bytes_sent()
            before = loopback_bytes()
            dist.barrier()
            call()
            dist.barrier()
            after = loopback_bytes()
            dist.barrier()
            counts.append((after - before, bytes_sent()))
        return min(counts)

    for format in ("int8", "int4"):
        kernel, own = kernel_and_own_bytes(lambda: all_reduce(tensor, format=format))  # noqa: B023
        assert kernel == pytest.approx(own * world, rel=0.02), format
    kernel, _ = kernel_and_own_bytes(lambda: dist.all_reduce(tensor))
    assert kernel == pytest.approx(plain_all_reduce_bytes(tensor.nbytes, world) * world, rel=0.02)


def test_bytes_are_what_the_kernel_counts(tmp_path: Path) -> None:
    trial = ["unshare", "--net", "ip", "link", "set", "lo", "up"]
    if not shutil.which("unshare") or subprocess.run(trial, capture_output=True).returncode:
        pytest.skip("needs the right to make a network namespace, and ip")
    for attempt in ("first", "second"):
        folder = tmp_path / attempt
        folder.mkdir()
        try:
            run_world(folder, 3, check_kernel_bytes, folder, timeout=40)
            return
        except AssertionError as error:
            # Gloo's mesh in a network namespace that has just come up has once failed to connect.
            if attempt == "second" or "connectFullMesh" not in str(error):
                raise


@pytest.mark.parametrize(("nbytes", "world", "expected"), [(1000, 1, 0), (1000, 2, 1000), (999, 4, 1499)])
def test_plain_all_reduce_bytes(nbytes: int, world: int, expected: int) -> None:
    assert plain_all_reduce_bytes(nbytes, world) == expected
