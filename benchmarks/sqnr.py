"""Signal to quantization noise of every format, group size and kind of data: the table in docs/formats.md.

    python benchmarks/sqnr.py            # prints the table in Markdown

BF16 scales, rounding to nearest, 2^20 elements of each kind from a fixed seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

import agoq_ext
from agoq_ext import layout

ROWS, COLS = 1024, 1024


def data() -> dict[str, Tensor]:
    """Gaussian values, what SwiGLU and GELU produce from them, and a heavy-tailed mixture like gradients."""
    g = torch.Generator().manual_seed(0)
    u, v, w = (torch.randn(ROWS, COLS, generator=g) for _ in range(3))
    return {
        "Gaussian": u,
        "silu(u) v": torch.nn.functional.silu(u) * v,
        "GELU output": torch.nn.functional.gelu(u),
        "heavy-tailed": u * torch.exp(w),
    }


def sqnr(x: Tensor, format: str, group_size: int) -> float:
    """10 log10 of the power of x over that of its error, in dB."""
    error = agoq_ext.quantize(x, format, group_size).dequantize() - x
    return 10 * torch.log10(x.double().square().sum() / error.double().square().sum()).item()


def main() -> None:
    kinds = data()
    columns = [(kind, size) for kind in kinds for size in (32, 128)]
    print("| format | " + " | ".join(f"{kind}, {size}" for kind, size in columns) + " |")
    print("|---" + "|---:" * len(columns) + "|")
    for format in layout.FORMATS:
        cells = (f"{sqnr(kinds[kind], format, size):.1f}" for kind, size in columns)
        print(f"| {format} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
