"""Throughput of the CPU codecs as a share of a copy measured in the same run.

    python benchmarks/bench_codecs.py [--json FILE] [--formats int8,int4] [--dtypes float32] [--threads 1,2]

Bytes are all that an op reads and writes: elements, codes and scales; of `Tensor.copy_`, the source and the target.
Each timed call of an op follows one of `copy_` on a tensor of the same dtype, and the two form a ratio, so that a busy
machine slows both. The table shows medians, the JSON file quartiles and the copy's bytes per second too.
Before anything is timed, results are compared with the reference.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from agoq_ext import __version__, layout, ops, reference

COLS = 4096
SHARDS = 4
OPS = ("quantize", "dequantize", "accumulate_", "reduce", "quantize stochastic")
# The shares that the project asks of nearest rounding, by op: for int8 and int4, and for the other formats.
REQUIRED = {"quantize": (0.8, 0.5), "dequantize": (0.8, 0.5), "accumulate_": (0.6, 0.6), "reduce": (0.6, 0.6)}


@dataclass
class Result:
    """Shares of the copy's bytes per second: quartiles over the repetitions. `copy_gb_s` is the copy's median."""

    format: str
    dtype: str
    threads: int
    op: str
    share_p25: float
    share: float
    share_p75: float
    copy_gb_s: float
    required: float | None


def bytes_of(*tensors: Tensor) -> int:
    return sum(t.nbytes for t in tensors)


def check(format: str, group_size: int, dtype: torch.dtype) -> None:
    """Raises if the ops disagree with the reference on a small tensor."""
    x = torch.randn(3, 1000).to(dtype)
    packed, scales = ops.quantize(x, format, group_size)
    want = reference.quantize(x, format, group_size, torch.bfloat16, "nearest", None)
    values = ops.dequantize(packed, scales, 1000, format, group_size, dtype)
    if not (torch.equal(packed, want[0]) and torch.equal(scales, want[1])):
        raise AssertionError(f"quantize {format} {dtype} differs from the reference")
    if not torch.equal(values, reference.dequantize(packed, scales, 1000, format, group_size, dtype)):
        raise AssertionError(f"dequantize {format} {dtype} differs from the reference")


def seconds(f: Callable[[], object]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def calls_of(
    x: Tensor, y: Tensor, format: str, group_size: int
) -> dict[str, tuple[Callable[[], object], int]]:
    """The timed call of every op and the bytes that it moves."""
    packed, scales = ops.quantize(x, format, group_size)
    inout = packed.clone(), scales.clone()
    rows = x.shape[0] // SHARDS
    shards = (
        packed[: rows * SHARDS].view(SHARDS, rows, -1),
        scales[: rows * SHARDS].view(SHARDS, rows, *scales.shape[1:]),
    )
    codes = bytes_of(packed, scales)

    def quantize(rounding: str = "nearest") -> None:
        ops.quantize_out(x, packed, scales, format, group_size, rounding, 1)

    return {
        "quantize": (quantize, x.nbytes + codes),
        "dequantize": (lambda: ops.dequantize_out(packed, scales, y, format, group_size), x.nbytes + codes),
        "accumulate_": (lambda: ops.accumulate_(*inout, x, 0.01, format, group_size), x.nbytes + 2 * codes),
        "reduce": (
            lambda: ops.reduce_out(*shards, y[:rows], format, group_size, 1 / SHARDS),
            bytes_of(*shards) + y[:rows].nbytes,
        ),
        "quantize stochastic": (lambda: quantize("stochastic"), x.nbytes + codes),
    }


def measure(
    format: str, dtype: torch.dtype, threads: int, elements: int, group_size: int, repeat: int
) -> list[Result]:
    torch.set_num_threads(threads)
    x = torch.randn(elements // COLS, COLS).to(dtype)
    y = torch.empty_like(x)
    y.copy_(x)
    calls = calls_of(x, y, format, group_size)
    shares: dict[str, list[float]] = {op: [] for op in calls}
    copies: list[float] = []
    for repetition in range(repeat + 1):
        for op, (call, moved) in calls.items():
            if op == "quantize stochastic" and repetition > 2:  # slow, and no share is asked of it
                continue
            copy = 2 * x.nbytes / seconds(lambda: y.copy_(x))
            share = moved / seconds(call) / copy
            if repetition > 0:  # the first warms up
                copies.append(copy)
                shares[op].append(share)
    results = []
    for op, values in shares.items():
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        needed = REQUIRED.get(op)
        results.append(
            Result(
                format, str(dtype).removeprefix("torch."), threads, op, low, middle, high,
                statistics.median(copies) / 1e9, needed and needed[0 if format in ("int8", "int4") else 1],
            )
        )  # fmt: skip
    return results


def print_table(results: list[Result]) -> None:
    """One line for each format, dtype and thread count; shares below the required one are marked."""
    width = max(len(op) for op in OPS) + 1
    print(
        f"{'format':10} {'dtype':9} {'threads':7} {'copy GB/s':>9} " + "".join(f"{op:>{width}}" for op in OPS)
    )
    lines: dict[tuple[str, str, int], list[Result]] = {}
    for result in results:
        lines.setdefault((result.format, result.dtype, result.threads), []).append(result)
    for (format, dtype, threads), line in lines.items():
        cells = [f"{r.share:.2f}{'!' if r.required and r.share < r.required else ' '}" for r in line]
        print(
            f"{format:10} {dtype:9} {threads:7} {line[0].copy_gb_s:9.1f} "
            + "".join(f"{c:>{width}}" for c in cells)
        )
    print("Shares of copy_'s bytes per second, medians; ! marks those below what the project asks for.")


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] \
        if info.exists() else []  # fmt: skip
    return names[0] if names else platform.processor()


def main() -> int:
    parser = argparse.ArgumentParser(description="Throughput of the CPU codecs as a share of Tensor.copy_'s.")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--formats", default=",".join(layout.FORMATS))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument(
        "--elements", type=int, default=2**26, help="of a tensor; far more than the caches hold"
    )
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    results: list[Result] = []
    for threads in map(int, options.threads.split(",")):
        for name in options.dtypes.split(","):
            dtype = getattr(torch, name)
            for format in options.formats.split(","):
                check(format, options.group_size, dtype)
                results += measure(
                    format, dtype, threads, options.elements, options.group_size, options.repeat
                )
                print(f"measured {format} {name} {threads}", file=sys.stderr)
    print_table(results)
    if options.json:
        machine = {"processor": processor(), "cpus": os.cpu_count(), "isa": ops.cpu_isa()}
        head = {"agoq_ext": __version__, "torch": torch.__version__, "machine": machine}
        shape = {
            "elements": options.elements,
            "cols": COLS,
            "group_size": options.group_size,
            "shards": SHARDS,
        }
        options.json.write_text(
            json.dumps({**head, **shape, "results": [asdict(r) for r in results]}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
