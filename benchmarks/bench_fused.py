"""Time of the fused norms and activations on the CPU, as a share of the unfused sequence measured in the same run.

    python benchmarks/bench_fused.py [--json FILE] [--dtypes bfloat16] [--formats nf4] [--threads 1]

"unfused" is what the autograd functions would otherwise call: PyTorch's operators and `quantize`, or `dequantize` and
PyTorch's formulas for the gradients (`reference_fused` on the native codecs). Each timed call of one follows one of the
other, and the two form a ratio, so that a busy machine slows both. Results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from agoq_ext import __version__, fused_ops, ops, reference_fused

GROUP_SIZE = 64
EPS = 1e-6


def native_codecs() -> Any:
    """reference_fused with the native quantize and dequantize instead of the reference's."""
    return mock.patch.multiple(reference_fused.reference, quantize=ops.quantize, dequantize=ops.dequantize)


def calls(module: Any, rows: int, cols: int, dtype: torch.dtype, format: str) -> dict[str, Callable[[], Any]]:
    """The timed calls of a module, fused_ops or reference_fused."""
    g = torch.Generator().manual_seed(0)
    x, up, dy = (torch.randn(rows, cols, generator=g).to(dtype) for _ in range(3))
    weight = torch.randn(cols, generator=g).to(dtype)
    encode, decode = (format, GROUP_SIZE, torch.bfloat16), (format, GROUP_SIZE)
    saved, up_saved = ops.quantize(x, *encode), ops.quantize(up, *encode)
    return {
        "rms_norm forward": lambda: module.rms_norm_quantize(x, weight, EPS, *encode),
        "rms_norm output again": lambda: module.rms_norm_dequantize(
            *saved, cols, weight, EPS, *decode, dtype
        ),
        "rms_norm backward": lambda: module.rms_norm_backward(dy, *saved, weight, EPS, *decode, dtype),
        "layer_norm forward": lambda: module.layer_norm_quantize(x, weight, weight, EPS, *encode),
        "layer_norm backward": lambda: module.layer_norm_backward(dy, *saved, weight, EPS, *decode, dtype),
        "swiglu forward": lambda: module.swiglu_quantize(x, up, *encode),
        "swiglu backward": lambda: module.swiglu_backward(
            dy, *saved, *up_saved, *decode, dtype, dtype, need_h=True
        ),
        "gelu forward": lambda: module.gelu_quantize(x, "none", *encode),
        "gelu backward": lambda: module.gelu_backward(dy, *saved, "none", *decode, dtype, True),
    }


def check(fused: Any, plain: Any, what: str) -> None:
    for a, b in zip(fused, plain, strict=True):
        error = (a.double() - b.double()).abs().max() / b.double().abs().max()
        if not error < 0.01:
            raise AssertionError(f"{what}: fused and unfused differ by {error:.2g} of the largest value")


def seconds(f: Callable[[], object]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--formats", default="nf4")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = []
    for format in options.formats.split(","):
        for name in options.dtypes.split(","):
            dtype = getattr(torch, name)
            size = (options.rows, options.cols, dtype, format)
            fused, plain = calls(fused_ops, *size), calls(reference_fused, *size)
            for what, call in fused.items():
                with native_codecs():
                    got, want = call(), plain[what]()
                    check(*((r,) if isinstance(r, torch.Tensor) else r for r in (got, want)), what)
                    pairs = [(seconds(call), seconds(plain[what])) for _ in range(options.repeat)]
                shares = sorted(a / b for a, b in pairs)
                results.append(
                    {
                        "op": what,
                        "format": format,
                        "dtype": name,
                        "threads": options.threads,
                        "fused_ms": 1e3 * statistics.median(a for a, _ in pairs),
                        "unfused_ms": 1e3 * statistics.median(b for _, b in pairs),
                        "share": statistics.median(shares),
                        "share_p25": shares[len(shares) // 4],
                        "share_p75": shares[3 * len(shares) // 4],
                    }
                )
    print(f"agoq-ext {__version__}, torch {torch.__version__}, {platform.machine()}, {ops.cpu_isa()}")
    print(f"[{options.rows}, {options.cols}], groups of {GROUP_SIZE}, {options.threads} threads")
    print(
        f"{'op':24}{'format':>9}{'dtype':>10}{'fused ms':>10}{'unfused ms':>12}{'share':>8}{'quartiles':>14}"
    )
    for r in results:
        times = f"{r['fused_ms']:10.1f}{r['unfused_ms']:12.1f}{r['share']:8.2f}"
        print(
            f"{r['op']:24}{r['format']:>9}{r['dtype']:>10}{times}{r['share_p25']:8.2f}{r['share_p75']:6.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
