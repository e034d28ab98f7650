"""What a store's checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .buckets import Entry
from .reduction import Reduction
from .shards import Piece


@dataclass
class Saved:
    """One opaque object, not tensors: a rank's codes are of no use to other ranks or other cuts."""

    content: dict[str, Any]


def save(reduction: Reduction, entries: Iterable[Entry], pieces: Sequence[Piece]) -> dict[str, Any]:
    """Codes, what they hold, and the masters of `pieces`."""
    return {
        "record": reduction.record,
        "rank": reduction.rank,
        "memory": [bucket.memory.clone() for bucket in reduction.buckets],
        "written": [entry.name for entry in entries if entry.written],
        "launched": reduction.launched,
        "masters": [piece.local.detach().clone() for piece in pieces] if reduction.gathers_codes else [],
    }


def load(
    saved: Any, reduction: Reduction, entries: Iterable[Entry], pieces: Sequence[Piece]
) -> dict[str, Any]:
    """Puts everything back; the whole content.

    Raises:
        ValueError: it does not belong to this rank, model and options.
    """
    own = f"rank {reduction.rank} of {reduction.record}"
    found = (
        f"rank {saved.content['rank']} of {saved.content['record']}"
        if isinstance(saved, Saved)
        else "none for it"
    )
    if found != own:
        raise ValueError(f"GradientStore.load_state_dict: state must be of {own}; got {found}")
    content = saved.content
    for bucket, memory in zip(reduction.buckets, content["memory"], strict=True):
        bucket.memory.copy_(memory)
    written = set(content["written"])
    for entry in entries:
        entry.written, entry.ready = entry.name in written, False
    reduction.launched = content["launched"]
    for piece, master in zip(pieces, content["masters"], strict=reduction.gathers_codes):
        piece.local.detach().copy_(master)
    return content
