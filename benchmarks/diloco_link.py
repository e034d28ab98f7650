"""Share of the time in which two replicas compute, over a link of 20 Mbit/s: Streaming DiLoCo beside data parallel.

    python benchmarks/diloco_link.py [--rate 20mbit] [--output benchmarks/results]

Each replica is a process with one thread in a network namespace of its own (links.py), training the 1.1M model of
`agoq train` on random bytes. Segments of a method alternate with segments without any exchange; utilization is the
time of a step in the segments before and after over the time of a step in the method's segment, all of the slowest
replica. Every method begins with steps that are not timed: of DiLoCo, one period and the overlap, so that a segment
is whole periods in a steady state and holds the start and the finish of its exchanges. Writes diloco_link.json, .md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import links
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import agoq_ext
from agoq_ext.training.config import TrainConfig
from agoq_ext.training.model import build_model, loss_inputs, make_optimizer

BATCH, SEQ, EVERY, OVERLAP = 8, 128, 30, 5
ALONE = "no exchange"
# Segments that are timed, and the steps of one, by method.
SEGMENTS = {
    "data parallel, FP32": (3, 3),
    "data parallel, int8": (3, 8),
    "data parallel, int4": (3, 12),
    "DiLoCo, FP32": (2, EVERY),
    "streaming DiLoCo, E3M0": (6, EVERY),
}
ALONE_STEPS = 20
# What the project asks of the utilization: at least, or below.
REQUIRED = {"data parallel, FP32": "< 0.2", "streaming DiLoCo, E3M0": ">= 0.95"}


# --- a replica ---------------------------------------------------------------------------------------------------


def make(method: str) -> tuple[Callable[[], None], agoq_ext.StreamingDiLoCo | None, int]:
    """(one step, the synchronization if the method has one, steps to run before timing)."""
    config = TrainConfig(out="", activations="none", gradients="fp32", precision="fp32", batch=BATCH, seq=SEQ)
    model = build_model(config)
    optimizer = make_optimizer(model.parameters(), config)
    inputs, targets = torch.randint(256, (2, BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    diloco, untimed = None, 3
    if method.startswith("data parallel"):
        model = DistributedDataParallel(model)
        if not method.endswith("FP32"):
            agoq_ext.ddp.register(model, format=method.split()[-1])
    elif method == "DiLoCo, FP32":
        diloco = agoq_ext.StreamingDiLoCo(model, optimizer, sync_every=EVERY, fragments=1, format="float32")
        untimed = EVERY
    elif method == "streaming DiLoCo, E3M0":
        diloco = agoq_ext.StreamingDiLoCo(model, optimizer, sync_every=EVERY, overlap=OVERLAP)
        untimed = EVERY + OVERLAP

    def step() -> None:
        model(**loss_inputs(inputs, targets)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if diloco is not None:
            diloco.step()

    return step, diloco, untimed


def slowest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def segment(step: Callable[[], None], steps: int) -> float:
    """Seconds a step of the slowest replica."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return slowest(time.perf_counter() - began) / steps


def measure(method: str, alone: Callable[[], None]) -> dict[str, Any]:
    step, diloco, untimed = make(method)
    for _ in range(untimed):
        step()
    count, steps = SEGMENTS[method]
    waited, sent = (diloco.blocked_seconds, diloco.bytes_sent) if diloco is not None else (0.0, 0)
    without, with_exchange = [segment(alone, ALONE_STEPS)], []
    for _ in range(count):
        with_exchange.append(segment(step, steps))
        without.append(segment(alone, ALONE_STEPS))
    result: dict[str, Any] = {"alone": without, "seconds_a_step": with_exchange}
    if diloco is not None:
        result["blocked_share"] = slowest((diloco.blocked_seconds - waited) / (steps * sum(with_exchange)))
        result["bytes_a_step"] = (diloco.bytes_sent - sent) / (steps * count)
    dist.barrier()
    return result


def run_rank(rank: int, world: int, directory: Path) -> None:
    links.join(rank, world, directory)
    alone, _, _ = make(ALONE)
    segment(alone, ALONE_STEPS)
    found = {method: measure(method, alone) for method in SEGMENTS}
    if rank == 0:
        links.write_result(directory, found)
    dist.barrier()


# --- results -----------------------------------------------------------------------------------------------------


def rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a method: medians over the segments."""
    found = []
    for method, result in results.items():
        around = [(a + b) / 2 for a, b in itertools.pairwise(result["alone"])]
        shares = [alone / own for alone, own in zip(around, result["seconds_a_step"], strict=True)]
        found.append(
            {
                "method": method,
                "alone_seconds_a_step": statistics.median(around),
                "seconds_a_step": statistics.median(result["seconds_a_step"]),
                "utilization": statistics.median(shares),
                "utilization_range": [min(shares), max(shares)],
                "blocked_share": result.get("blocked_share"),
                "required": REQUIRED.get(method),
            }
        )
    return found


def table(results: dict[str, Any]) -> str:
    lines = [
        "| method | ms a step | without exchange | utilization | min-max | waiting for exchanges | required |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows(results):
        blocked = "" if row["blocked_share"] is None else f"{row['blocked_share']:.1%}"
        low, high = row["utilization_range"]
        lines.append(
            f"| {row['method']} | {1000 * row['seconds_a_step']:.1f} | {1000 * row['alone_seconds_a_step']:.1f} | "
            f"{row['utilization']:.3f} | {low:.3f}-{high:.3f} | {blocked} | {row['required'] or ''} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank, world = map(int, args.rank.split("/"))
        run_rank(rank, world, args.directory)
        return 0
    reason = links.missing()
    if reason is not None:
        print(f"diloco_link: not measured: {reason}")
        return 0
    results = links.run_ranks(__file__, 2, args.rate)
    args.output.mkdir(parents=True, exist_ok=True)
    result = links.facts() | {"rate": args.rate, "results": results, "rows": rows(results)}
    (args.output / "diloco_link.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.output / "diloco_link.md").write_text(table(results))
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
