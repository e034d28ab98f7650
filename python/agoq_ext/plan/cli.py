"""`agoq plan`: the tables of what a model's training will keep, or the same as JSON."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..activation.policy import POLICIES, ActivationPolicy
from ..errors import UserError
from .memory import OPTIMIZERS, MemoryPlan, largest_batch, plan_memory, plan_pipeline, read_pipeline
from .operators import COLUMNS, OPERATORS, PRECISIONS, paper_units
from .shapes import KNOWN, ModelShape, read_shape

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_DESCRIPTION = (
    "Bytes that training keeps, before anything runs. The columns with a star are AGoQ's own count "
    "(arXiv 2605.00539), in U = batch x sequence x hidden x 2 bytes; the others are what agoq_ext keeps, to the byte. "
    "`agoq plan --diloco --help`: the bandwidth that replicas need; `agoq plan --network --help`: the time of one "
    "gradient exchange."
)


def add_plan_parser(subparsers: Any) -> None:
    """Adds `agoq plan` to the command."""
    parser = subparsers.add_parser(
        "plan", help="the memory that training a model will take", description=_DESCRIPTION
    )
    parser.add_argument("--model", required=True, help=f"a config.json, or {', '.join(KNOWN)}")
    parser.add_argument("--batch", type=_positive, required=True, help="sequences of one (micro-)batch")
    parser.add_argument("--seq", type=_positive, required=True, help="tokens of a sequence")
    parser.add_argument(
        "--policy",
        action="append",
        help=f"{', '.join(POLICIES)}, or a JSON file; may be repeated (default: all names)",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="bf16",
        help="BF16 model, or FP32 parameters under BF16 autocast",
    )
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adamw", help="default: adamw")
    parser.add_argument(
        "--pipeline", metavar="SCHEDULE:STAGES[:CHUNKS]:MICROBATCHES", help="e.g. interleaved_1f1b:4:2:8"
    )
    parser.add_argument(
        "--rounding", choices=("down", "nearest"), default="down", help="of a stage's width; default: down"
    )
    parser.add_argument("--memory-budget", type=_bytes, metavar="BYTES", help="of one device, e.g. 80GiB")
    parser.add_argument(
        "--chunked-loss", action="store_true", help="compute the loss in blocks of the vocabulary"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    shape = read_shape(args.model)
    policies = {name: _policy(name) for name in args.policy or POLICIES}
    facts = collect(args, shape, policies)
    print(json.dumps(facts, indent=2) if args.json else render(facts))
    return 0


def collect(
    args: argparse.Namespace, shape: ModelShape, policies: dict[str, ActivationPolicy]
) -> dict[str, Any]:
    """Everything that is printed, as plain values."""

    def plan(policy: ActivationPolicy, batch: int) -> MemoryPlan:
        return plan_memory(shape, batch, args.seq, policy, args.precision, args.optimizer, args.chunked_loss)

    plans = {name: plan(policy, args.batch) for name, policy in policies.items()}
    facts: dict[str, Any] = {
        "model": args.model,
        "shape": asdict(shape),
        "parameters": shape.parameters,
        "batch": args.batch,
        "seq": args.seq,
        "precision": args.precision,
        "optimizer": args.optimizer,
        "chunked_loss": args.chunked_loss,
        "unit_bytes": args.batch * args.seq * shape.hidden * 2,
        "paper_units": paper_units(shape),
        "policies": {
            name: {**asdict(p), "activation_bytes": p.activation_bytes, "total": p.total}
            for name, p in plans.items()
        },
    }
    if args.memory_budget is not None:
        facts["memory_budget"] = args.memory_budget
        for name, policy in policies.items():
            facts["policies"][name]["largest_batch"] = largest_batch(
                lambda batch, policy=policy: plan(policy, batch).total <= args.memory_budget  # type: ignore[misc]
            )
    if args.pipeline:
        pipeline = read_pipeline(args.pipeline)
        facts["pipeline"] = args.pipeline
        for name, policy in policies.items():
            ranks = plan_pipeline(
                shape,
                args.batch,
                args.seq,
                policy,
                pipeline,
                args.precision,
                args.optimizer,
                args.rounding,
                args.chunked_loss,
            )
            facts["policies"][name]["ranks"] = [{**asdict(r), "total": r.total} for r in ranks]
    return facts


# --- text ----------------------------------------------------------------------------------------------------


def render(facts: dict[str, Any]) -> str:
    """The tables of `collect`."""
    policies, unit = facts["policies"], facts["unit_bytes"]
    counted = facts["paper_units"]
    precision = "BF16 model" if facts["precision"] == "bf16" else "FP32 parameters under BF16 autocast"
    parts = [
        f"{facts['model']}: {facts['parameters']:,} parameters, batch {facts['batch']}, sequence {facts['seq']}, "
        f"{precision}; U = {unit:,} bytes"
    ]
    starred = [f"{c}*" for c in COLUMNS]
    names = list(policies)
    units = [["one layer, U", *starred, *names]]
    sizes = [["one layer, bytes", *names]]
    for operator in OPERATORS:
        kept = [policies[n]["layer"].get(operator, 0) for n in names]
        units.append(
            [operator, *(f"{counted[operator][c]:.3f}" for c in COLUMNS), *(f"{k / unit:.3f}" for k in kept)]
        )
        sizes.append([operator, *(f"{k:,}" for k in kept)])
    totals = [sum(policies[n]["layer"].values()) for n in names]
    sums = [sum(counted[o][c] for o in OPERATORS) for c in COLUMNS]
    units.append(["total", *(f"{s:.3f}" for s in sums), *(f"{t / unit:.3f}" for t in totals)])
    sizes.append(["total", *(f"{t:,}" for t in totals)])
    whole = [["whole model, GiB", *names]]
    for row in ("weights", "gradients", "optimizer", "logits", "activation_bytes", "total"):
        label = row.replace("activation_bytes", "activations")
        whole.append([label, *(_gib(policies[n][row]) for n in names)])
    if "memory_budget" in facts:
        budget = facts["memory_budget"]
        fits = ["yes" if policies[n]["total"] <= budget else "no" for n in names]
        whole.append([f"fits {_gib(budget)} GiB", *fits])
        whole.append(["largest batch", *(str(policies[n]["largest_batch"]) for n in names)])
    parts += [_table(units), _table(sizes), _table(whole)]
    if "pipeline" in facts:
        for name in names:
            parts.append(_ranks(f"{name}, {facts['pipeline']}", policies[name]["ranks"], facts))
    parts.append(
        "* as AGoQ counts it, scales left out; with an FP32 scale a block of 128 its own column takes more"
    )
    return "\n\n".join(parts)


def _ranks(title: str, ranks: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    header = [title, "stored", "bits", "activations, GiB", "weights, GiB", "total, GiB"]
    budget = facts.get("memory_budget")
    rows = [header + (["fits"] if budget else [])]
    for i, r in enumerate(ranks):
        row = [f"rank {i}", str(r["stored"]), str(r["bits"] or "-")]
        row += [_gib(r["activations"]), _gib(r["weights"]), _gib(r["total"])]
        rows.append(row + ([("yes" if r["total"] <= budget else "no")] if budget else []))
    return _table(rows)


def _table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]))
    return "\n".join(lines)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3f}"


# --- arguments -----------------------------------------------------------------------------------------------


def _policy(name: str) -> ActivationPolicy:
    if name in POLICIES:
        return POLICIES[name]
    try:
        return ActivationPolicy.from_json(Path(name).read_text())
    except OSError as error:
        raise UserError(
            f"plan: --policy must be one of {', '.join(POLICIES)}, or a JSON file; {error}"
        ) from error
    except (TypeError, ValueError) as error:
        raise UserError(f"plan: --policy {name}: {error}") from error


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer; got {text!r}")
    return int(text)


def _bytes(text: str) -> int:
    """Bytes of "80GiB", "80G" (10^9), "1.5e9" or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 80GiB; got {text!r}")
    return int(float(match[1]) * {**_UNITS, **_BINARY}[match[2] or ""])
