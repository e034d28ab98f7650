"""The ranks of a run as one of them sees them: joining, small exchanges, and failing together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UserError

# A peer that dies is noticed at once, by its closed connection; this bounds the wait for one that hangs.
TIMEOUT = timedelta(minutes=5)


class PeerUserError(UserError):
    """A UserError that another rank reports: this rank ends too, but says nothing."""


@dataclass(frozen=True)
class World:
    """Rank `rank` of `size`, with the default process group over Gloo."""

    rank: int
    size: int

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, values: Sequence[float]) -> Tensor:
        """The values of every rank: float64 [size, len(values)]."""
        rows = [torch.empty(len(values), dtype=torch.float64) for _ in range(self.size)]
        dist.all_gather(rows, torch.tensor(values, dtype=torch.float64))
        return torch.stack(rows)

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of every rank, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs the block on every rank; a UserError on any of them is one on all of them."""
        error: UserError | None = None
        try:
            yield
        except UserError as caught:
            error = caught
        messages = self.gather_objects(None if error is None else str(error))
        failed = [rank for rank, message in enumerate(messages) if message is not None]
        if failed:
            kind = UserError if self.rank == failed[0] else PeerUserError
            raise kind(messages[failed[0]]) from error


def torchrun_ranks() -> int | None:
    """The world size that torchrun gave this process; None if it was not started by torchrun."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    try:
        return int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        raise UserError(f"WORLD_SIZE must be a number; got {os.environ['WORLD_SIZE']!r}") from error


@contextmanager
def join(rank: int | None = None, size: int = 1, rendezvous: str | None = None) -> Iterator[World]:
    """Sets up the default process group and takes it down again.

    Args:
        rank, size: this process' place; rank None reads both from torchrun's environment.
        rendezvous: a file that all ranks can reach and nobody has used; None: torchrun's, or a world of one.
    """
    if rank is None:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    elif rendezvous is None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=size, timeout=TIMEOUT)
    else:
        store = dist.FileStore(rendezvous, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    world = World(dist.get_rank(), dist.get_world_size())
    try:
        yield world
    except BaseException:
        # Leaving closes the connections, which the peers see as a failure of their own. A rank that fails tells
        # its parent first and closes them by ending; only a world of one goes on in the same process.
        if world.size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
