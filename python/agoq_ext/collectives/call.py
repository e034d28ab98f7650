"""One call of a collective: its arguments checked, and what they say of everything that it sends."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .. import layout, ops
from . import pipeline, segments, wire
from .channel import Channel, channel_of, resolve_group
from .feedback import ErrorFeedback
from .pipeline import Exchange, Job
from .segments import Segment
from .transport import Transport
from .two_level import TwoLevel
from .wire import Codec
from .work import Work

OPS = ("avg", "sum")

# Words that set the noise of the two encodings of an exchange apart (docs/formats.md, "Seeds").
PHASE_SEND = 0
PHASE_REDUCED = 1


class Call:
    """One call of a collective: its checked arguments, and what they say of every segment."""

    def __init__(
        self,
        name: str,
        tensors: list[Tensor],
        group: dist.ProcessGroup | TwoLevel | None,
        codec: Codec,
        seed: int | Tensor | None,
        op: str = "sum",
        factor: float = 1.0,
        min_numel: int = 0,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        self.name, self.tensors, self.codec, self.feedback = name, tensors, codec, feedback
        codec.check(name)
        if op not in OPS:
            raise ValueError(f"{name}: op must be 'avg' or 'sum'; got {op!r}")
        if not math.isfinite(factor):
            raise ValueError(f"{name}: factor must be finite; got {factor}")
        if min_numel < 0:
            raise ValueError(f"{name}: min_numel must not be negative; got {min_numel}")
        if len({tensor.device for tensor in tensors}) > 1:
            devices = sorted({str(tensor.device) for tensor in tensors})
            raise ValueError(f"{name}: tensors must be on one device; got {', '.join(devices)}")
        self.min_numel = min_numel
        if isinstance(seed, Tensor):
            seed = seed.clone()  # its owner may change it before the exchange ends
        self.seed = None if not tensors else ops.seed_tensor(name, codec.rounding, seed, tensors[0].device)
        self.inner_codec: Codec | None = None
        self.groups: Sequence[dist.ProcessGroup]
        self.channel: Channel
        if isinstance(group, TwoLevel):
            self.inner_codec = Codec(group.inner_format, codec.group_size, codec.scale_dtype, codec.rounding)
            self.groups, self.channel, self.world = group.groups, group.channel(), group.world
        else:
            group = resolve_group(name, group)
            self.groups, self.channel, self.world = [group], channel_of(group), group.size()
        self.factor = factor / self.world if op == "avg" else factor
        numels = [tensor.numel() for tensor in tensors]
        sizes = f"numel={numels[0]}" if len(numels) == 1 else sizes_record(numels)
        inside = "" if self.inner_codec is None else f"inside={self.inner_codec.format} "
        self.record = (
            f"{name} op={op} {sizes} {inside}{codec} factor={factor:g} min_numel={min_numel} "
            f"feedback={feedback is not None}"
        )

    def deal(self, tensors: Sequence[Tensor]) -> list[Segment]:
        return segments.deal(tensors, self.codec, self.min_numel)

    def exchange(self, segment: Segment, rank: int, sent: int, owned: int) -> Exchange:
        """How `segment` travels; `sent` and `owned` are the elements that this rank encodes of it."""
        codec = segment.codec
        seeds: list[Tensor | None] = [None, None]
        if self.seed is not None:
            for phase in (PHASE_SEND, PHASE_REDUCED):
                words = (rank, phase) if segment.index == 0 else (rank, phase, segment.index)
                seeds[phase] = wire.mix_seed(self.seed, *words)
        residuals = None
        if self.feedback is not None and not codec.is_plain:
            key = f"{self.name}/{segment.index}/{segment.numel}"
            residuals = self.feedback.of(key, rank, sent, owned, segment.tensors[0].device)
        return Exchange(codec, self.factor, seeds[PHASE_SEND], seeds[PHASE_REDUCED], residuals)

    def run(self, jobs: partial[Iterator[Job]], written: list[Tensor], async_op: bool) -> Work | None:
        """Exchanges what `jobs(transports)` say; it writes `written`."""
        for tensor in written:
            if not tensor.is_inference():
                # Not all writers mark the version; autograd must learn that a tensor it saved is overwritten.
                torch.autograd.graph.increment_version(tensor)

        def body(*transports: Transport) -> None:
            self.channel.agree(transports, self.name, self.record)
            pipeline.run(jobs(transports))

        others = [t for t in self.tensors if all(t is not w for w in written)]
        inputs = others if self.seed is None else [*others, self.seed]
        if async_op:
            return self.channel.run(self.name, body, written, self.groups, inputs)
        self.channel.run_now(self.name, body, written, self.groups, inputs)
        return None


def sizes_record(numels: list[int]) -> str:
    total = zlib.crc32(",".join(map(str, numels)).encode())
    return f"tensors={len(numels)} numel={sum(numels)} sizes_crc32={total:08x}"


def check_pairs(
    op: str, large: str, larges: list[Tensor], small: str, smalls: list[Tensor], world: int
) -> None:
    if len(larges) != len(smalls):
        raise ValueError(
            f"{op}: {large} must have as many tensors as {small}, {len(smalls)}; got {len(larges)}"
        )
    for many, one in zip(larges, smalls, strict=True):
        if many.numel() != world * one.numel():
            raise ValueError(
                f"{op}: {large} must have world x {small} = {world} x {one.numel()} elements; got {many.numel()}"
            )


def as_list(
    op: str, argument: str, tensor: Tensor | Sequence[Tensor], *, written: bool = True
) -> list[Tensor]:
    """The tensor, or those of a sequence, checked."""
    if (
        not isinstance(tensor, Tensor)
        and isinstance(tensor, Sequence)
        and all(isinstance(each, Tensor) for each in tensor)
    ):
        tensors = list(tensor)
        if len({id(each) for each in tensors}) < len(tensors):
            raise ValueError(f"{op}: {argument} must not hold a tensor twice")
    else:
        tensors = [tensor]  # type: ignore[list-item]
    for each in tensors:
        _check_tensor(op, argument, each, written)
    return tensors


def _check_tensor(op: str, argument: str, tensor: Tensor, written: bool) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {argument} must be a torch.Tensor; got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{op}: {argument} must be a dense (strided) tensor; got layout {tensor.layout}")
    layout.check_float_dtype(op, tensor.dtype, argument=f"{argument}'s dtype")
    if written and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ValueError(
            f"{op}: {argument} must not overlap itself, since it is written in place; got shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}"
        )
