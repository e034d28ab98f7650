"""Compute utilization against bandwidth, before anything runs: data parallel, DiLoCo and its streaming variants.

A replica's step is a forward (1/3 of the step time) and a backward (2/3), its layers equally long and equally large.
A layer's exchange may start once every replica has ended its backward; exchanges share one link in the order in which
they became ready; an exchange of b bits takes latency + b / bandwidth, of which only b / bandwidth occupies the link.
At the step that finishes a fragment, replicas wait for its exchange. Utilization is the time spent in compute over
the time passed, over all replicas. The model after arXiv 2501.18512, section 4 and appendix.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .schedule import Schedule, split_layers

METHODS = ("data parallel", "DiLoCo", "streaming", "+ overlap", "+ 4-bit")
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
# Bandwidths in Gbit/s: 50 logarithmic points from 0.1 to 1000, the paper's grid.
GRID = tuple(10 ** (-1 + 4 * i / 49) for i in range(50))
# Up to this many replicas gather once-encoded outer gradients; more of them all-to-all and return 8 bits.
GATHER_UP_TO = 3


@dataclass(frozen=True)
class Cluster:
    """What is simulated.

    Attributes:
        parameters, layers: of the model.
        step_time: seconds of one inner step, computing alone.
        replicas: replicas over the slow link; each may be many devices.
        sync_every, overlap: H and, where a method overlaps, tau.
        layers_per_fragment: of the streaming methods, strided.
        latency: seconds that an exchange takes besides its transfer.
        bits: on the wire for one element of the unquantized methods.
        low_bits: the same for "+ 4-bit", scales included.
        jitter: standard deviation of the logarithm of a step's time, drawn for each replica and step.
        straggler: factor on the step time of the last replica.
        seed: of the jitter.
    """

    parameters: float
    layers: int
    step_time: float
    replicas: int = 2
    sync_every: int = 100
    overlap: int = 1
    layers_per_fragment: int = 3
    latency: float = 0.0
    bits: float = 16.0
    low_bits: float = 4.125
    jitter: float = 0.0
    straggler: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("parameters", "layers", "step_time", "replicas", "sync_every", "layers_per_fragment"):
            if getattr(self, name) <= 0:
                raise ValueError(f"Cluster: {name} must be positive; got {getattr(self, name)}")
        for name in ("latency", "jitter", "straggler"):
            if getattr(self, name) < 0:
                raise ValueError(f"Cluster: {name} must not be negative; got {getattr(self, name)}")
        Schedule(self.sync_every, overlap=self.overlap)


# The two models of the paper's table. The table gives no number of layers: 24 and 108 are taken here.
PAPER_CLUSTERS = {
    "1B, 0.1 s a step": Cluster(1e9, 24, 0.1),
    "100B, 4.9 s a step": Cluster(100e9, 108, 4.9),
}
# Gbit/s needed for a utilization of TARGETS, as the paper prints them.
PAPER_TABLE = {
    "1B, 0.1 s a step": {
        "data parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
        "DiLoCo": (1.4, 6.2, 13.3, 23.3, 86.8),
        "streaming": (1.4, 5.2, 9.1, 16.0, 28.1),
        "+ overlap": (1.4, 4.3, 6.2, 9.1, 11.0),
        "+ 4-bit": (0.4, 0.9, 1.7, 2.0, 3.0),
    },
    "100B, 4.9 s a step": {
        "data parallel": (184.2, 323.8, 390.7, 390.7, 471.5),
        "DiLoCo": (3.0, 11.0, 23.3, 49.4, 184.2),
        "streaming": (2.4, 6.2, 9.1, 11.0, 19.3),
        "+ overlap": (1.7, 3.6, 4.3, 5.2, 5.2),
        "+ 4-bit": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}


@dataclass(frozen=True)
class _Method:
    """A method as the simulation sees it; one list of layers for each fragment."""

    schedule: Schedule
    fragments: list[list[int]]
    wire_bits: float


def wire_bits(cluster: Cluster, method: str) -> float:
    """Bits that one replica sends for one element in one exchange."""
    m = cluster.replicas
    if method != "+ 4-bit":
        return 2 * (m - 1) / m * cluster.bits  # ring all-reduce
    if m <= GATHER_UP_TO:
        return (m - 1) * cluster.low_bits
    return (m - 1) / m * (cluster.low_bits + 8.125)


def _method(cluster: Cluster, method: str) -> _Method:
    if method not in METHODS:
        raise ValueError(f"simulate: method must be one of {', '.join(METHODS)}; got {method!r}")
    every, bits, whole = cluster.sync_every, wire_bits(cluster, method), [list(range(cluster.layers))]
    if method == "data parallel":
        return _Method(Schedule(1, early=True), whole, bits)
    if method == "DiLoCo":
        return _Method(Schedule(every, early=True), whole, bits)
    parts = split_layers(cluster.layers, cluster.layers_per_fragment)
    overlap = 0 if method == "streaming" else cluster.overlap
    return _Method(Schedule(every, len(parts), overlap, early=True), parts, bits)


def utilization(cluster: Cluster, method: str, gbits: float, rounds: int = 2) -> float:
    """Share of the time in which the replicas compute, at `gbits` Gbit/s, over `rounds` rounds of H steps."""
    if gbits <= 0:
        raise ValueError(f"utilization: gbits must be positive; got {gbits}")
    plan, layers, m = _method(cluster, method), cluster.layers, cluster.replicas
    if m == 1:
        return 1.0
    transfer = cluster.parameters / layers * plan.wire_bits / (gbits * 1e9)
    noise = random.Random(cluster.seed)
    clocks = [0.0] * m
    link_free = computed = 0.0
    arrivals: dict[int, float] = {}  # of the fragments in flight
    # Without noise a method repeats itself after its own period, which for data parallel is one step.
    period = cluster.sync_every if cluster.jitter else plan.schedule.sync_every
    for step in range(1, rounds * period + 1):
        times = [cluster.step_time] * m
        times[-1] *= cluster.straggler
        if cluster.jitter:
            times = [time * noise.lognormvariate(0.0, cluster.jitter) for time in times]
        starting = plan.schedule.starts(step)
        # Backward reaches the top layer first.
        for layer, part in sorted(((x, p) for p in starting for x in plan.fragments[p]), reverse=True):
            done = 1 / 3 + 2 / 3 * (layers - layer) / layers
            ready = max(clock + time * done for clock, time in zip(clocks, times, strict=True))
            link_free = max(link_free, ready) + transfer
            arrivals[part] = link_free + cluster.latency
        clocks = [clock + time for clock, time in zip(clocks, times, strict=True)]
        computed += sum(times)
        for part in plan.schedule.finishes(step):
            arrived = arrivals.pop(part)
            clocks = [max(clock, arrived) for clock in clocks]
    # Replicas that are never made to wait for each other end at different times: each counts its own.
    return computed / sum(clocks)


def curve(cluster: Cluster, method: str, grid: Sequence[float] = GRID) -> list[float]:
    """`utilization` at every bandwidth of `grid`."""
    return [utilization(cluster, method, gbits) for gbits in grid]


def needed(cluster: Cluster, method: str, target: float, grid: Sequence[float] = GRID) -> float | None:
    """The first bandwidth of `grid` (ascending, Gbit/s) that reaches the utilization `target`; None if none does."""
    low, high = 0, len(grid)
    while low < high:  # more bandwidth never hurts
        middle = (low + high) // 2
        if utilization(cluster, method, grid[middle]) >= target:
            high = middle
        else:
            low = middle + 1
    return grid[low] if low < len(grid) else None


def table(cluster: Cluster, targets: Sequence[float] = TARGETS) -> dict[str, list[float | None]]:
    """`needed` of every method for every target."""
    return {method: [needed(cluster, method, target) for target in targets] for method in METHODS}


def with_replicas(cluster: Cluster, counts: Sequence[int]) -> dict[int, dict[str, list[float | None]]]:
    """`table` for other numbers of replicas."""
    return {count: table(replace(cluster, replicas=count)) for count in counts}
