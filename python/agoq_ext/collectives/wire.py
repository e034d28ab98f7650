"""Messages: a flat tensor cut into shards, each encoded, reduced and decoded. No communication happens here.

A flat tensor of `numel` elements is cut into `world` shards, one owned by each rank. Every shard starts on a
group boundary, so no group crosses ranks. A shard travels as one message, its codes and then its scales
(docs/formats.md, "Wire"), in a slot as long as the message of a full shard, so that all slots are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import layout, ops

# Formats in which values travel as they are; sums are FP32 all the same.
PLAIN_FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Codec:
    """How values are encoded on the wire.

    Attributes:
        format: name of the code, e.g. "int8"; "float32" and "bfloat16" send values instead of codes.
        group_size: elements that share a scale; for any format, shards start at multiples of it.
        scale_dtype: torch.bfloat16 or torch.float32.
        rounding: "nearest" or "stochastic".
    """

    format: str = "int8"
    group_size: int = 128
    scale_dtype: torch.dtype = torch.bfloat16
    rounding: str = "nearest"

    def check(self, op: str) -> None:
        """Raises ValueError, in the name of `op`, for an option that is not supported."""
        if self.format not in PLAIN_FORMATS:
            layout.check_format(op, self.format)
        layout.check_group_size(op, self.group_size)
        layout.check_scale_dtype(op, self.scale_dtype)
        layout.check_rounding(op, self.rounding)

    @property
    def is_plain(self) -> bool:
        """Whether values travel instead of codes."""
        return self.format in PLAIN_FORMATS

    def message(self, numel: int) -> layout.WireLayout:
        """Where codes (or values) and scales lie in the message of a shard of `numel` elements."""
        if self.is_plain:
            codes = numel * PLAIN_FORMATS[self.format].itemsize
            padded = layout.round_up(codes, layout.WIRE_ALIGNMENT)
            return layout.WireLayout(codes, padded, 0, padded)
        return layout.wire_layout(numel, self.format, self.group_size, self.scale_dtype)

    def __str__(self) -> str:
        return (
            f"format={self.format} group_size={self.group_size} "
            f"scale_dtype={self.scale_dtype} rounding={self.rounding}"
        )


@dataclass(frozen=True)
class Shards:
    """The cut of `numel` elements into `world` shards, and a chunk of it: the same stretch of every shard.

    Attributes:
        length: elements of a shard; the last ones may be short or empty.
        first, width: the chunk holds the elements first, ..., first + width - 1 of each shard, as far as it has them.
    """

    numel: int
    world: int
    length: int
    first: int
    width: int

    @classmethod
    def cut(cls, numel: int, world: int, group_size: int) -> Shards:
        """The cut whose shards are whole groups and as equal as that allows, as one chunk."""
        return cls.of_length(numel, world, layout.round_up(-(-numel // world), group_size))

    @classmethod
    def of_length(cls, numel: int, world: int, length: int) -> Shards:
        """The cut into shards of `length` elements, as one chunk."""
        return cls(numel, world, length, 0, length)

    def chunks(self, width: int) -> Iterator[Shards]:
        """The chunks of at most `width` elements a shard; whole groups if `width` is a multiple of their size."""
        for first in range(0, self.length, width):
            yield replace(self, first=first, width=min(width, self.length - first))

    def end(self, rank: int) -> int:
        """Index after the last element of the whole shard that `rank` owns."""
        return min((rank + 1) * self.length, self.numel)

    def start(self, rank: int) -> int:
        """Index of the first element of the chunk that `rank` owns (the shard's end where it is empty)."""
        return min(rank * self.length + self.first, self.end(rank))

    def size(self, rank: int) -> int:
        """Elements in the chunk that `rank` owns."""
        return min(self.width, self.end(rank) - self.start(rank))

    def of(self, flat: Tensor, rank: int) -> Tensor:
        """The view of `flat` [numel] that is the chunk of `rank`: [size]."""
        return flat[self.start(rank) : self.start(rank) + self.size(rank)]


def slot_bytes(shards: Shards, codec: Codec) -> int:
    """Bytes of the slot that holds the message of the chunk of any shard."""
    return codec.message(shards.width).total_bytes


def plain_view(slot: Tensor, numel: int, codec: Codec) -> Tensor:
    """The values in slots [..., slot_bytes] of a plain codec, as a view [..., numel]."""
    return slot[..., : codec.message(numel).codes_bytes].view(PLAIN_FORMATS[codec.format])


def message_views(slot: Tensor, numel: int, codec: Codec) -> tuple[Tensor, Tensor]:
    """(packed, scales) of the messages of `numel` elements in uint8 slots [..., slot_bytes], as views.

    packed is uint8 [..., 1, row_bytes] and scales scale_dtype [..., 1, groups(, 2)], the shapes that the ops use.
    """
    message = codec.message(numel)
    packed = slot[..., : message.codes_bytes].unsqueeze(-2)
    scales = slot[..., message.scales_offset : message.scales_offset + message.scales_bytes]
    shape = layout.scales_shape(1, numel, codec.format, codec.group_size)
    return packed, scales.view(codec.scale_dtype).unflatten(-1, shape)


def clear_padding(slot: Tensor, numel: int, codec: Codec) -> None:
    """Zeroes the bytes of a slot [slot_bytes] that the message of `numel` elements does not use."""
    message = codec.message(numel)
    for start, end in (
        (message.codes_bytes, message.scales_offset),
        (message.scales_offset + message.scales_bytes, slot.numel()),
    ):
        if start < end:
            slot[start:end].zero_()


def encode(
    flat: Tensor, slots: Tensor, shards: Shards, codec: Codec, seed: Tensor | None, base: int = 0
) -> None:
    """Writes the messages of all shards of `flat`.

    Args:
        flat: float [numel], contiguous.
        slots: uint8 [world, slot_bytes], contiguous; slot r receives the shard that rank r owns.
        seed: int64 [1] for stochastic rounding, else None. Elements are counted over the whole of `flat`.
        base: the index of its first element.
    """
    for rank in range(shards.world):
        encode_part(shards.of(flat, rank), slots[rank], codec, seed, base + shards.start(rank))


def encode_part(part: Tensor, slot: Tensor, codec: Codec, seed: Tensor | None, start: int) -> None:
    """Writes the message of `part` [size], whose first element has the index `start`, into a slot."""
    numel = part.numel()
    clear_padding(slot, numel, codec)
    if numel == 0:
        return
    if codec.is_plain:
        plain_view(slot, numel, codec).copy_(part)
        return
    packed, scales = message_views(slot, numel, codec)
    ops.quantize_out(part, packed, scales, codec.format, codec.group_size, codec.rounding, seed, start)


def reduce(
    slots: Tensor,
    out: Tensor,
    shards: Shards,
    rank: int,
    codec: Codec,
    factor: float,
    seed: Tensor | None,
    base: int = 0,
) -> None:
    """Writes the message of factor * (the FP32 sum, in rank order, of what the ranks sent for `rank`'s shard).

    Args:
        slots: uint8 [world, slot_bytes]; slot r is rank r's message for this shard.
        out: uint8 [slot_bytes].
        seed, base: as for `encode`.
    """
    numel, start = shards.size(rank), base + shards.start(rank)
    if codec.is_plain:
        encode_part(reduced_values(slots, numel, codec, factor), out, codec, None, start)
        return
    clear_padding(out, numel, codec)
    if numel:
        packed, scales = message_views(slots, numel, codec)
        out_packed, out_scales = message_views(out, numel, codec)
        ops.reduce_quantize_out(
            packed,
            scales,
            numel,
            codec.format,
            codec.group_size,
            factor,
            out_packed,
            out_scales,
            codec.rounding,
            seed,
            start,
        )


def reduced_values(
    slots: Tensor, numel: int, codec: Codec, factor: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """factor * (the FP32 sum, in rank order, of the messages of `numel` elements in `slots`): `dtype` [numel]."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device=slots.device)
    if codec.is_plain:
        values = plain_view(slots, numel, codec)
        total = values[0].to(torch.float32, copy=True)
        for value in values[1:]:
            total += value
        return total.mul_(factor).to(dtype)
    packed, scales = message_views(slots, numel, codec)
    return ops.reduce(packed, scales, numel, codec.format, codec.group_size, factor, dtype).view(-1)


def decode(slots: Tensor, flat: Tensor, shards: Shards, codec: Codec) -> None:
    """Writes the values of the messages of all shards, uint8 [world, slot_bytes], into `flat` [numel]."""
    for rank in range(shards.world):
        decode_part(slots[rank], shards.of(flat, rank), codec)


def decode_part(slot: Tensor, part: Tensor, codec: Codec) -> None:
    """Writes the values of the message in a slot into `part` [size], contiguous."""
    if part.numel() == 0:
        return
    if codec.is_plain:
        # Through saturation, as codes decode: a finite value stays finite in a narrower dtype.
        part.copy_(saturated(plain_view(slot, part.numel(), codec), part.dtype))
        return
    packed, scales = message_views(slot, part.numel(), codec)
    ops.dequantize_out(packed, scales, part.unsqueeze(0), codec.format, codec.group_size)


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` with the finite ones clamped to the range of `dtype`; NaN and Inf stay."""
    limit = torch.finfo(dtype).max
    if torch.finfo(values.dtype).max <= limit:
        return values
    return torch.where(values.isinf(), values, values.clamp(-limit, limit))


def mix_seed(seed: Tensor, *words: int) -> Tensor:
    """Another 64-bit seed for each sequence of words (rank, phase, call number): int64 [1] -> int64 [1].

    For each word w in turn: seed <- mix(seed + (w + 1) * 0x9E3779B97F4A7C15 mod 2^64), where mix is the finalizer
    of splitmix64 (shift 30, multiply by 0xBF58476D1CE4E5B9, shift 27, multiply by 0x94D049BB133111EB, shift 31).
    Tensor arithmetic, so that a seed on a device stays there.
    """
    for word in words:
        z = seed + _signed((word + 1) * _GOLDEN)
        z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
        z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
        seed = z ^ _shift_right(z, 31)
    return seed


def _signed(value: int) -> int:
    """`value` modulo 2^64 as the int64 with the same bits."""
    value &= _MASK64
    return value - 2**64 if value >= 2**63 else value


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 seen as uint64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
