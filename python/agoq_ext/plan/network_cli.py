"""`agoq plan --network`: the time of one gradient exchange, and the model beside measured times."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..errors import UserError
from . import network as model
from .network import MEASURED, Link, Measured, Network

FORMATS = ("float32", "bfloat16", "int8", "int4")
INNER_FORMATS = ("float32", "int8")
_DESCRIPTION = (
    "Milliseconds of one all-reduce from latencies and bandwidths: over all ranks alike (flat), and in two levels, "
    "with an exchange in float32 or int8 inside each node. --paper: the model beside the times that AGoQ "
    "(arXiv 2605.00539) reports and beside those of this package over limited links."
)


def is_asked(arguments: Sequence[str]) -> bool:
    """Whether `arguments` of `agoq` are for this module."""
    return arguments[:1] == ["plan"] and "--network" in arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `agoq plan --network`."""
    parser.description = _DESCRIPTION
    add = parser.add_argument
    add("--network", action="store_true", help="the time of one gradient exchange")
    add("--paper", action="store_true", help="the model beside measured times, with its errors")
    add("--elements", type=float, metavar="N", help="of the gradient, e.g. 1e9")
    add("--nodes", type=int, metavar="M", help="nodes")
    add("--ranks-per-node", type=int, default=1, metavar="R", help="data-parallel ranks of a node [1]")
    add("--bandwidth", type=float, metavar="GBIT", help="of a node's link to the others, Gbit/s each way")
    add(
        "--inner-bandwidth", type=float, default=3600.0, metavar="GBIT", help="of a rank inside a node [3600]"
    )
    add("--latency", type=float, default=20e-6, metavar="SECONDS", help="of a message between nodes [2e-5]")
    add("--inner-latency", type=float, default=5e-6, metavar="SECONDS", help="inside a node [5e-6]")
    add("--efficiency", type=float, default=1.0, metavar="SHARE", help="of --bandwidth that is reached [1]")
    add("--sharing", type=int, default=1, metavar="N", help="exchanges that share a node's link [1]")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Runs `agoq plan --network`; returns its exit status."""
    if args.paper:
        facts: Any = [_compared(measured) for measured in MEASURED]
        text = "\n\n".join(render_comparison(each) for each in facts)
    else:
        facts = collect(args)
        text = render(facts)
    print(json.dumps(facts, indent=2) if args.json else text)
    return 0


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is printed, as plain values; seconds."""
    for name in ("elements", "nodes", "bandwidth"):
        if getattr(args, name) is None:
            raise UserError(f"plan --network: --{name} or --paper is needed")
    if args.elements < 0:
        raise UserError(f"plan --network: --elements must not be negative; got {args.elements:g}")
    try:
        inner = Link(args.inner_bandwidth, args.inner_latency)
        outer = Link(args.bandwidth, args.latency, args.efficiency)
        network = Network(args.nodes, outer, args.ranks_per_node, inner, args.sharing)
    except ValueError as error:
        raise UserError(f"plan --network: {error}") from error
    rows = {
        format: {
            "flat": model.flat_seconds(network, args.elements, format),
            **{
                inside: model.two_level_seconds(network, args.elements, format, inside)
                for inside in INNER_FORMATS
            },
        }
        for format in FORMATS
    }
    return {"elements": args.elements, "network": asdict(network), "seconds": rows}


def render(facts: dict[str, Any]) -> str:
    """The table of `collect`; in brackets, times faster than the flat FP32 exchange."""
    network, rows = facts["network"], facts["seconds"]
    lines = [
        f"all-reduce of {facts['elements']:g} elements, {network['nodes']} nodes x {network['ranks']} ranks, "
        f"{network['outer']['gbits']:g} Gbit/s between nodes: ms (times faster than FP32, flat)",
        f"{'':10}{'flat':>20}" + "".join(f"{f'{inside} inside':>20}" for inside in INNER_FORMATS),
    ]
    base = rows["float32"]["flat"]
    for format, row in rows.items():
        cells = (f"{1000 * s:.3f} ({base / s:.2f})" if s else "0" for s in row.values())
        lines.append(f"{format:10}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


def _compared(measured: Measured) -> dict[str, Any]:
    outer = model.fit(measured).outer
    points = [
        {**asdict(point), "model": seconds, "error": seconds / point.seconds - 1}
        for point, seconds in model.compare(measured)
    ]
    return {
        "title": measured.title,
        "efficiency": outer.efficiency,
        "latency": outer.latency,
        "points": points,
    }


def render_comparison(facts: dict[str, Any]) -> str:
    """One network's measured times beside the model's."""
    lines = [
        f"{facts['title']}: efficiency {facts['efficiency']:.2f} and latency {1e6 * facts['latency']:.0f} us a round, "
        "from the plain times alone",
        f"{'elements':>12}  {'format':10}{'measured, ms':>14}{'model, ms':>12}{'error':>9}",
    ]
    for point in facts["points"]:
        lines.append(
            f"{point['numel']:>12}  {point['format']:10}{1000 * point['seconds']:>14.2f}"
            f"{1000 * point['model']:>12.2f}{point['error']:>+9.0%}"
        )
    return "\n".join(lines)
