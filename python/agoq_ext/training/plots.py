"""The demo's plots. Every number drawn is one that a run measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: there may be no display
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"baseline": "#6b7280", "agoq": "#0f766e"}
_LABELS = {"baseline": "baseline (BF16 activations, FP32 gradients)", "agoq": "AGoQ (4-bit, int8 gradients)"}
_INK = "#1f2937"
Records = dict[str, list[dict[str, Any]]]


def draw_all(folder: Path, report: dict[str, Any], records: Records) -> list[Path]:
    """Writes loss.png, activation_bytes.png and wire_bytes.png to `folder`; returns their paths.

    Args:
        report: what `demo.make_report` gives.
        records: of each run, what its metrics.jsonl holds.
    """
    figures = {
        "loss.png": draw_losses(records),
        "activation_bytes.png": draw_activations(report, list(records)),
        "wire_bytes.png": draw_wire(records),
    }
    paths = []
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=150)
        plt.close(figure)
        paths.append(folder / name)
    return paths


def draw_losses(records: Records) -> Figure:
    """Training loss of each step (thin), its running mean, and the validation losses (dots)."""
    figure, axes = _axes("Loss: the same seed and data, with and without compression", "step", "nats a byte")
    for name, run in records.items():
        steps = [r["step"] for r in run if "train_loss" in r]
        losses = [r["train_loss"] for r in run if "train_loss" in r]
        axes.plot(steps, losses, color=COLOURS[name], alpha=0.25, linewidth=0.7)
        axes.plot(steps, _running_mean(losses), color=COLOURS[name], linewidth=1.6, label=_LABELS[name])
        marks = [r for r in run if "val_loss" in r]
        marker = {"baseline": "o", "agoq": "x"}[name]
        axes.plot(
            [r["step"] for r in marks],
            [r["val_loss"] for r in marks],
            marker,
            color=COLOURS[name],
            markersize=6 if marker == "x" else 8,
            markerfacecolor="none",
            label=f"validation: {marks[-1]['val_loss']:.4f} at the end",
        )
    axes.legend(frameon=False)
    return figure


def draw_activations(report: dict[str, Any], runs: list[str]) -> Figure:
    """Bytes that one forward of a rank's batch keeps for backward, by operator, as horizontal bars."""
    parts = {name: report[name]["saved_activation_bytes_by_operator"] for name in runs}
    operators = sorted(
        {op for part in parts.values() for op in part}, key=lambda op: parts[runs[0]].get(op, 0)
    )
    figure, axes = _axes("Activations kept for backward by one rank's batch", "MB (measured)", "")
    height = 0.8 / len(runs)
    for i, name in enumerate(runs):
        values = [parts[name].get(op, 0) / 1e6 for op in operators]
        places = [y + 0.4 - height * (i + 0.5) for y in range(len(operators))]
        total = report[name]["saved_activation_bytes"] / 1e6
        bars = axes.barh(
            places,
            values,
            height * 0.9,
            color=COLOURS[name],
            label=f"{_LABELS[name]}: {total:,.1f} MB in all",
        )
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8, color=_INK)
    axes.set_yticks(range(len(operators)), operators)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.1)
    axes.legend(frameon=False, loc="lower right")
    return figure


def draw_wire(records: Records) -> Figure:
    """Bytes that all ranks together have sent, by step."""
    figure, axes = _axes("Gradient bytes sent by all ranks together (counted)", "step", "MB")
    for name, run in records.items():
        steps = [0] + [r["step"] for r in run if "wire_bytes" in r]
        sent = [0.0] + [r["wire_bytes"] / 1e6 for r in run if "wire_bytes" in r]
        axes.plot(steps, sent, color=COLOURS[name], linewidth=1.8, label=_LABELS[name])
        axes.annotate(
            f"{sent[-1]:,.0f} MB",
            (steps[-1], sent[-1]),
            xytext=(-4, 6),
            textcoords="offset points",
            ha="right",
            color=COLOURS[name],
        )
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")
    return figure


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _running_mean(values: list[float]) -> list[float]:
    """Mean of each value and those before it, up to a twentieth of all."""
    width = max(1, len(values) // 20)
    means = []
    for i in range(len(values)):
        window = values[max(0, i + 1 - width) : i + 1]
        means.append(sum(window) / len(window))
    return means
