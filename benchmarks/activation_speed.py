"""Step time against memory: no saving, activation checkpointing (full, selective), and compressed activations.

    python benchmarks/activation_speed.py [--layers 4] [--hidden 1024] [--seq 1024] [--rounds 7]
                                          [--output benchmarks/results]

LLaMA layers (multi-head attention, FFN 4 x hidden) with BF16 parameters, forward and backward of one batch. Times are
medians of rounds in which every way takes one step, as ratios to the plain step of the same round. Memory is measured
in a process of its own for each way: how far a second step raises the resident memory above what it was before it,
gradients already there, by the kernel's high-water mark. Selective checkpointing keeps the outputs of matrix products
and attention and recomputes the rest. Writes activation_speed.json, .md and .png.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peak_memory
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import agoq_ext
from agoq_ext import ops

WAYS = ("plain", "full checkpointing", "selective checkpointing", "paper", "agoq", "lean")
MIB = 2**20
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Of selective checkpointing: keep what is expensive to compute."""
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class Layers(nn.Module):
    """LLaMA decoder layers, each run in one of `WAYS`."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_attention_heads=hidden // 128,
            num_key_value_heads=hidden // 128,
            num_hidden_layers=layers,
        )
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(layers)).bfloat16()
        self.rotary = LlamaRotaryEmbedding(config)
        self.way = "plain"

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])[None]
        tables = self.rotary(x, positions)
        for layer in self.layers:
            run: Callable[[Tensor], Tensor] = partial(layer, position_embeddings=tables)
            if self.way == "full checkpointing":
                x = checkpoint(run, x, use_reentrant=False)
            elif self.way == "selective checkpointing":
                contexts = partial(create_selective_checkpoint_contexts, choose)
                x = checkpoint(run, x, use_reentrant=False, context_fn=contexts)
            else:
                x = run(x)
        return x

    def set_way(self, way: str) -> None:
        """Converts the layers, or takes the conversion back."""
        agoq_ext.restore(self)
        self.way = way
        if way in ("paper", "agoq", "lean"):
            agoq_ext.compress_activations(self, way)


def step(model: Layers, x: Tensor) -> float:
    """Forward and backward; seconds."""
    began = time.perf_counter()
    model(x).float().square().mean().backward()
    return time.perf_counter() - began


def measure_peak(args: argparse.Namespace) -> None:
    """Prints the bytes by which a step raises the peak."""
    model, x = Layers(args.layers, args.hidden), inputs(args)
    model.set_way(args.peak_of)
    step(model, x)
    before = peak_memory.begin()
    step(model, x)
    print(peak_memory.high_water() - before)


def inputs(args: argparse.Namespace) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(1, args.seq, args.hidden, dtype=torch.bfloat16, requires_grad=True)


def measure_times(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each way in each round."""
    model, x = Layers(args.layers, args.hidden), inputs(args)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for round in range(-1, args.rounds):
        for way in WAYS:
            model.set_way(way)
            seconds = step(model, x)
            if round >= 0:
                times[way].append(seconds)
    return times


def draw(found: dict[str, dict[str, float]], title: str, path: Path) -> None:
    """Time and memory of each way, one point each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for way, values in found.items():
        own = way in ("paper", "agoq", "lean")
        colour = "#0f766e" if own else "#6b7280"
        axes.plot(values["peak_mib"], values["ratio"], "o", color=colour, markersize=8)
        axes.annotate(
            way,
            (values["peak_mib"], values["ratio"]),
            xytext=(7, 5),
            textcoords="offset points",
            color=colour,
        )
    axes.axhline(1.0, color="#6b7280", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, max(v["peak_mib"] for v in found.values()) * 1.25)
    axes.set_ylim(0.9, max(v["ratio"] for v in found.values()) * 1.08)
    axes.set_xlabel("peak memory of a step above what was there before, MiB")
    axes.set_ylabel("step time, plain = 1")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_of:
        measure_peak(args)
        return 0
    # Otherwise glibc keeps freed memory for later, and the peak shows what it keeps.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    sizes = [f"--{name}={getattr(args, name)}" for name in ("layers", "hidden", "seq")]
    found: dict[str, dict[str, float]] = {}
    for way in WAYS:
        command = [sys.executable, __file__, *sizes, "--peak-of", way]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        found[way] = {"peak_mib": int(done.stdout.split()[-1]) / MIB}
    times = measure_times(args)
    unit = args.seq * args.hidden * 2
    model = Layers(args.layers, args.hidden)
    for way in WAYS:
        ratios = [t / p for t, p in zip(times[way], times["plain"], strict=True)]
        found[way]["seconds"] = statistics.median(times[way])
        found[way]["ratio"] = statistics.median(ratios)
        if "checkpointing" not in way:
            model.set_way(way)
            found[way]["kept_u_per_layer"] = (
                agoq_ext.activation_report(model, (inputs(args),)).total_bytes / unit / args.layers
            )
    threads = torch.get_num_threads()
    title = f"{args.layers} LLaMA layers, hidden {args.hidden}, {args.seq} tokens, BF16, {threads} threads"
    lines = [
        f"{title}; {platform.machine()}, {ops.cpu_isa()}, torch {torch.__version__}.",
        "",
        "| way | step time, plain = 1 | peak above before, MiB | kept a layer, U |",
        "|---|---:|---:|---:|",
    ]
    for way, values in found.items():
        kept = f"{values['kept_u_per_layer']:.2f}" if "kept_u_per_layer" in values else "-"
        lines.append(f"| {way} | {values['ratio']:.3f} | {values['peak_mib']:.0f} | {kept} |")
    text = "\n".join(lines) + "\n"
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "activation_speed.md").write_text(text)
    record = {
        "torch": torch.__version__,
        "agoq_ext": agoq_ext.__version__,
        "title": title,
        "ways": found,
        "seconds": times,
    }
    (args.output / "activation_speed.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(found, title, args.output / "activation_speed.png")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
