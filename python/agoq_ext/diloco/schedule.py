"""Which parameters form a fragment, and at which steps each fragment's exchange starts and finishes.

Pure functions of names, sizes and step numbers: every replica derives the same schedule from its step alone. Follows
Streaming DiLoCo (arXiv 2501.18512, section 3.1 and algorithm 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PATTERNS = ("strided", "sequential")
OTHERS = ("own", "shared")


@dataclass(frozen=True)
class Fragments:
    """How a model is cut.

    Attributes:
        layers: layers of a fragment (the paper's 3); fragments have at most one layer more or less than each other
            under "strided", and the last is the short one under "sequential".
        pattern: "strided" (fragment i of P holds layers i, i + P, i + 2P, ...) or "sequential".
        others: what lies outside layers (embeddings, head, final norm) is the last fragment ("own") or is shared out,
            each parameter to the fragment that is smallest then ("shared").
    """

    layers: int = 3
    pattern: str = "strided"
    others: str = "own"

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"Fragments: layers must be at least 1; got {self.layers}")
        if self.pattern not in PATTERNS:
            raise ValueError(f"Fragments: pattern must be one of {', '.join(PATTERNS)}; got {self.pattern!r}")
        if self.others not in OTHERS:
            raise ValueError(f"Fragments: others must be one of {', '.join(OTHERS)}; got {self.others!r}")


def layer_of(name: str) -> str | None:
    """The layer that a parameter belongs to: its name up to the first component that is a number; None without one.

    "model.layers.7.mlp.up.weight" -> "model.layers.7".
    """
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return None


def split_layers(layers: int, per_fragment: int, pattern: str = "strided") -> list[list[int]]:
    """Indices of the layers in each fragment: P = ceil(layers / per_fragment) of them."""
    count = -(-layers // per_fragment)
    if pattern == "strided":
        return [list(range(i, layers, count)) for i in range(count)]
    return [list(range(i, min(i + per_fragment, layers))) for i in range(0, layers, per_fragment)]


def split(sizes: Mapping[str, int], fragments: Fragments | int | Sequence[Sequence[str]]) -> list[list[str]]:
    """Names of the parameters in each fragment, each name in exactly one, none of them empty.

    Args:
        sizes: elements of every parameter by name, in the model's order.
        fragments: a rule, a number of fragments (1: the whole model; n > 1: n - 1 strided ones of layers and one of
            the others, or n of layers where there are no others), or the names themselves.

    Raises:
        ValueError: more fragments than the model has layers, or names that are unknown, missing or given twice.
    """
    names = list(sizes)
    if not names:
        return []
    if isinstance(fragments, int):
        return _split_count(sizes, fragments)
    if isinstance(fragments, Fragments):
        return _split_rule(sizes, fragments)
    given = [list(part) for part in fragments]
    flat = [name for part in given for name in part]
    twice = sorted({name for name in flat if flat.count(name) > 1})
    unknown, missing = sorted(set(flat) - set(names)), sorted(set(names) - set(flat))
    for problem, found in (("names twice", twice), ("does not know", unknown), ("leaves out", missing)):
        if found:
            raise ValueError(
                f"split: fragments must hold every trained parameter once; {problem}: {found[0]}"
            )
    if not all(given):
        raise ValueError("split: fragments must not be empty")
    return given


def _layers(names: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """(the names of each layer, the names outside layers), both in the model's order."""
    layers: dict[str, list[str]] = {}
    others = []
    for name in names:
        layer = layer_of(name)
        if layer is None:
            others.append(name)
        else:
            layers.setdefault(layer, []).append(name)
    return list(layers.values()), others


def _split_count(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    layers, others = _layers(list(sizes))
    of_layers = count - bool(others)
    if count < 1 or (count > 1 and not 1 <= of_layers <= len(layers)):
        most = max(1, len(layers) + bool(others))
        raise ValueError(f"split: fragments must be between 1 and {most} for this model; got {count}")
    if count == 1:
        return [list(sizes)]
    parts = [[name for layer in layers[i::of_layers] for name in layer] for i in range(of_layers)]
    return parts + ([others] if others else [])


def _split_rule(sizes: Mapping[str, int], rule: Fragments) -> list[list[str]]:
    layers, others = _layers(list(sizes))
    parts = [
        [name for index in indices for name in layers[index]]
        for indices in split_layers(len(layers), rule.layers, rule.pattern)
    ]
    if rule.others == "own" or not parts:
        return parts + ([others] if others else [])
    filled = [sum(sizes[name] for name in part) for part in parts]
    for name in sorted(others, key=lambda name: -sizes[name]):  # stable: ties keep the model's order
        smallest = filled.index(min(filled))
        parts[smallest].append(name)
        filled[smallest] += sizes[name]
    return parts


@dataclass(frozen=True)
class Schedule:
    """When fragments are exchanged.

    Attributes:
        sync_every: H, inner steps between two exchanges of a fragment.
        fragments: their number, embeddings included (the paper's P + 1).
        overlap: tau, inner steps between start and finish; 0 <= tau < H.
        warmup_steps: steps before the first of those that the schedule counts.
        early: a fragment may start before it has run H steps.
    """

    sync_every: int
    fragments: int = 1
    overlap: int = 0
    warmup_steps: int = 0
    early: bool = False

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise ValueError(f"Schedule: sync_every must be at least 1; got {self.sync_every}")
        if not 0 <= self.overlap < self.sync_every:
            raise ValueError(
                f"Schedule: overlap must be at least 0 and less than sync_every, {self.sync_every}; "
                f"got {self.overlap}"
            )
        if self.fragments < 0 or self.warmup_steps < 0:
            name = "fragments" if self.fragments < 0 else "warmup_steps"
            raise ValueError(f"Schedule: {name} must not be negative; got {getattr(self, name)}")

    @property
    def offsets(self) -> list[int]:
        """t_p of each fragment: p * max(1, floor(H / number of fragments)) mod H."""
        return offsets(self.sync_every, self.fragments)

    def starts(self, step: int) -> list[int]:
        """Fragments whose exchange starts after inner step `step` (1-based)."""
        local = step - self.warmup_steps
        first = 1 if self.early else self.sync_every
        if local < first:
            return []
        return [p for p, offset in enumerate(self.offsets) if (local - offset) % self.sync_every == 0]

    def finishes(self, step: int) -> list[int]:
        """Fragments whose exchange, started `overlap` steps before, is applied after inner step `step`."""
        return self.starts(step - self.overlap)


def offsets(sync_every: int, fragments: int) -> list[int]:
    """t_p = p * max(1, floor(H / n)) mod H for p = 0, ..., n - 1; n counts all fragments, the embeddings' too."""
    spacing = max(1, sync_every // max(1, fragments))
    return [p * spacing % sync_every for p in range(fragments)]
