"""The exchanges of a replica as it saw them, and the bandwidth that they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """One exchange as this replica saw it: when it began and ended (time.monotonic, seconds), and bytes sent.

    `warmup`: of gradients, in the warm-up.
    """

    began: float
    ended: float
    sent: int
    warmup: bool = False


def peak_bandwidth(transfers: Sequence[Transfer], window: float = 1.0) -> float:
    """The most bytes a second sent over any `window` seconds, those of the warm-up left out.

    An exchange's bytes count as spread evenly over its duration.
    """
    transfers = [t for t in transfers if not t.warmup]
    edges = [t.began for t in transfers] + [t.ended - window for t in transfers]
    return max((_sent_within(transfers, edge, edge + window) / window for edge in edges), default=0.0)


def _sent_within(transfers: Sequence[Transfer], first: float, last: float) -> float:
    total = 0.0
    for t in transfers:
        length = max(t.ended - t.began, 1e-9)
        total += t.sent * max(0.0, min(t.ended, last) - max(t.began, first)) / length
    return total
