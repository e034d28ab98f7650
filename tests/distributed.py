"""Runs a function on every rank of a Gloo world of local processes, bounded in time.

Processes are forked from a server that has imported torch once and has never computed anything, so a world of
four starts in a fraction of a second and inherits neither threads nor locks.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    # The slow imports of the tests; DistributedDataParallel imports torch._dynamo.
    ["torch._dynamo", "agoq_ext.ddp", "agoq_ext.reference", "pytest", "hypothesis.strategies"]
)


def run_world(
    directory: Path,
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    group_timeout: float = 20,
    dying: Collection[int] = (),
) -> list[Any]:
    """What `function(rank, world, *args)` returned on each rank; None for the ranks in `dying`.

    Args:
        directory: an empty one (tmp_path) for the rendezvous and the results.
        function: defined at the top level of a module; runs with the default group initialized. It need not
            destroy it.
        timeout: seconds after which all processes are killed and the test fails.
        group_timeout: seconds, the timeout of the default group.
        dying: ranks that end without a result, as the test wants.

    Raises:
        AssertionError: a rank raised (its traceback is in the message), ended early, or was not done in time.
    """
    directory = directory / f"world-{time.monotonic_ns()}"
    directory.mkdir()
    processes = [
        _context.Process(
            target=_rank_main, args=(str(directory), rank, world, group_timeout, function, args), daemon=True
        )
        for rank in range(world)
    ]
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    results, problems = [], [f"rank {rank} was not done after {timeout} s" for rank in late]
    for rank, process in enumerate(processes):
        path = directory / f"result-{rank}"
        ok, value = pickle.loads(path.read_bytes()) if path.exists() else (None, None)
        results.append(value)
        if ok is False:
            problems.append(f"rank {rank} raised:\n{value}")
        elif rank not in dying and rank not in late and (ok is None or process.exitcode != 0):
            problems.append(f"rank {rank} ended with status {process.exitcode}, result: {ok is not None}")
    assert not problems, "\n".join(problems)
    return results


def _rank_main(
    directory: str,
    rank: int,
    world: int,
    group_timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{directory}/store", world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=group_timeout),
        )
        outcome = (True, function(rank, world, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    path = Path(directory) / f"result-{rank}"
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(path)
