"""Throughput of every CUDA kernel as a share of a device copy measured in the same run.

    python benchmarks/gpu_kernels.py [--json FILE] [--mib 1024] [--formats int8,int4] [--dtypes bfloat16]

Bytes are all that an op reads and writes: elements, codes and scales; of `Tensor.copy_`, the source and the target.
Each timed call of an op follows one of `copy_` on a tensor of the same size, and the two form a ratio of medians. The
tensors are far larger than the caches. Before anything is timed, results are compared with the CPU's.
benchmarks/gpu_check.sh runs this after building and testing. `--device cpu` tries the script where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from agoq_ext import __version__, fused_ops, layout, ops

COLS = 4096
GROUP_SIZE = 128
SHARDS = 8
EPS = 1e-6

# The shares that the project asks for on an H200, by op and format; None where none is asked for.
_CODEC_GOALS = {"int8": 0.90, "int4": 0.90, "fp8_e4m3": 0.90, "fp8_e5m2": 0.90, "nf4": 0.75}


def goal_of(op: str, format: str) -> float | None:
    if "stochastic" in op:
        return 0.75
    if op.startswith("reduce"):
        return 0.85
    if op.startswith(("rms_norm", "layer_norm", "swiglu")):
        return 0.90
    return None if op.startswith(("gelu", "sum of squares")) else _CODEC_GOALS.get(format)


@dataclass
class Result:
    """`share` is the op's bytes per second by the copy's; milliseconds are medians."""

    op: str
    format: str
    dtype: str
    bytes: int
    ms: float
    copy_ms: float
    share: float
    goal: float | None


@dataclass
class Timed:
    """A call and the tensors that it reads and writes."""

    op: str
    call: Callable[[], object]
    moved: tuple[Tensor, ...]


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    call()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event)


# --- the calls ------------------------------------------------------------------------------------------------


def codec_calls(x: Tensor, y: Tensor, format: str) -> Iterator[Timed]:
    packed, scales = ops.quantize(x, format, GROUP_SIZE)
    codes = (packed, scales)
    seed = torch.tensor([1], device=x.device)
    yield Timed("quantize", lambda: ops.quantize_out(x, *codes, format, GROUP_SIZE), (x, *codes))
    yield Timed(
        "quantize stochastic",
        lambda: ops.quantize_out(x, *codes, format, GROUP_SIZE, "stochastic", seed),
        (x, *codes),
    )
    yield Timed("dequantize", lambda: ops.dequantize_out(*codes, y, format, GROUP_SIZE), (*codes, y))
    inout = tuple(t.clone() for t in codes)
    yield Timed(
        "accumulate_", lambda: ops.accumulate_(*inout, x, 0.01, format, GROUP_SIZE), (x, *inout, *inout)
    )
    rows = x.shape[0] // SHARDS
    shards = tuple(t[: rows * SHARDS].view(SHARDS, rows, *t.shape[1:]) for t in codes)
    out = y[:rows]
    yield Timed(
        f"reduce W={SHARDS}",
        lambda: ops.reduce_out(*shards, out, format, GROUP_SIZE, 1 / SHARDS),
        (*shards, out),
    )
    total = tuple(torch.empty_like(t[0]) for t in shards)
    yield Timed(
        f"reduce_quantize W={SHARDS}",
        lambda: ops.reduce_quantize_out(*shards, COLS, format, GROUP_SIZE, 1 / SHARDS, *total),
        (*shards, *total),
    )
    yield Timed("sum of squares", lambda: ops.norm(*codes, COLS, format, GROUP_SIZE), codes)


def fused_calls(x: Tensor, y: Tensor, format: str) -> Iterator[Timed]:
    """`y` serves as the second input and as the gradient above; its values do not matter."""
    dtype, encode, decode = x.dtype, (format, GROUP_SIZE), (format, GROUP_SIZE)
    saved = ops.quantize(x, *encode)
    weight = torch.ones(COLS, dtype=dtype, device=x.device)
    forward, backward = (x, y, *saved), (y, *saved, x)  # x stands for tensors of its size
    yield Timed("rms_norm forward", lambda: fused_ops.rms_norm_quantize(x, weight, EPS, *encode), forward)
    yield Timed(
        "rms_norm backward",
        lambda: fused_ops.rms_norm_backward(y, *saved, weight, EPS, *decode, dtype),
        backward,
    )
    yield Timed(
        "layer_norm forward", lambda: fused_ops.layer_norm_quantize(x, weight, weight, EPS, *encode), forward
    )
    yield Timed(
        "layer_norm backward",
        lambda: fused_ops.layer_norm_backward(y, *saved, weight, EPS, *decode, dtype),
        backward,
    )
    yield Timed("swiglu forward", lambda: fused_ops.swiglu_quantize(x, y, *encode), (x, y, x, *saved, *saved))
    yield Timed(
        "swiglu backward",
        lambda: fused_ops.swiglu_backward(y, *saved, *saved, *decode, dtype, dtype, need_h=True),
        (y, *saved, *saved, x, x, x),
    )
    yield Timed("gelu forward", lambda: fused_ops.gelu_quantize(x, "none", *encode), forward)
    yield Timed("gelu backward", lambda: fused_ops.gelu_backward(y, *saved, "none", *decode, dtype), backward)


def check(format: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raises if the device's codes or values differ from the CPU's on a small tensor."""
    x = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    want = ops.quantize(x, format, GROUP_SIZE)
    got = ops.quantize(x.to(device), format, GROUP_SIZE)
    pairs = [*zip(got, want, strict=True)]
    pairs += [tuple(ops.dequantize(*codes, 1000, format, GROUP_SIZE, dtype) for codes in (got, want))]
    if not all(torch.equal(a.cpu(), b) for a, b in pairs):
        raise AssertionError(f"{format} {dtype}: {device} and the CPU differ")


# --- measuring ------------------------------------------------------------------------------------------------


def measure(x: Tensor, y: Tensor, format: str, repeat: int) -> Iterator[Result]:
    for calls in (codec_calls, fused_calls):
        for timed in calls(x, y, format):
            copies, times = [], []
            for _ in range(repeat + 1):
                copies.append(milliseconds(lambda: y.copy_(x), x.device))
                times.append(milliseconds(timed.call, x.device))
            moved = sum(t.nbytes for t in timed.moved)
            ms, copy_ms = statistics.median(times[1:]), statistics.median(copies[1:])  # the first warms up
            share = (moved / ms) / (2 * x.nbytes / copy_ms)
            dtype = str(x.dtype).removeprefix("torch.")
            yield Result(timed.op, format, dtype, moved, ms, copy_ms, share, goal_of(timed.op, format))


def measure_all(
    device: torch.device, mib: int, formats: list[str], dtypes: list[str], repeat: int
) -> list[Result]:
    results: list[Result] = []
    for dtype in (getattr(torch, name) for name in dtypes):
        rows = max(SHARDS, (mib << 20) // (COLS * dtype.itemsize))
        x = torch.randn(rows, COLS, device=device, dtype=dtype)
        y = torch.randn(rows, COLS, device=device, dtype=dtype)
        for format in formats:
            check(format, dtype, device)
            results += measure(x, y, format, repeat)
            print(f"measured {format} {dtype}", file=sys.stderr)
    return results


def print_table(results: list[Result]) -> None:
    """A line an op and dtype, a column a format; shares below the goal are marked."""
    formats = list(dict.fromkeys(r.format for r in results))
    print(f"{'op':22} {'dtype':9}" + "".join(f"{f:>10}" for f in formats))
    for op, dtype in dict.fromkeys((r.op, r.dtype) for r in results):
        line = {r.format: r for r in results if (r.op, r.dtype) == (op, dtype)}
        marks = {f: "!" if r.goal is not None and r.share < r.goal else " " for f, r in line.items()}
        print(f"{op:22} {dtype:9}" + "".join(f"{line[f].share:9.2f}{marks[f]}" for f in formats))
    copy = statistics.median(r.copy_ms for r in results)
    print(f"Shares of copy_'s bytes per second (median copy: {copy:.3f} ms); ! marks those below the goal.")


def output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def machine(device: torch.device) -> dict[str, str]:
    cuda = device.type == "cuda"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "driver": output_of(*query).partition("\n")[0] if cuda else "none",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "agoq_ext": __version__,
        "commit": output_of("git", "describe", "--always", "--dirty", "--abbrev=40"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--mib", type=int, default=1024, help="size of a dense tensor")
    parser.add_argument("--formats", default=",".join(layout.FORMATS))
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_kernels: there is no GPU, or torch has no CUDA; nothing was measured", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    formats, dtypes = options.formats.split(","), options.dtypes.split(",")
    results = measure_all(device, options.mib, formats, dtypes, options.repeat)
    if options.json:
        head = {"run": True, **machine(device), "mib": options.mib, "cols": COLS, "group_size": GROUP_SIZE}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({**head, "results": [asdict(r) for r in results]}, indent=1) + "\n"
        )
    print_table(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
