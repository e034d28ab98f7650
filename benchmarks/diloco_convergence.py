"""Validation loss and bytes of replicas that synchronize rarely, against data parallel at the same tokens.

Runs `agoq train` once for each arm and seed and keeps one JSON for each; what is there already is not run again, so
the script can be stopped at any time. From all runs of that many steps that are there, of any number of replicas, it
writes diloco_convergence.md (table) and .png (loss against bytes) beside the folder; `--report` does nothing else.

    python benchmarks/diloco_convergence.py --out benchmarks/results/diloco --steps 1500 --replicas 2

Bytes are those of all replicas after the warm-up, against the FP32 all-reduces of the same steps, 2 (M - 1) / M of the
gradient a replica. The start-up broadcast is in neither.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Options of `agoq train` by arm; "{third}" becomes a third of the steps.
ARMS: dict[str, list[str]] = {
    "data-parallel": ["--gradients", "fp32"],
    "streaming-h30-e3m0": ["--diloco", "30", "--overlap", "1", "--warmup", "{third}"],
    "streaming-h30-fp32": ["--diloco", "30", "--overlap", "1", "--warmup", "{third}", "--format", "float32"],
    "classic-h30-fp32": ["--diloco", "30", "--fragments", "1", "--warmup", "{third}", "--format", "float32"],
    "streaming-h100-e3m0": ["--diloco", "100", "--overlap", "1", "--warmup", "{third}"],
    "streaming-h30-e3m0-cold": ["--diloco", "30", "--overlap", "1"],
}
KEPT = (
    "val_loss",
    "train_loss",
    "wire_bytes",
    "tokens",
    "train_seconds",
    "parameters",
    "data_digest",
    "diloco",
)


def name_of(arm: str, args: argparse.Namespace, seed: int) -> str:
    return f"{arm}-m{args.replicas}-s{args.steps}-seed{seed}.json"


def run(arm: str, args: argparse.Namespace, seed: int, folder: Path) -> None:
    options = [option.format(third=args.steps // 3) for option in ARMS[arm]]
    command = [
        "train", "--ranks", str(args.replicas), "--steps", str(args.steps), "--seed", str(seed),
        "--batch", str(args.batch), "--seq", str(args.seq), "--activations", "none", "--precision", "fp32",
        "--threads", "1", "--save-every", "0", "--log-every", "50", *options,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        subprocess.run([sys.executable, "-m", "agoq_ext.cli", *command, "--out", out], check=True)
        summary = json.loads(Path(out, "summary.json").read_text())
    result = {"arm": arm, "seed": seed, "command": ["agoq", *command]} | {k: summary.get(k) for k in KEPT}
    partial = folder / f".{name_of(arm, args, seed)}"
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.rename(folder / name_of(arm, args, seed))


# Pairs of arms whose losses the project compares: (arm, base, at most so much worse).
COMPARED = (
    ("streaming-h30-e3m0", "data-parallel", 0.01),
    ("streaming-h30-fp32", "classic-h30-fp32", 0.005),
    ("streaming-h30-e3m0", "streaming-h30-fp32", 0.005),
)
# At least so many times fewer bytes than FP32 all-reduces.
FEWER = {"streaming-h30-e3m0": 100, "streaming-h100-e3m0": 400}


def rows(folder: Path, steps: int) -> list[dict[str, Any]]:
    """One row a run, by replicas, seed and arm."""
    found = []
    for path in folder.glob(f"*-s{steps}-seed*.json"):
        run = json.loads(path.read_text())
        diloco, replicas = run["diloco"], int(option(run, "--ranks"))
        warm = (
            int(option(run, "--warmup") or 0) if diloco else steps // 3
        )  # data parallel over the same steps
        plain = 2 * (replicas - 1) * 4 * run["parameters"] * (steps - warm)
        sent = diloco["outer_gradient_bytes"] if diloco else plain
        found.append(
            {"arm": run["arm"], "replicas": replicas, "seed": run["seed"], "batch": int(option(run, "--batch")),
             "val_loss": run["val_loss"], "bytes": sent, "fewer": plain / sent}
        )  # fmt: skip
    return sorted(found, key=lambda row: (row["replicas"], row["seed"], list(ARMS).index(row["arm"])))


def option(run: dict[str, Any], name: str) -> str:
    command = run["command"]
    return command[command.index(name) + 1] if name in command else ""


def table(found: list[dict[str, Any]]) -> str:
    loss = {(row["replicas"], row["seed"], row["arm"]): row["val_loss"] for row in found}
    lines = [
        "| replicas | batch of each | seed | arm | validation loss | against data parallel | bytes after warm-up | "
        "fewer than FP32 all-reduce |",
        "|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    for row in found:
        base = loss.get((row["replicas"], row["seed"], "data-parallel"))
        gap = f"{row['val_loss'] / base - 1:+.2%}" if base else ""
        lines.append(
            f"| {row['replicas']} | {row['batch']} | {row['seed']} | {row['arm']} | {row['val_loss']:.4f} | {gap} | "
            f"{row['bytes'] / 1e6:.1f} MB | {row['fewer']:.0f}x |"
        )
    lines += ["", "| replicas | seed | what | found | required |", "|---:|---:|---|---:|---:|"]
    for replicas, seed in sorted({(row["replicas"], row["seed"]) for row in found}):
        for arm, base, most in COMPARED:
            if {(replicas, seed, arm), (replicas, seed, base)} <= set(loss):
                gap = loss[replicas, seed, arm] / loss[replicas, seed, base] - 1
                lines.append(
                    f"| {replicas} | {seed} | loss of {arm} against {base} | {gap:+.2%} | {most:.1%} |"
                )
        for row in found:
            if (row["replicas"], row["seed"]) == (replicas, seed) and row["arm"] in FEWER:
                fewer = f"{row['fewer']:.0f}x | {FEWER[row['arm']]}x |"
                lines.append(f"| {replicas} | {seed} | fewer bytes, {row['arm']} | {fewer}")
    return "\n".join(lines) + "\n"


def plot(found: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    counts = sorted({row["replicas"] for row in found})
    figure, panels = plt.subplots(
        1, len(counts), figsize=(6 * len(counts), 4.2), squeeze=False, layout="constrained"
    )
    for axes, replicas in zip(panels[0], counts, strict=True):
        for number, arm in enumerate(ARMS):
            own = [row for row in found if (row["replicas"], row["arm"]) == (replicas, arm)]
            axes.plot(
                [row["bytes"] for row in own],
                [row["val_loss"] for row in own],
                "os^vD*"[number],
                label=arm,
                markersize=8,
            )
        axes.set_xscale("log")
        axes.set_xlabel("bytes sent by all replicas after the warm-up")
        axes.set_ylabel("validation loss, nats a byte")
        axes.set_title(f"{replicas} replicas")
        axes.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for arm in args.arms:
            if not args.report and not (folder / name_of(arm, args, seed)).is_file():
                run(arm, args, seed, folder)
    found = rows(folder, args.steps)
    result = folder.parent / "diloco_convergence.md"
    result.write_text(table(found))
    plot(found, result.with_suffix(".png"))
    print(table(found))


if __name__ == "__main__":
    main()
