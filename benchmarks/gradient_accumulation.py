"""Relative error of gradients that accumulate in 8 bits, against the FP64 sum of the same micro-batches.

    python benchmarks/gradient_accumulation.py [--micro-batches 8,32,128] [--output benchmarks/results]

Two kinds of data: gradients of the demo's LLaMA on text, one micro-batch of 4 sequences after another, and independent
heavy-tailed values (Student's t, 3 degrees of freedom). Each format accumulates as GradientStore does: encode the
first, then decode, add in FP32, encode. BF16 is `.grad` of a BF16 model. Writes gradient_accumulation.json and .md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from agoq_ext import __version__, ops
from agoq_ext.training.config import TrainConfig
from agoq_ext.training.data import load_corpus
from agoq_ext.training.model import build_model, loss_inputs

# What method descriptions give for heavy-tailed data, in per cent, after 8, 32 and 128 micro-batches.
EXPECTED = {"int8, 128": (2.5, 4.5, 8.2), "fp8_e4m3, 128": (4.8, 8.7, 16.5), "bfloat16": (0.35, 0.6, 1.1)}
WAYS = {
    "int8, 128": ("int8", 128, "nearest"),
    "int8, 32": ("int8", 32, "nearest"),
    "int8, 128, stochastic": ("int8", 128, "stochastic"),
    "fp8_e4m3, 128": ("fp8_e4m3", 128, "nearest"),
    "int4, 32": ("int4", 32, "nearest"),
}


def text_gradients(count: int) -> Iterator[Tensor]:
    """The whole gradient of each micro-batch, as one flat tensor."""
    config = TrainConfig(out="", activations="none", precision="fp32")
    corpus, model = load_corpus(()), build_model(config)
    for index in range(count):
        model.zero_grad()
        batch = corpus.train_batch(4 * index, 4, config.seq, 0)
        model(**loss_inputs(*batch)).loss.backward()
        yield torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def heavy_tails(count: int) -> Iterator[Tensor]:
    """Independent draws of Student's t with 3 degrees of freedom."""
    torch.manual_seed(0)
    distribution = torch.distributions.StudentT(torch.tensor(3.0))
    for _ in range(count):
        yield distribution.sample((2**18,))


def errors(source: Callable[[int], Iterator[Tensor]], marks: list[int]) -> dict[str, list[float]]:
    """Relative L2 errors of the sums at `marks`, by way."""
    exact, bf16 = torch.zeros(0), torch.zeros(0)
    packed: dict[str, tuple[Tensor, Tensor]] = {}
    found: dict[str, list[float]] = {name: [] for name in [*WAYS, "bfloat16"]}
    for index, gradient in enumerate(source(max(marks)), 1):
        first = index == 1
        exact = gradient.double() if first else exact + gradient.double()
        bf16 = gradient.bfloat16() if first else bf16 + gradient.bfloat16()
        for name, (format, size, rounding) in WAYS.items():
            seed = index if rounding == "stochastic" else None
            if first:
                packed[name] = ops.quantize(gradient[None], format, size, torch.bfloat16, rounding, seed)
            else:
                ops.accumulate_(*packed[name], gradient[None], 1.0, format, size, rounding, seed)
        if index in marks:
            for name, (format, size, _) in WAYS.items():
                value = ops.dequantize(*packed[name], exact.numel(), format, size)[0]
                found[name].append(float((value.double() - exact).norm() / exact.norm()))
            found["bfloat16"].append(float((bf16.double() - exact).norm() / exact.norm()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--micro-batches", default="8,32,128")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    marks = sorted(int(each) for each in args.micro_batches.split(","))
    tables = {"heavy tails": errors(heavy_tails, marks), "gradients of text": errors(text_gradients, marks)}
    head = " | ".join(f"{name}, {mark}" for name in tables for mark in marks)
    lines = [
        f"| format, group | {head} | expected |",
        "|---|" + "---:|" * (len(tables) * len(marks)) + "---|",
    ]
    for way in [*WAYS, "bfloat16"]:
        values = " | ".join(f"{100 * value:.2f} %" for table in tables.values() for value in table[way])
        expected = " / ".join(f"{value} %" for value in EXPECTED.get(way, ())) or "-"
        lines.append(f"| {way} | {values} | {expected} |")
    text = "\n".join(lines) + "\n"
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "gradient_accumulation.md").write_text(text)
    record = {"agoq_ext": __version__, "torch": torch.__version__, "micro_batches": marks, "errors": tables}
    (args.output / "gradient_accumulation.json").write_text(json.dumps(record, indent=1) + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
