"""Rate-limited links between local processes: network namespaces, and one rank of a benchmark in each.

Needs root, `ip` and `tc`; `missing` says what a machine lacks.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agoq_ext import ops


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


@contextlib.contextmanager
def network(world: int, rate: str) -> Iterator[list[str]]:
    """Namespaces, one a rank, joined by a bridge in another.

    Args:
        rate: of each link, both ways, in tc's words ("20mbit"; a token bucket with 50 ms of queue), or "none".
    """
    prefix = f"agoq{os.getpid() % 10000}"
    bridge = f"{prefix}b"
    names = [f"{prefix}r{rank}" for rank in range(world)]
    limit = "" if rate == "none" else f"root tbf rate {rate} burst 256kb latency 50ms"
    try:
        for name in (bridge, *names):
            sh(f"ip netns add {name}")
        sh(f"ip -n {bridge} link add br0 type bridge")
        sh(f"ip -n {bridge} link set br0 up")
        for rank, name in enumerate(names):
            sh(f"ip -n {name} link add eth0 type veth peer name p{rank} netns {bridge}")
            sh(f"ip -n {name} addr add 10.77.0.{rank + 1}/24 dev eth0")
            sh(f"ip -n {name} link set eth0 up")
            sh(f"ip -n {name} link set lo up")
            sh(f"ip -n {bridge} link set p{rank} master br0")
            sh(f"ip -n {bridge} link set p{rank} up")
            if limit:
                sh(f"ip netns exec {name} tc qdisc add dev eth0 {limit}")
                sh(f"ip netns exec {bridge} tc qdisc add dev p{rank} {limit}")
        yield names
    finally:
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def missing() -> str | None:
    """Why this machine cannot limit a link; None if it can."""
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            return f"{tool} is not installed"
    if os.geteuid() != 0:
        return "making a network namespace needs root"
    try:
        with network(1, "1gbit"):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


def run_ranks(script: str, world: int, rate: str, arguments: Sequence[str] = (), timeout: float = 600) -> Any:
    """Runs `script --rank R/W --directory D *arguments` in each namespace; what rank 0 wrote with `write_result`."""
    with network(world, rate) as names, tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        own = [sys.executable, os.path.abspath(script), "--directory", directory, *arguments]
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *own, "--rank", f"{rank}/{world}"], env=environment
            )
            for rank, name in enumerate(names)
        ]
        try:
            statuses = [process.wait(timeout) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(statuses):
            raise RuntimeError(f"{Path(script).stem}: ranks ended with {statuses}")
        return json.loads((Path(directory) / "result.json").read_text())


def join(rank: int, world: int, directory: Path) -> None:
    """Sets up the default process group, Gloo with one compute thread a rank; what `run_ranks` started calls it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(directory / "store"), world),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )


def write_result(directory: Path, result: Any) -> None:
    (directory / "result.json").write_text(json.dumps(result))


def facts() -> dict[str, Any]:
    """Where and from what something was measured."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "commit": commit.stdout.strip(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {ops.cpu_isa()}",
        "torch": torch.__version__,
        "nice": os.nice(0),
    }
