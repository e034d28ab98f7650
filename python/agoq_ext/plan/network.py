"""Time of one all-reduce from latency and bandwidth, flat or in two levels, plain or quantized.

A rank exchanges N elements of b bytes (scales included) with the others of W = M nodes x R ranks. A node has one link
to the others, whose bandwidth all exchanges at the same time share (`sharing`: 8 with tensor parallelism over 8 ranks
of a node), and one inside. Each round, in which a rank sends one message, takes a latency. Bytes out of a node:

    plain, flat        ring all-reduce: 2 (W - 1) / W N b; 2 (W - 1) rounds
    quantized, flat    all-to-all: R (W - R) / W N b, then a ring all-gather: (W - 1) / W N b; 2 (W - 1) rounds
    two levels         the same with the M ranks of a place and N / R elements, R times at the same time; before it a
                       reduce-scatter and after it an all-gather inside the node, (R - 1) / R N b each on a rank

Where a flat exchange uses both links, the slower one counts. Encoding is not counted: chunks overlap it
(docs/collectives.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .. import layout

PLAIN = {"float32": 4.0, "bfloat16": 2.0}


@dataclass(frozen=True)
class Link:
    """A link of a node.

    Attributes:
        gbits: bandwidth, Gbit/s, each way.
        latency: seconds of a round.
        efficiency: share of the bandwidth that exchanges reach.
    """

    gbits: float
    latency: float = 0.0
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        if self.gbits <= 0 or not 0 < self.efficiency:
            raise ValueError(
                f"Link: gbits and efficiency must be positive; got {self.gbits} and {self.efficiency}"
            )
        if self.latency < 0:
            raise ValueError(f"Link: latency must not be negative; got {self.latency}")

    def seconds(self, nbytes: float, rounds: int) -> float:
        return rounds * self.latency + 8 * nbytes / (self.gbits * 1e9 * self.efficiency)


@dataclass(frozen=True)
class Network:
    """Ranks that exchange gradients.

    Attributes:
        nodes: M, at least 1.
        outer: between nodes.
        ranks: R, of a node.
        inner: inside a node, a rank's own; needed where R > 1.
        sharing: exchanges at the same time over a node's link to the others.
    """

    nodes: int
    outer: Link
    ranks: int = 1
    inner: Link | None = None
    sharing: int = 1

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks", "sharing"):
            if getattr(self, name) < 1:
                raise ValueError(f"Network: {name} must be at least 1; got {getattr(self, name)}")
        if self.ranks > 1 and self.inner is None:
            raise ValueError(f"Network: inner is needed for {self.ranks} ranks of a node")

    @property
    def world(self) -> int:
        return self.nodes * self.ranks


def element_bytes(format: str, group_size: int = 128, scale_dtype: torch.dtype = torch.bfloat16) -> float:
    """Bytes of one element on the wire, scales included, padding not."""
    if format in PLAIN:
        return PLAIN[format]
    layout.check_format("element_bytes", format)
    return layout.wire_layout(2**20, format, group_size, scale_dtype).total_bytes / 2**20


def flat_seconds(network: Network, numel: float, format: str) -> float:
    """Of an all-reduce of `numel` elements over all ranks alike."""
    world, ranks, nbytes = network.world, network.ranks, numel * element_bytes(format)
    ring, rounds = (world - 1) / world * nbytes, 2 * (world - 1)
    first = ring if format in PLAIN else ranks * (world - ranks) / world * nbytes
    outside = network.outer.seconds(network.sharing * (first + ring), rounds) if network.nodes > 1 else 0.0
    inside = network.inner.seconds(2 * ring, rounds) if network.inner is not None and ranks > 1 else 0.0
    return max(outside, inside)


def two_level_seconds(network: Network, numel: float, format: str, inner_format: str = "float32") -> float:
    """Of an all-reduce with an exchange inside each node around the one between the nodes."""
    nodes, ranks, inside = network.nodes, network.ranks, 0.0
    inner_format = format if format in PLAIN else inner_format  # values that are not encoded at all
    if ranks > 1 and network.inner is not None:
        share = (ranks - 1) / ranks * numel
        # What the node gathers is the encoded result, as it came from the other nodes.
        for each in (inner_format, format):
            inside += network.inner.seconds(share * element_bytes(each), ranks - 1)
    between = replace(network, ranks=1, inner=None, sharing=network.sharing * ranks)
    return inside + (flat_seconds(between, numel / ranks, format) if nodes > 1 else 0.0)


# --- measured times ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A measured all-reduce: `format` "float32" is a plain one."""

    numel: int
    format: str
    seconds: float


@dataclass(frozen=True)
class Measured:
    """Times measured on one network."""

    title: str
    network: Network
    points: Sequence[Point]


def _agoq(gbits: float, *rows: tuple[int, float, float]) -> Measured:
    points = [
        Point(2**exponent, format, milliseconds / 1000)
        for exponent, *pair in rows
        for format, milliseconds in zip(("float32", "int8"), pair, strict=True)
    ]
    return Measured(f"AGoQ, 64 GPUs, TP8 DP8, {gbits:g} Gbit/s", Network(8, Link(gbits), sharing=8), points)


def _here(gbits: float, ranks: int, plain: float, int8: float, int4: float) -> Measured:
    found = (("float32", plain), ("int8", int8), ("int4", int4))
    points = [Point(2**24, format, seconds) for format, seconds in found]
    title = f"agoq_ext on a CPU, {ranks} ranks, {gbits:g} Gbit/s"
    return Measured(title, Network(ranks, Link(gbits)), points)


# AGoQ (arXiv 2605.00539): plain and AGoQ's all-reduce in ms, by the exponent of the number of elements. TP8 inside a
# node: eight exchanges share its link. Then benchmarks/results/collectives_link.md.
MEASURED = (
    _agoq(200, (30, 4292.77, 1186.78), (25, 131.23, 39.17), (15, 0.83, 0.81)),
    _agoq(10, (30, 50365, 7555), (25, 1603.78, 432.36), (15, 3.93, 1.26)),
    _here(1, 2, 0.5665, 0.1449, 0.0754),
    _here(1, 4, 0.8570, 0.2381, 0.1268),
    _here(0.1, 2, 5.6902, 1.4402, 0.7291),
    _here(0.1, 4, 8.8645, 2.2286, 1.1336),
)


def fit(measured: Measured) -> Network:
    """The network with efficiency and latency taken from its plain all-reduces alone.

    The efficiency is that of the large ones (2^20 elements and more; geometric mean), the latency what the smallest
    one takes beyond its transfer. So times of quantized all-reduces are predictions.
    """
    network = measured.network
    plain = [p for p in measured.points if p.format in PLAIN]
    large = [flat_seconds(network, p.numel, p.format) / p.seconds for p in plain if p.numel >= 2**20]
    efficiency = math.prod(large) ** (1 / len(large))
    network = replace(network, outer=replace(network.outer, efficiency=efficiency))
    smallest = min(plain, key=lambda p: p.numel)
    rest = smallest.seconds - flat_seconds(network, smallest.numel, smallest.format)
    latency = max(0.0, rest / (2 * (network.world - 1))) if smallest.numel < 2**20 else 0.0
    return replace(network, outer=replace(network.outer, latency=latency))


def compare(measured: Measured) -> list[tuple[Point, float]]:
    """Each point and the seconds that the fitted model gives."""
    network = fit(measured)
    return [(p, flat_seconds(network, p.numel, p.format)) for p in measured.points]
