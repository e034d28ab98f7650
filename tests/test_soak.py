"""10 000 mixed steps: memory, file descriptors and threads of a rank do not grow."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from distributed import run_world
from torch import nn

import agoq_ext
from agoq_ext import ops
from agoq_ext.collectives import ErrorFeedback

STEPS = 10_000


def state() -> tuple[int, int, int]:
    """(resident bytes, open file descriptors, threads of this process as the kernel counts them)."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def soak(rank: int, world: int, steps: int) -> list[tuple[int, int, int]]:
    torch.manual_seed(rank)
    layer = nn.TransformerEncoderLayer(
        64, 4, 128, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    agoq_ext.compress_activations(layer)
    stored = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    store = agoq_ext.GradientStore(stored)
    optimizer = torch.optim.SGD(stored.parameters(), 1e-4)
    replica = nn.Linear(64, 64)
    inner = torch.optim.SGD(replica.parameters(), 1e-4)
    diloco = agoq_ext.StreamingDiLoCo(replica, inner, sync_every=4, fragments=1, overlap=1)
    feedback = ErrorFeedback()
    tensor = torch.randn(20_000)
    x = torch.randn(2, 8, 64)
    packed, scales = ops.quantize(tensor[None], "int8", 128)
    marks = []
    for step in range(steps):
        kind = step % 5
        if kind == 0:
            format = ("int4", "nf4", "uint4", "fp8_e4m3")[step // 5 % 4]
            agoq_ext.quantize(tensor, format, rounding="stochastic", seed=step).dequantize()
            ops.accumulate_(packed, scales, tensor[None], 0.01, "int8", 128)
        elif kind == 1:
            layer(x).square().mean().backward()
            layer.zero_grad()
        elif kind == 2:
            work = agoq_ext.all_reduce(tensor, format="int4", async_op=True, feedback=feedback)
            work.wait()
        elif kind == 3:
            stored(x).square().mean().backward()
            store.step(optimizer, max_norm=1.0)
        else:
            replica(x).square().mean().backward()
            inner.step()
            inner.zero_grad()
            diloco.step()
        if (step + 1) % (steps // 10) == 0:
            marks.append(state())
    assert tensor.isfinite().all() and threading.active_count() < 10
    return marks


def check(marks: list[tuple[int, int, int]]) -> None:
    """From the third tenth on nothing grows; 4 MiB are what allocators move back and forth."""
    resident, files, threads = zip(*marks, strict=True)
    assert max(resident[3:]) - resident[2] < 4 * 2**20, [r // 2**10 for r in resident]
    assert max(files[3:]) <= files[2], files
    assert max(threads[3:]) <= threads[2], threads


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_grows_over_ten_thousand_steps(tmp_path: Path) -> None:
    for marks in run_world(tmp_path, 2, soak, STEPS, timeout=800):
        check(marks)


def test_growth_is_seen() -> None:
    steady = [(10**8, 20, 9)] * 10
    check(steady)
    for grown in ((10**8 + 5 * 2**20, 20, 9), (10**8, 21, 9), (10**8, 20, 10)):
        with pytest.raises(AssertionError):
            check([*steady[:9], grown])
