"""`agoq plan --diloco`: the bandwidth that replicas need, as tables, JSON and a plot.

For the command that owns the parser: `is_asked` tells whether the option is there, `add_arguments` fills a parser
and `run` runs what was parsed. Only a plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..errors import UserError
from . import simulate
from .simulate import GRID, METHODS, PAPER_CLUSTERS, PAPER_TABLE, TARGETS, Cluster

_DEFAULTS = Cluster(1e9, 24, 0.1)


def is_asked(arguments: Sequence[str]) -> bool:
    """Whether `arguments` of `agoq` are for this module."""
    return arguments[:1] == ["plan"] and "--diloco" in arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `agoq plan --diloco`."""
    add = parser.add_argument
    add("--diloco", action="store_true", help="the bandwidth that replicas of a model need")
    add("--paper", action="store_true", help="the paper's two models beside its own table")
    add("--parameters", type=float, metavar="N", help="of the model, e.g. 1e9")
    add("--layers", type=int, metavar="N", help="of the model")
    add("--step-time", type=float, metavar="SECONDS", help="of an inner step, computing alone")
    add("--replicas", type=int, default=_DEFAULTS.replicas, metavar="M", help=_default("replicas"))
    add("--sync-every", type=int, default=_DEFAULTS.sync_every, metavar="H", help=_default("sync_every"))
    add("--overlap", type=int, default=_DEFAULTS.overlap, metavar="TAU", help=_default("overlap"))
    add(
        "--layers-per-fragment",
        type=int,
        default=_DEFAULTS.layers_per_fragment,
        metavar="N",
        help=_default("layers_per_fragment"),
    )
    add("--latency", type=float, default=0.0, metavar="SECONDS", help="of an exchange [0]")
    add("--jitter", type=float, default=0.0, metavar="SIGMA", help="of the logarithm of step times [0]")
    add("--straggler", type=float, default=1.0, metavar="FACTOR", help="on one replica's step time [1]")
    add("--plot", metavar="PNG", help="draw utilization against bandwidth")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def _default(name: str) -> str:
    return f"[{getattr(_DEFAULTS, name)}]"


def run(args: argparse.Namespace) -> int:
    """Runs `agoq plan --diloco`; returns its exit status."""
    clusters = PAPER_CLUSTERS if args.paper else {_title(args): _cluster(args)}
    tables = {name: simulate.table(cluster) for name, cluster in clusters.items()}
    if args.plot:
        plot(clusters, args.plot)
    if args.json:
        result = {
            name: {"cluster": asdict(clusters[name]), "gbits_needed": tables[name]} for name in clusters
        }
        print(json.dumps({"targets": TARGETS, "models": result}, indent=2))
        return 0
    for name, rows in tables.items():
        print("\n".join(render(name, rows, PAPER_TABLE[name] if args.paper else None)))
    return 0


def _cluster(args: argparse.Namespace) -> Cluster:
    missing = [name for name in ("parameters", "layers", "step_time") if getattr(args, name) is None]
    if missing:
        raise UserError(f"plan --diloco: --{missing[0].replace('_', '-')} or --paper is needed")
    names = [field for field in asdict(_DEFAULTS) if hasattr(args, field)]
    try:
        return Cluster(**{name: getattr(args, name) for name in names})
    except ValueError as error:
        raise UserError(f"plan --diloco: {error}") from error


def _title(args: argparse.Namespace) -> str:
    return (
        f"{args.parameters or 0:g} parameters, {args.layers} layers, {args.step_time} s a step, "
        f"{args.replicas} replicas, H = {args.sync_every}"
    )


def render(
    name: str,
    rows: dict[str, list[float | None]],
    paper: Mapping[str, Sequence[float]] | None = None,
) -> list[str]:
    """The lines of one model's table; with the paper's numbers each cell is "ours | the paper's"."""
    width = 17 if paper else 9
    head = "".join(f"{f'{target:.0%}':>{width}}" for target in TARGETS)
    lines = [f"{name}: Gbit/s for a compute utilization of" + (" (here | paper)" if paper else "")]
    lines.append(f"{'':15}{head}")
    for method in METHODS:
        cells = []
        for index, gbits in enumerate(rows[method]):
            text = f"> {GRID[-1]:.0f}" if gbits is None else f"{gbits:.1f}"
            cells.append(f"{f'{text} | {paper[method][index]:.1f}' if paper else text:>{width}}")
        lines.append(f"{method:15}" + "".join(cells))
    return lines


def plot(clusters: dict[str, Cluster], path: str) -> None:
    """Draws utilization against bandwidth, a panel for each cluster, like the paper's figure."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise UserError(f"--plot needs matplotlib: {error}") from error
    figure, axes = pyplot.subplots(1, len(clusters), figsize=(6 * len(clusters), 4), squeeze=False)
    for axis, (name, cluster) in zip(axes[0], clusters.items(), strict=True):
        _draw(axis, name, cluster)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot: cannot write {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _draw(axis: Any, name: str, cluster: Cluster) -> None:
    for method in METHODS:
        axis.plot(GRID, [100 * share for share in simulate.curve(cluster, method)], label=method)
    axis.set_xscale("log")
    axis.set_xlabel("bandwidth between replicas, Gbit/s")
    axis.set_ylabel("compute utilization, %")
    axis.set_ylim(0, 102)
    axis.set_title(name, fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
