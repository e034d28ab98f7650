"""Segments: the flat tensors that a call on one tensor or a list is carried out on.

Tensors are dealt to segments by their sizes alone, so that all ranks cut alike. Large ones are a segment each, and are
exchanged where they lie if they are contiguous. Small ones are packed, each on a group boundary, so that a list of
thousands costs few messages. Those below the caller's threshold are packed apart and travel as float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .. import layout
from . import wire
from .wire import Codec

# Tensors with fewer elements are packed, into segments of at most PACK_ELEMENTS.
SMALL_ELEMENTS = 2**17
PACK_ELEMENTS = 2**20


@dataclass
class Segment:
    """Some tensors as one flat tensor.

    Attributes:
        index: number in the call.
        codec: how it travels.
        tensors: whose elements it holds, in order.
        offsets: index of each tensor's first element.
        numel: elements, padding between tensors included.
    """

    index: int
    codec: Codec
    tensors: list[Tensor] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    numel: int = 0

    def add(self, tensor: Tensor) -> None:
        """Appends a tensor, on a group boundary."""
        self.offsets.append(layout.round_up(self.numel, self.codec.group_size))
        self.tensors.append(tensor)
        self.numel = self.offsets[-1] + tensor.numel()

    def load(self) -> Tensor:
        """The elements, contiguous [numel]: the tensor's own memory where it is one and contiguous, else a copy."""
        if len(self.tensors) == 1:
            return self.tensors[0].detach().contiguous().view(-1)
        first = self.tensors[0]
        dtypes = {tensor.dtype for tensor in self.tensors}
        flat = first.new_zeros(self.numel, dtype=first.dtype if len(dtypes) == 1 else torch.float32)
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            flat[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor.detach())
        return flat

    def store(self, flat: Tensor) -> None:
        """Writes the elements of `flat` into the tensors, unless it is their own memory."""
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            values = flat[offset : offset + tensor.numel()].view(tensor.shape)
            if values.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
                tensor.detach().copy_(wire.saturated(values, tensor.dtype))


def deal(tensors: Sequence[Tensor], codec: Codec, min_numel: int) -> list[Segment]:
    """The segments of a call on `tensors`; those of fewer than `min_numel` elements are not quantized."""
    plain = replace(codec, format="float32", rounding="nearest")
    segments: list[Segment] = []
    open_packs: dict[str, Segment] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        own = plain if tensor.numel() < min_numel else codec
        if len(tensors) == 1 or tensor.numel() >= SMALL_ELEMENTS:
            segments.append(Segment(len(segments), own))
            segments[-1].add(tensor)
            continue
        pack = open_packs.get(own.format)
        if pack is None or pack.numel + tensor.numel() > PACK_ELEMENTS:
            pack = open_packs[own.format] = Segment(len(segments), own)
            segments.append(pack)
        pack.add(tensor)
    return segments
