"""Buckets: where each parameter's gradient lies, as codes, in messages that can be sent as they are.

A bucket is a flat tensor of the gradients of some parameters, each on a group boundary, cut into one shard for each
rank (`collectives.wire.Shards`) and into chunks. Its memory is the messages of all chunks and shards, one after the
other, in the wire's layout: codes, then scales. So nothing is copied or encoded again before it is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .. import layout, ops
from ..collectives import pipeline, wire
from ..collectives.wire import Codec, Shards

# Formats whose codes of neighbouring groups are neighbours in memory, and whose padding decodes to zero.
FORMATS = tuple(name for name, f in layout.FORMATS.items() if f.bits in (4, 8) and not f.has_min)


@dataclass
class Slot:
    """The message of one shard in one chunk, and the stretch of the bucket that it holds.

    Attributes:
        packed: uint8 [1, row_bytes], scales: scale_dtype [1, groups]; views of the bucket's memory.
        start, numel: the stretch.
        owner: rank that owns the shard.
    """

    packed: Tensor
    scales: Tensor
    start: int
    numel: int
    owner: int

    def part(self, first: int, numel: int, codec: Codec) -> tuple[Tensor, Tensor]:
        """(packed [1, bytes], scales [1, groups]) of the elements from `first` of the slot, a group boundary."""
        bits, size = layout.FORMATS[codec.format].bits, codec.group_size
        groups = layout.num_groups(numel, size)
        start = first * bits // 8
        return (
            self.packed[:, start : start + layout.row_bytes(numel, codec.format)],
            self.scales[:, first // size : first // size + groups],
        )


@dataclass
class Chunk:
    """A chunk: `memory` uint8 [world, slot_bytes], and the slots in it, without empty ones."""

    shards: Shards
    memory: Tensor
    slots: list[Slot]


@dataclass(eq=False)
class Entry:
    """A parameter in a bucket.

    Attributes:
        offset: index of its first element in the bucket.
        base: the same among all elements of the store, for the noise of stochastic rounding.
        written: whether its codes hold a gradient of this step; else they are of no meaning.
        ready: whether the backward pass that is to be exchanged has delivered its gradient.
    """

    name: str
    parameter: nn.Parameter
    bucket: Bucket
    offset: int
    base: int
    written: bool = False
    ready: bool = False

    @property
    def numel(self) -> int:
        return self.parameter.numel()


@dataclass(eq=False)
class Bucket:
    """Some parameters of one dtype, and the memory of their codes."""

    index: int
    codec: Codec
    dtype: torch.dtype
    entries: list[Entry] = field(default_factory=list)
    numel: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    memory: Tensor = field(default_factory=lambda: torch.empty(0))

    def add(self, name: str, parameter: nn.Parameter, base: int) -> Entry:
        """Appends a parameter, on a group boundary."""
        offset = layout.round_up(self.numel, self.codec.group_size)
        entry = Entry(name, parameter, self, offset, base + offset)
        self.entries.append(entry)
        self.numel = offset + parameter.numel()
        return entry

    def allocate(self, world: int, device: torch.device) -> None:
        """Makes the memory, which decodes to zeros."""
        codec = self.codec
        cut = Shards.cut(self.numel, world, codec.group_size)
        chunks = list(cut.chunks(pipeline.chunk_width(world, codec)))
        sizes = [world * wire.slot_bytes(chunk, codec) for chunk in chunks]
        zero, bits = layout.FORMATS[codec.format].zero_code, layout.FORMATS[codec.format].bits
        pattern = zero if bits == 8 else zero | zero << 4
        self.memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        start = 0
        for shards, size in zip(chunks, sizes, strict=True):
            memory = self.memory[start : start + size].view(world, -1)
            start += size
            slots = []
            for rank in range(world):
                if numel := shards.size(rank):
                    packed, scales = wire.message_views(memory[rank], numel, codec)
                    if pattern:
                        packed.fill_(pattern)
                    slots.append(Slot(packed, scales, shards.start(rank), numel, rank))
            self.chunks.append(Chunk(shards, memory, slots))

    def slots(self) -> Iterator[Slot]:
        """All slots, in the order of the memory."""
        for chunk in self.chunks:
            yield from chunk.slots

    def pieces(
        self, entry: Entry, first: int = 0, numel: int | None = None
    ) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """(index in the parameter, elements, packed, scales) of where the elements from `first` of a parameter lie.

        `first` must be on a group boundary.
        """
        begin = entry.offset + first
        end = begin + (entry.numel - first if numel is None else numel)
        for slot in self.slots():
            low, high = max(begin, slot.start), min(end, slot.start + slot.numel)
            if low < high:
                packed, scales = slot.part(low - slot.start, high - low, self.codec)
                yield low - entry.offset, high - low, packed, scales

    def clear_unwritten(self, entries: Sequence[Entry]) -> None:
        """Makes the gradients zero that nothing has been written to."""
        for entry in entries:
            if not entry.written:
                for _, _, _, scales in self.pieces(entry):
                    scales.zero_()
                entry.written = True

    def decode(self, entry: Entry, out: Tensor, factor: float) -> None:
        """Writes factor * the gradient of a parameter into `out`, contiguous, of its shape."""
        flat, codec = out.view(-1), self.codec
        for first, numel, packed, scales in self.pieces(entry):
            part = flat[first : first + numel].unsqueeze(0)
            if factor == 1.0:
                ops.dequantize_out(packed, scales, part, codec.format, codec.group_size)
            else:
                ops.reduce_out(packed[None], scales[None], part, codec.format, codec.group_size, factor)

    def norm(self) -> tuple[Tensor, Tensor]:
        """(sum of squares float64 [], whether any value is not finite bool [])."""
        codec = self.codec
        parts = [
            ops.norm(slot.packed, slot.scales, slot.numel, codec.format, codec.group_size)
            for slot in self.slots()
        ]
        total, bad = parts[0]
        for squares, flag in parts[1:]:
            total, bad = total + squares, bad | flag
        return total, bad


def make_buckets(
    parameters: Sequence[tuple[str, nn.Parameter]], codec: Codec, bucket_bytes: int, world: int
) -> list[Bucket]:
    """Deals parameters to buckets of about `bucket_bytes` bytes of codes, in the order given, by dtype.

    Backward delivers gradients about in the reverse order of the parameters, so that is what to give.
    """
    limit = bucket_bytes * 8 // layout.FORMATS[codec.format].bits
    buckets: list[Bucket] = []
    open_buckets: dict[torch.dtype, Bucket] = {}
    bases: dict[int, int] = {}
    base = 0
    for name, parameter in parameters:
        bucket = open_buckets.get(parameter.dtype)
        if bucket is None or (bucket.entries and bucket.numel + parameter.numel() > limit):
            bucket = open_buckets[parameter.dtype] = Bucket(len(buckets), codec, parameter.dtype)
            bases[bucket.index] = base
            buckets.append(bucket)
        bucket.add(name, parameter, bases[bucket.index])
        # The next bucket's noise begins after all that this one may still take.
        base = max(base, bases[bucket.index] + layout.round_up(max(bucket.numel, limit), codec.group_size))
    for bucket in buckets:
        bucket.allocate(world, bucket.entries[0].parameter.device)
    return buckets
