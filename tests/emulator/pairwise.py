"""Cases that cover every pair of values of any two axes, many fewer than the full product."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Axes = Mapping[str, Sequence[Any]]


def full_product(axes: Axes) -> Iterator[Case]:
    """Every combination of values."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def pairwise(axes: Axes) -> list[Case]:
    """Cases in which every two values of different axes meet at least once. Greedy, and the same in every run."""
    names = list(axes)
    uncovered = {pair for a, b in itertools.combinations(names, 2) for pair in _pairs(axes, a, b)}
    cases: list[Case] = []
    while uncovered:
        # Start from a pair that is still missing, then give each other axis the value that covers most.
        (a, i), (b, j) = min(uncovered)
        chosen = {a: i, b: j}
        for name in names:
            if name in chosen:
                continue
            gains = [
                sum(_pair((name, k), item) in uncovered for item in chosen.items())
                for k in range(len(axes[name]))
            ]
            # Of equally good values, another one in each case.
            best = [k for k, gain in enumerate(gains) if gain == max(gains)]
            chosen[name] = best[len(cases) % len(best)]
        uncovered -= {_pair(x, y) for x, y in itertools.combinations(chosen.items(), 2)}
        cases.append({name: axes[name][chosen[name]] for name in names})
    return cases


_Item = tuple[str, int]  # an axis and the index of one of its values


def _pair(x: _Item, y: _Item) -> tuple[_Item, _Item]:
    return (x, y) if x < y else (y, x)


def _pairs(axes: Axes, a: str, b: str) -> Iterator[tuple[_Item, _Item]]:
    for i, j in itertools.product(range(len(axes[a])), range(len(axes[b]))):
        yield _pair((a, i), (b, j))
