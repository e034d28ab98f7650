"""The same training uncompressed and compressed in two ways, and what each of them took."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import ops
from .._version import __version__
from ..errors import UserError
from . import checkpoint, config, launch, metrics
from .config import TrainConfig
from .trainer import SUMMARY_NAME

# What sets the runs apart; all else is equal. The first one is what the others are compared with.
RUNS: dict[str, dict[str, Any]] = {
    "baseline": {"activations": "none", "gradients": "fp32"},
    "agoq": {"activations": "agoq", "gradients": "int8"},
    "store": {"activations": "agoq", "gradients": "store"},
}
# Chosen so that all runs together take two minutes on two cores with AVX-512, six on slow ones.
OPTIONS: dict[str, Any] = {"ranks": 2, "precision": "bf16", "steps": 400, "batch": 8, "seq": 128, "lr": 1e-3}
REPORT_NAME = "report.json"


@dataclass(frozen=True)
class Measure:
    """One row of the comparison; `limit` bounds the ratio to the baseline's value, where there is a bound."""

    key: str
    name: str
    form: str
    limit: float | None = None

    def show(self, value: float | None) -> str:
        if value is None:
            return "-"
        return metrics.megabytes(value) if self.form == "bytes" else format(value, self.form)


MEASURES = (
    Measure("val_loss", "validation loss (nats a byte)", ".4f", 1.01),
    Measure("train_loss", "training loss, last steps", ".4f"),
    Measure("saved_activation_bytes", "activations kept, one rank's batch", "bytes", 0.40),
    Measure("gradient_bytes", "gradients held by a rank", "bytes"),
    Measure("wire_bytes", "gradients sent, both ranks", "bytes", 0.27),
    Measure("kernel_written_bytes", "all sent, as the kernel counts it", "bytes"),
    Measure("peak_rss_bytes", "peak memory of a rank", "bytes"),
    Measure("tokens_per_s", "tokens/s, both ranks", ",.0f"),
)


def run(
    out: str, data: tuple[str, ...] = (), seed: int = 0, steps: int | None = None, model: str = "tiny"
) -> int:
    """Trains all `RUNS`, writes report.json and the plots to `out`, prints a table; returns the exit status.

    Raises:
        UserError: what the user gave cannot work, or matplotlib is missing.
    """
    try:
        from . import plots
    except ImportError as error:
        raise UserError(f"the demo needs matplotlib: pip install 'agoq-ext[demo]' ({error})") from error

    began = time.perf_counter()
    folder = checkpoint.prepare_folder(out)
    options = {
        **OPTIONS,
        "data": data,
        "seed": seed,
        "model": model,
        "model_config": config.read_model(model),
    }
    options["steps"] = steps or OPTIONS["steps"]
    options["eval_every"] = max(1, options["steps"] // 8)
    options["save_every"] = 0
    options["log_every"] = max(1, options["steps"] // 20)
    for name, differing in RUNS.items():
        print(f"--- {name} ---", flush=True)
        (folder / name / SUMMARY_NAME).unlink(missing_ok=True)
        status = launch.run(TrainConfig(out=str(folder / name), **options, **differing))
        if status:
            return status
    report = make_report(folder)
    report["seconds"] = time.perf_counter() - began
    text = json.dumps(report, indent=2) + "\n"
    checkpoint.write_atomically(folder / REPORT_NAME, lambda file: file.write(text.encode()))
    records = {name: metrics.read(folder / name) for name in RUNS}
    written = plots.draw_all(folder, report, records)
    print(f"\n{table(report)}\n")
    print(
        f"{report['seconds']:.0f} s in all; {folder / REPORT_NAME}, {', '.join(path.name for path in written)}"
    )
    return 0


def make_report(folder: Path) -> dict[str, Any]:
    """Summaries of the runs in `folder`, their ratios to the baseline, and where these were measured."""
    report: dict[str, Any] = {
        name: json.loads((folder / name / SUMMARY_NAME).read_text(encoding="utf-8")) for name in RUNS
    }
    first, *others = RUNS
    report["ratios"] = {
        name: {
            m.key: report[name][m.key] / report[first][m.key] for m in MEASURES if _both(report, name, m.key)
        }
        for name in others
    }
    report["limits"] = {m.key: m.limit for m in MEASURES if m.limit is not None}
    report["environment"] = {
        "agoq_ext": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": config.available_cpus(),
        "cpu_isa": ops.cpu_isa(),
        "system": f"{platform.system()} {os.uname().release}",
    }
    return report


def _both(report: dict[str, Any], name: str, key: str) -> bool:
    return bool(report[name][key] and report[next(iter(RUNS))][key])


def table(report: dict[str, Any]) -> str:
    """The comparison as text, one line a measure."""
    first, *others = RUNS
    header = f"{'':<36}{first:>14}" + "".join(f"{name:>14}{'ratio':>9}{'':8}" for name in others) + "limit"
    lines = [header]
    for m in MEASURES:
        line = f"{m.name:<36}{m.show(report[first][m.key]):>14}"
        for name in others:
            ratio = report["ratios"][name].get(m.key)
            verdict = ""
            if ratio is not None and m.limit is not None:
                verdict = "  met" if ratio <= m.limit else "  MISSED"
            line += f"{m.show(report[name][m.key]):>14}" + (
                f"{ratio:>9.4f}" if ratio is not None else f"{'':9}"
            )
            line += f"{verdict:<8}"
        lines.append((line + (f"{m.limit:>5.2f}" if m.limit is not None else "")).rstrip())
    return "\n".join(lines)
