"""ZeRO-1: the part of each parameter that this rank steps, and how the ranks get each other's parts back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import wire
from ..collectives.pipeline import Job
from ..collectives.transport import Transport
from ..collectives.wire import Codec
from .buckets import Bucket, Chunk, Entry, Slot
from .exchange import gather_chunk


@dataclass(eq=False)
class Piece:
    """A stretch of a parameter that lies in one slot of this rank.

    Attributes:
        local: what the optimizer steps, [numel]: a view of the parameter, or an FP32 master copy of the stretch.
        first: index of its first element in the parameter; `at`: the same in the slot.
    """

    entry: Entry
    chunk: Chunk
    slot: Slot
    local: nn.Parameter
    first: int
    at: int


def make_pieces(bucket: Bucket, rank: int, masters: bool) -> list[Piece]:
    """The pieces of a bucket that `rank` owns, in order."""
    pieces = []
    for chunk in bucket.chunks:
        for slot in chunk.slots:
            if slot.owner != rank:
                continue
            for entry in bucket.entries:
                low = max(entry.offset, slot.start)
                high = min(entry.offset + entry.numel, slot.start + slot.numel)
                if low >= high:
                    continue
                first = low - entry.offset
                stretch = entry.parameter.detach().view(-1)[first : first + high - low]
                local = nn.Parameter(stretch.float().clone() if masters else stretch)
                pieces.append(Piece(entry, chunk, slot, local, first, low - slot.start))
    return pieces


def reduced_pieces(
    bucket: Bucket, pieces: Sequence[Piece], rank: int, world: int, factor: float
) -> Iterator[tuple[Piece, Tensor]]:
    """(piece, factor * the mean over the ranks, float32 [numel]) of this rank's pieces, after `scatter_chunk`."""
    for chunk in bucket.chunks:
        if not (numel := chunk.shards.size(rank)):
            continue
        values = wire.reduced_values(chunk.memory, numel, bucket.codec, factor / world)
        for piece in pieces:
            if piece.chunk is chunk:
                yield piece, values[piece.at : piece.at + piece.local.numel()]


def store_exactly(piece: Piece) -> None:
    """Writes a piece's values into its parameter, unless it is a view of it."""
    stretch = piece.entry.parameter.detach().view(-1)[piece.first : piece.first + piece.local.numel()]
    if stretch.data_ptr() != piece.local.data_ptr():
        stretch.copy_(piece.local.detach())


def gather_jobs(
    bucket: Bucket, pieces: Sequence[Piece], transport: Transport, codec: Codec | None
) -> Iterator[Job]:
    """Gives every rank's parameters the values that their owners have stepped to.

    With `codec` values travel encoded and every rank, the owner too, takes what was decoded; without, their own bytes
    travel.
    """
    for chunk in bucket.chunks:
        own = [piece for piece in pieces if piece.chunk is chunk]
        yield _gather_chunk(bucket, chunk, own, transport, codec)


def _gather_chunk(
    bucket: Bucket, chunk: Chunk, own: list[Piece], transport: Transport, codec: Codec | None
) -> Job:
    shards, device = chunk.shards, chunk.memory.device
    dtype = bucket.dtype if codec is None else torch.float32
    part = torch.zeros(shards.width, dtype=dtype, device=device)
    for piece in own:
        part[piece.at : piece.at + piece.local.numel()] = piece.local.detach()
    if codec is None:
        message = part.view(torch.uint8)
    else:
        message = torch.empty(wire.slot_bytes(shards, codec), dtype=torch.uint8, device=device)
        wire.encode_part(part[: shards.size(transport.rank)], message, codec, None, 0)
    gathered = message.new_empty(transport.world, message.numel())
    yield from gather_chunk(transport, gathered, message)
    for slot in chunk.slots:
        if codec is None:
            values = gathered[slot.owner].view(dtype)
        else:
            values = part.new_empty(slot.numel)
            wire.decode_part(gathered[slot.owner], values, codec)
        for entry in bucket.entries:
            low, high = (
                max(entry.offset, slot.start),
                min(entry.offset + entry.numel, slot.start + slot.numel),
            )
            if low < high:
                target = entry.parameter.detach().view(-1)[low - entry.offset : high - entry.offset]
                target.copy_(values[low - slot.start : high - slot.start])


def local_parameters(params: Any, pieces: dict[nn.Parameter, list[nn.Parameter]]) -> Any:
    """`params` as an optimizer takes them, parameters or groups, with each parameter replaced by its pieces.

    Raises:
        ValueError: one of them is not in the store.
    """
    params = list(params)
    if params and isinstance(params[0], dict):
        return [group | {"params": local_parameters(group["params"], pieces)} for group in params]
    found = []
    for parameter in params:
        if parameter not in pieces:
            raise ValueError(
                f"GradientStore.local: params must be parameters of the model that the store was made for; got one of "
                f"shape {tuple(parameter.shape)} that is not"
            )
        found += pieces[parameter]
    return found
