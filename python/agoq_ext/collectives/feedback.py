"""Error feedback: what an encoding loses is added to the next value that is encoded in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import wire
from .wire import Codec


@dataclass
class Residuals:
    """What the encodings of one flat tensor have lost so far.

    Attributes:
        sent: float32, one for each element that this rank encodes to send.
        owned: float32, one for each element of the sum that this rank encodes.
    """

    sent: Tensor
    owned: Tensor


class ErrorFeedback:
    """The residuals of a tensor, or a list, that is exchanged again and again; one object for each.

    A call with `feedback=` encodes value + residual and keeps what that encoding lost: on the rank that sends, and on
    the rank that encodes the sum. So errors of successive exchanges cancel instead of adding up (Seide et al., 2014;
    Karimireddy et al., arXiv 1901.09847). Where a group is not finite its residuals are zero.

    Costs 4 bytes an element for what is sent and 4 / W for what is owned. A `Stateful` of torch.distributed.checkpoint:
    every rank saves its own residuals; they are found again by rank and sizes, and what is not found starts at zero.
    """

    def __init__(self) -> None:
        self._residuals: dict[str, Residuals] = {}
        self._rank = 0

    def of(self, key: str, rank: int, sent: int, owned: int, device: torch.device) -> Residuals:
        """The residuals that belong to `key`, zero at first and whenever the sizes change."""
        self._rank = rank
        found = self._residuals.get(key)
        if found is None or (found.sent.numel(), found.owned.numel()) != (sent, owned):
            found = Residuals(torch.zeros(sent, device=device), torch.zeros(owned, device=device))
        elif found.sent.device != device:
            found = Residuals(found.sent.to(device), found.owned.to(device))
        self._residuals[key] = found
        return found

    def reset(self) -> None:
        """Forgets all residuals."""
        self._residuals.clear()

    @property
    def nbytes(self) -> int:
        """Bytes that the residuals take."""
        return sum(r.sent.nbytes + r.owned.nbytes for r in self._residuals.values())

    def state_dict(self) -> dict[str, Any]:
        """The residuals of this rank, under a name that no other rank uses.

        One opaque object, not tensors: a checkpoint is loaded before the first exchange tells their sizes.
        """
        return {f"rank{self._global_rank()}": _Saved(self._residuals)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the residuals by those that this rank has saved; none if it has not."""
        saved = state.get(f"rank{self._global_rank()}")
        self._residuals = dict(saved.residuals) if isinstance(saved, _Saved) else {}

    def _global_rank(self) -> int:
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else self._rank


@dataclass
class _Saved:
    residuals: dict[str, Residuals]


def encode_part(
    part: Tensor, slot: Tensor, codec: Codec, seed: Tensor | None, start: int, residual: Tensor
) -> None:
    """Writes the message of part + residual (both [size]) and replaces the residual by what it loses."""
    if part.numel() == 0:
        wire.encode_part(part, slot, codec, seed, start)
        return
    residual += part
    wire.encode_part(residual, slot, codec, seed, start)
    decoded = torch.empty_like(residual)
    wire.decode_part(slot, decoded, codec)
    residual -= decoded
    # A group that is not finite decodes to NaN; its residual must not poison the exchanges to come.
    residual.masked_fill_(~residual.isfinite(), 0.0)
