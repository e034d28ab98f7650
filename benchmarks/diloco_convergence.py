"""Validation loss and bytes of replicas that synchronize rarely, against data parallel at the same tokens.

Runs `agoq train` once for each arm and seed and keeps one JSON for each; what is there already is not run again, so
the script can be stopped at any time. `--report` prints the table from what is there.

    python benchmarks/diloco_convergence.py --out benchmarks/results/diloco --steps 1500 --replicas 2
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

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


def report(args: argparse.Namespace, folder: Path) -> None:
    print(
        f"{'arm':26}{'seed':>5}{'val loss':>10}{'gap':>9}{'bytes after warm-up':>21}{'fewer than all-reduce':>23}"
    )
    for seed in args.seeds:
        found = {
            arm: json.loads(path.read_text())
            for arm in ARMS
            if (path := folder / name_of(arm, args, seed)).is_file()
        }
        base = found.get("data-parallel", {}).get("val_loss")
        for arm, result in found.items():
            gap = f"{result['val_loss'] / base - 1:+.2%}" if base else "-"
            sent, ratio = "-", "-"
            if diloco := result["diloco"]:
                warm = args.steps // 3 if diloco["warmup_bytes"] else 0
                plain = 2 * (args.replicas - 1) * 4 * result["parameters"] * (args.steps - warm)
                sent = f"{diloco['outer_gradient_bytes']:,}"
                ratio = f"{plain / max(1, diloco['outer_gradient_bytes']):.0f}x"
            print(f"{arm:26}{seed:>5}{result['val_loss']:>10.4f}{gap:>9}{sent:>21}{ratio:>23}")


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
    report(args, folder)


if __name__ == "__main__":
    main()
