"""Gradient error by operator: each kind of saved tensor in 4 bits while everything else stays exact.

    python benchmarks/activation_operators.py [--steps 200] [--output benchmarks/results]

The model of `agoq train` (1.1 M parameters), trained for some steps on text, then `agoq_ext.calibrate` on four batches,
with NF4 in groups of 64. For every stored tensor the relative L2 error of the gradients of the whole model; the table
has the root of the sum of squares by operator, beside what the AGoQ paper gives. Writes activation_operators.md.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import torch

import agoq_ext
from agoq_ext.activation import TensorFormat
from agoq_ext.training.config import TrainConfig
from agoq_ext.training.data import load_corpus
from agoq_ext.training.model import build_model, learning_rate, loss_inputs, make_optimizer

OPERATORS = {"norm_input": "norm", "gate_up": "SiLU and product", "attention_output": "output projection"}
PAPER = {
    "norm": ".003",
    "SiLU and product": ".051",
    "output projection": ".026 (GEMM)",
    "query": ".14",
    "key": ".15",
    "value": ".059",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    config = TrainConfig(out="", activations="none", precision="fp32", steps=args.steps)
    corpus, model = load_corpus(()), build_model(config)
    optimizer = make_optimizer(model.parameters(), config)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        model(**loss_inputs(*corpus.train_batch(8 * step, 8, config.seq, 0))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    batches = [loss_inputs(*corpus.train_batch(8 * i, 8, config.seq, 1)) for i in range(4)]
    formats = [TensorFormat(f) for f in ("nf4", "int5", "int6")]
    calibration = agoq_ext.calibrate(model, batches, formats=formats)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(formats))
    for (_, kind), measured in calibration.measurements.items():
        for i, stored in enumerate(formats):
            sums[OPERATORS.get(kind, kind)][i] += measured[stored].gradient_error ** 2
    lines = [
        f"{args.steps} steps of training, four layers, groups of 64, FP32, torch {torch.__version__}.",
        "",
        "| operator | NF4 | int5 | int6 | AGoQ's table, 4 bits |",
        "|---|---:|---:|---:|---:|",
    ]
    for operator, errors in sums.items():
        values = " | ".join(f"{error**0.5:.3f}" for error in errors)
        lines.append(f"| {operator} | {values} | {PAPER.get(operator, '-')} |")
    text = "\n".join(lines) + "\n"
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "activation_operators.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
