"""Trains one small LLaMA on text once for each policy and seed, and compares validation losses in pairs.

    python benchmarks/activation_convergence.py [--policies off paper agoq lean uniform4] [--seeds 0 1 2]
                                                [--steps 1000] [--out benchmarks/results/activation_convergence]

Runs of one seed see the same initial weights and the same windows, so that a gap between two policies is paired. One
JSON file a run; a run whose file is there is not repeated, so the command can be stopped and started again. A policy is
a name, "uniform4" (NF4 in groups of 64 for every kind), or a file that ActivationPolicy.to_json wrote. The text is
that of `agoq train`: by default the sources of Python's standard library, as bytes. The last lines are the table;
where every run is there, it and a plot of the gaps over the steps are written beside the runs' folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import agoq_ext
from agoq_ext.activation import ActivationPolicy, TensorFormat, activation_report, compress_activations
from agoq_ext.training import bf16_products
from agoq_ext.training.config import TrainConfig
from agoq_ext.training.data import Corpus, load_corpus
from agoq_ext.training.model import autocast, build_model, learning_rate, loss_inputs, make_optimizer


def policy_of(name: str) -> ActivationPolicy:
    if name == "uniform4":
        return ActivationPolicy.uniform(TensorFormat("nf4", 64))
    return (
        ActivationPolicy.from_json(Path(name).read_text())
        if name.endswith(".json")
        else ActivationPolicy.named(name)
    )


def run(args: argparse.Namespace, corpus: Corpus, name: str, seed: int) -> dict[str, Any]:
    config = TrainConfig(
        out="",
        activations="none",
        steps=args.steps,
        batch=args.batch,
        seq=args.seq,
        lr=args.lr,
        seed=seed,
    )
    model = build_model(config)
    policy = policy_of(name)
    compress_activations(model, policy)
    optimizer = make_optimizer(model.parameters(), config)
    began, losses = time.perf_counter(), []
    for step in range(args.steps):
        inputs, targets = corpus.train_batch(step * args.batch, args.batch, args.seq, seed)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        with autocast("bf16"):
            loss = model(**loss_inputs(inputs, targets)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
            losses.append((step + 1, validation_loss(args, model, corpus)))
            print(f"{name} seed {seed} step {step + 1}: {losses[-1][1]:.4f}", flush=True)
    with autocast("bf16"):
        inputs, targets = corpus.train_batch(0, args.batch, args.seq, seed)
        report = activation_report(model, loss_inputs(inputs, targets))
    return {
        "policy": name,
        "policy_json": json.loads(policy.to_json()),
        "seed": seed,
        "steps": args.steps,
        "tokens_per_step": args.batch * args.seq,
        "learning_rate": args.lr,
        "parameters": sum(p.numel() for p in model.parameters()),
        "validation": losses,
        "layer_bytes": report.of_layer(1).total_bytes,
        "unit_bytes": report.unit_bytes,
        "seconds": time.perf_counter() - began,
        "data_digest": corpus.digest,
        "agoq_ext": agoq_ext.__version__,
        "torch": torch.__version__,
    }


@torch.no_grad()
def validation_loss(args: argparse.Namespace, model: Any, corpus: Corpus) -> float:
    model.eval()
    with autocast("bf16"):
        losses = [
            float(model(**loss_inputs(*batch)).loss)
            for batch in corpus.validation_batches(args.seq, args.eval_windows, args.batch)
        ]
    model.train()
    return statistics.fmean(losses)


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table: a row for each policy, gaps against "off" of the same seed."""
    final = {(r["policy"], r["seed"]): r["validation"][-1][1] for r in results}
    rows = [
        "| policy | U a layer | validation loss by seed | gap, % | mean gap, % |",
        "|---|---:|---|---|---:|",
    ]
    for policy in dict.fromkeys(r["policy"] for r in results):
        mine = [r for r in results if r["policy"] == policy]
        units = mine[0]["layer_bytes"] / mine[0]["unit_bytes"]
        losses = ", ".join(f"{final[policy, r['seed']]:.4f}" for r in mine)
        gaps = [
            100 * (final[policy, r["seed"]] / final["off", r["seed"]] - 1)
            for r in mine
            if ("off", r["seed"]) in final
        ]
        shown = ", ".join(f"{g:+.2f}" for g in gaps)
        mean = f"{statistics.fmean(gaps):+.2f}" if gaps else ""
        rows.append(f"| {policy} | {units:.2f} | {losses} | {shown} | {mean} |")
    return "\n".join(rows)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """The gap to "off" of the same seed over the steps: the mean as a line, the seeds as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    exact = {r["seed"]: [loss for _, loss in r["validation"]] for r in results if r["policy"] == "off"}
    colours = {"agoq": "#0f766e", "lean": "#2563eb", "paper": "#b45309", "uniform4": "#9f1239"}
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for policy in dict.fromkeys(r["policy"] for r in results if r["policy"] != "off"):
        mine = [r for r in results if r["policy"] == policy and r["seed"] in exact]
        steps = [step for step, _ in mine[0]["validation"]]
        gaps = [
            [100 * (loss / e - 1) for (_, loss), e in zip(r["validation"], exact[r["seed"]], strict=True)]
            for r in mine
        ]
        means = [statistics.fmean(column) for column in zip(*gaps, strict=True)]
        colour = colours.get(policy)
        lows, highs = zip(*((min(c), max(c)) for c in zip(*gaps, strict=True)), strict=True)
        axes.fill_between(steps, lows, highs, color=colour, alpha=0.1, linewidth=0)
        axes.plot(steps, means, color=colour, label=f"{policy}: {means[-1]:+.2f} % at the end")
    axes.axhline(0, color="#6b7280", linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss against uncompressed, %")
    axes.set_title("Mean and range over paired seeds", loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", default=["off", "paper", "agoq", "lean", "uniform4"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--eval-windows", type=int, default=256)
    parser.add_argument("--data", nargs="*", default=[], help="files and folders, as in agoq train")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/activation_convergence"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    bf16_products.enable()
    corpus = load_corpus(args.data)
    results = []
    for seed in args.seeds:
        for policy in args.policies:
            path = args.out / f"{Path(policy).stem}-{args.steps}-{seed}.json"
            if not path.exists():
                partial = path.with_suffix(".partial")
                partial.write_text(json.dumps(run(args, corpus, policy, seed), indent=1) + "\n")
                partial.rename(path)
            results.append(json.loads(path.read_text()))
    print(table(results))
    if {"off", *args.policies} == set(args.policies):
        args.out.with_suffix(".md").write_text(table(results) + "\n")
        draw(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
