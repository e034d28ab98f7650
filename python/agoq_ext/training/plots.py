"""The demo's plots. Every number drawn is one that a run measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: there may be no display
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"baseline": "#6b7280", "agoq": "#0f766e", "store": "#b45309"}
_LABELS = {
    "baseline": "baseline (BF16 activations, FP32 gradients)",
    "agoq": "AGoQ (5- and 6-bit activations, int8 all-reduce)",
    "store": "the same, gradients stored in int8",
}
# A thick line and a thin dashed one on top of it stay apart where they coincide.
_LINES: dict[str, dict[str, Any]] = {
    "baseline": {"linewidth": 3.0},
    "agoq": {"linewidth": 1.4, "linestyle": (0, (4, 2))},
    "store": {"linewidth": 1.4, "linestyle": (0, (1, 2))},
}
_MARKERS = {"baseline": "o", "agoq": "x", "store": "+"}
# The bound that the demo holds the validation loss to.
_BOUND = 0.01
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
        "wire_bytes.png": draw_wire(report, records),
    }
    paths = []
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=150)
        plt.close(figure)
        paths.append(folder / name)
    return paths


def draw_losses(records: Records) -> Figure:
    """Above: training loss as a running mean, validation losses as marks. Below: their ratio to the baseline's."""
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    _dress(upper, "Loss of the same model on the same data, with and without compression", "", "nats a byte")
    _dress(lower, "Relative to the baseline", "step", "%")
    base = next(iter(records))
    for name, run in records.items():
        steps, losses = _column(run, "train_loss")
        marks, validations = _column(run, "val_loss")
        label = f"{_LABELS[name]}: {validations[-1]:.4f}"
        upper.plot(steps, losses, color=COLOURS[name], alpha=0.15, linewidth=0.7)
        upper.plot(steps, _running_mean(losses), color=COLOURS[name], **_LINES[name])
        upper.plot(
            marks,
            validations,
            _MARKERS[name],
            color=COLOURS[name],
            markersize=7,
            markerfacecolor="none",
            label=label,
        )
        if name != base:
            means = [_running_mean(_column(records[n], "train_loss")[1]) for n in (base, name)]
            lower.plot(
                steps,
                _percent(*means),
                color=COLOURS[name],
                linewidth=1.2,
                label=f"{name}: training, running mean",
            )
            theirs = _column(records[base], "val_loss")[1]
            lower.plot(
                marks,
                _percent(theirs, validations),
                _MARKERS[name],
                color=COLOURS[name],
                label=f"{name}: validation",
            )
    for sign in (-1, 1):
        lower.axhline(sign * _BOUND * 100, color=_INK, linewidth=0.8, linestyle=":")
    lower.axhline(0, color=COLOURS[base], linewidth=0.8)
    limit = max(2 * _BOUND * 100, max(abs(y) for line in lower.lines for y in line.get_ydata()) * 1.1)
    lower.set_ylim(-limit, limit)
    upper.legend(frameon=False, title="validation loss at the end", alignment="left")
    lower.legend(frameon=False, ncols=2, loc="upper right", fontsize=8)
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


def draw_wire(report: dict[str, Any], records: Records) -> Figure:
    """Bytes that all ranks together have sent for gradients, by step."""
    figure, axes = _axes("Gradient bytes sent by all ranks together", "step", "MB")
    for name, run in records.items():
        steps, sent = _column(run, "wire_bytes")
        sent = [count / 1e6 for count in sent]
        axes.plot([0, *steps], [0, *sent], color=COLOURS[name], linewidth=1.8, label=_LABELS[name])
        kernel = report[name]["kernel_written_bytes"]
        axes.annotate(
            f"{sent[-1]:,.0f} MB" + (f" (kernel: {kernel / 1e6:,.0f} MB)" if kernel else ""),
            (steps[-1], sent[-1]),
            xytext=(-4, 6),
            textcoords="offset points",
            ha="right",
            color=COLOURS[name],
        )
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    axes.legend(frameon=False, loc="upper left")
    figure.supxlabel(
        "int8: bytes of the messages sent. FP32: by convention 2 (ranks - 1) / ranks of each payload.\n"
        "In brackets: bytes written during steps, gradients and status, as the kernel counted them.",
        fontsize=8,
        color=_INK,
    )
    return figure


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    _dress(axes, title, x, y)
    return figure, axes


def _dress(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _column(run: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the records that hold `key`."""
    return [r["step"] for r in run if key in r], [r[key] for r in run if key in r]


def _percent(base: list[float], values: list[float]) -> list[float]:
    return [100 * (value / reference - 1) for reference, value in zip(base, values, strict=True)]


def _running_mean(values: list[float]) -> list[float]:
    """Mean over a window around each value, a twentieth of all wide."""
    half = max(1, len(values) // 40)
    means = []
    for i in range(len(values)):
        window = values[max(0, i - half) : i + half + 1]
        means.append(sum(window) / len(window))
    return means
