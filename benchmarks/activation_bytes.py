"""Measures what one LLaMA layer keeps for backward: uncompressed, "paper", "agoq" and "lean".

    python benchmarks/activation_bytes.py [--hidden 1024 --heads 8 --seq 1024 --batch 1] [--autocast] [--json FILE]

Every figure is measured by `agoq_ext.activation_report` on the second of two layers (the first also holds the rotary
tables, which all layers share), in bytes and in U = batch x sequence x hidden x 2 bytes. Multi-head attention, FFN
width 4 x hidden; a BF16 model, or with --autocast an FP32 model under BF16 autocast.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers

import agoq_ext
from agoq_ext.activation import ActivationReport, activation_report, compress_activations

OPERATORS = (
    "norm",
    "qkv",
    "attention",
    "output projection",
    "gate and up projection",
    "mlp",
    "down projection",
)


def build(args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=2,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        vocab_size=256,
        max_position_embeddings=args.seq,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).to(torch.float32 if args.autocast else torch.bfloat16)


def measure(args: argparse.Namespace, policy: str) -> ActivationReport:
    model = build(args)
    compress_activations(model, policy)
    ids = torch.randint(256, (args.batch, args.seq))
    with torch.autocast("cpu", torch.bfloat16) if args.autocast else contextlib.nullcontext():
        return activation_report(model, {"input_ids": ids}).of_layer(1)


def table(reports: dict[str, ActivationReport]) -> str:
    """A Markdown table: a row for each operator, U in each column."""
    rows = [["operator", *reports], ["---", *("---:" for _ in reports)]]
    others = sorted({o for r in reports.values() for o in r.by_operator} - set(OPERATORS))
    for operator in (*OPERATORS, *others):
        rows.append(
            [operator, *(f"{r.in_units(r.by_operator.get(operator, 0)):.3f}" for r in reports.values())]
        )
    rows.append(["**total**", *(f"**{r.in_units(r.total_bytes):.3f}**" for r in reports.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--autocast", action="store_true", help="FP32 parameters under BF16 autocast")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    reports = {name: measure(args, name) for name in ("off", "paper", "agoq", "lean")}
    precision = "FP32 under BF16 autocast" if args.autocast else "BF16"
    print(
        f"hidden {args.hidden}, {args.heads} heads, batch {args.batch}, sequence {args.seq}, {precision}, CPU"
    )
    print(
        f"agoq_ext {agoq_ext.__version__}, torch {torch.__version__}, transformers {transformers.__version__}\n"
    )
    print(table(reports))
    if args.json:
        args.json.write_text(json.dumps({name: r.to_dict() for name, r in reports.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
