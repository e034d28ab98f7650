"""Messages: a flat tensor cut into shards, each encoded, reduced and decoded. No communication happens here.

A flat tensor of `numel` elements is cut into `world` shards, one owned by each rank. Every shard starts on a
group boundary, so no group crosses ranks. A shard travels as one message, its codes and then its scales
(docs/formats.md, "Wire"), in a slot as long as the message of a full shard, so that all slots are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import layout, ops

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Codec:
    """How values are encoded on the wire.

    Attributes:
        format: name of the code, e.g. "int8".
        group_size: elements that share a scale.
        scale_dtype: torch.bfloat16 or torch.float32.
        rounding: "nearest" or "stochastic".
    """

    format: str = "int8"
    group_size: int = 128
    scale_dtype: torch.dtype = torch.bfloat16
    rounding: str = "nearest"

    def check(self, op: str) -> None:
        """Raises ValueError, in the name of `op`, for an option that is not supported."""
        layout.check_format(op, self.format)
        layout.check_group_size(op, self.group_size)
        layout.check_scale_dtype(op, self.scale_dtype)
        layout.check_rounding(op, self.rounding)

    def message(self, numel: int) -> layout.WireLayout:
        """Where codes and scales lie in the message of a shard of `numel` elements."""
        return layout.wire_layout(numel, self.format, self.group_size, self.scale_dtype)

    def __str__(self) -> str:
        return (
            f"format={self.format} group_size={self.group_size} "
            f"scale_dtype={self.scale_dtype} rounding={self.rounding}"
        )


@dataclass(frozen=True)
class Shards:
    """The cut of `numel` elements into `world` shards of `length` elements; the last ones may be short or empty."""

    numel: int
    world: int
    length: int

    @classmethod
    def cut(cls, numel: int, world: int, group_size: int) -> Shards:
        """The cut whose shards are whole groups and as equal as that allows."""
        return cls(numel, world, layout.round_up(-(-numel // world), group_size))

    def start(self, rank: int) -> int:
        """Index of the first element of the shard that `rank` owns (`numel` where it is empty)."""
        return min(rank * self.length, self.numel)

    def size(self, rank: int) -> int:
        """Elements in the shard that `rank` owns."""
        return min(self.length, self.numel - self.start(rank))

    def of(self, flat: Tensor, rank: int) -> Tensor:
        """The view of `flat` [numel] that is the shard of `rank`: [size]."""
        return flat[self.start(rank) : self.start(rank) + self.size(rank)]


def slot_bytes(shards: Shards, codec: Codec) -> int:
    """Bytes of the slot that holds the message of any shard."""
    return codec.message(shards.length).total_bytes


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


def encode(flat: Tensor, slots: Tensor, shards: Shards, codec: Codec, seed: Tensor | None) -> None:
    """Writes the messages of all shards of `flat`.

    Args:
        flat: float [numel], contiguous.
        slots: uint8 [world, slot_bytes], contiguous; slot r receives the shard that rank r owns.
        seed: int64 [1] for stochastic rounding, else None. Elements are counted over the whole of `flat`.
    """
    for rank in range(shards.world):
        clear_padding(slots[rank], shards.size(rank), codec)
        if shards.size(rank):
            packed, scales = message_views(slots[rank], shards.size(rank), codec)
            part = shards.of(flat, rank)
            ops.quantize_out(
                part, packed, scales, codec.format, codec.group_size, codec.rounding, seed, shards.start(rank)
            )


def reduce(
    slots: Tensor, out: Tensor, shards: Shards, rank: int, codec: Codec, factor: float, seed: Tensor | None
) -> None:
    """Writes the message of factor * (the FP32 sum, in rank order, of what the ranks sent for `rank`'s shard).

    Args:
        slots: uint8 [world, slot_bytes]; slot r is rank r's message for this shard.
        out: uint8 [slot_bytes].
        seed: as for `encode`.
    """
    numel = shards.size(rank)
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
            shards.start(rank),
        )


def decode(slots: Tensor, flat: Tensor, shards: Shards, codec: Codec) -> None:
    """Writes the values of the messages of all shards, uint8 [world, slot_bytes], into `flat` [numel]."""
    for rank in range(shards.world):
        if shards.size(rank):
            packed, scales = message_views(slots[rank], shards.size(rank), codec)
            part = shards.of(flat, rank).unsqueeze(0)
            ops.dequantize_out(packed, scales, part, codec.format, codec.group_size)


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
