"""The collectives: what each takes, checks and computes."""

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
from .wire import Codec, Shards
from .work import Work

OPS = ("avg", "sum")
# Tensors of fewer elements are not quantized unless asked: the message would be no faster.
MIN_NUMEL = 1024

# Words that set the noise of the two encodings of an exchange apart (docs/formats.md, "Seeds").
PHASE_SEND = 0
PHASE_REDUCED = 1


class _Call:
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
        sizes = f"numel={numels[0]}" if len(numels) == 1 else _sizes(numels)
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


def all_reduce(
    tensor: Tensor | Sequence[Tensor],
    op: str = "avg",
    group: dist.ProcessGroup | TwoLevel | None = None,
    format: str = "int8",
    group_size: int = 128,
    scale_dtype: torch.dtype = torch.bfloat16,
    rounding: str = "nearest",
    seed: int | Tensor | None = None,
    async_op: bool = False,
    *,
    factor: float = 1.0,
    min_numel: int = MIN_NUMEL,
    feedback: ErrorFeedback | None = None,
) -> Work | None:
    """Replaces `tensor` on every rank by the mean or sum over all ranks, exchanged in a quantized format.

    Codes go to the owners of the shards, are summed there in FP32 in rank order, and the encoded result is
    gathered (AGoQ, arXiv 2605.00539, QuanGrad). All ranks, owners included, decode what was gathered, so all end
    with identical bits. With one rank nothing is exchanged or quantized.

    The call is a collective: every rank makes its calls on a group in the same order, with the same numbers of
    elements and the same options. The first call of a kind compares them. Ranks may differ in the tensors' dtypes,
    shapes and strides; elements are numbered in row-major order.

    Args:
        tensor: float32, float16 or bfloat16, any shape and strides, or a sequence of such on one device; changed in
            place. Not to be touched before an asynchronous call is over. Small ones of a sequence travel packed.
        op: "avg" (the FP32 sum times 1/world) or "sum".
        group: the process group, or a `TwoLevel`; None is the default group.
        format, group_size, scale_dtype, rounding: as for `agoq_ext.quantize`; "float32" and "bfloat16" are formats
            too, that send values instead of codes.
        seed: for stochastic rounding: an int, an int64 tensor of one element on the tensor's device, or None to
            draw one from torch's generator. Rank and phase are mixed into it.
        async_op: return a Work at once instead of waiting.
        factor: multiplies the FP32 sum, together with op's own factor, before it is rounded.
        min_numel: tensors of fewer elements travel as float32.
        feedback: keeps what the encodings lose and adds it to the next call with the same object.

    Returns:
        None, or a Work if `async_op`.

    Raises:
        ValueError, TypeError: an argument is not one of the above. Nothing has been sent.
        Disagreement: the ranks do not make the same call. (From `wait()` if `async_op`, as the next.)
        RuntimeError: a peer has died, or has not answered within the group's timeout. Of a tensor of more than
            `pipeline.CHUNK_ELEMENTS` some chunks may hold the result already.
    """
    name = "all_reduce"
    tensors = _as_list(name, "tensor", tensor)
    codec = Codec(format, group_size, scale_dtype, rounding)
    call = _Call(name, tensors, group, codec, seed, op, factor, min_numel, feedback)
    if call.world == 1 or not tensors:
        if factor != 1.0:
            for each in tensors:
                each.detach().mul_(factor)
        return _finished(name, tensors) if async_op else None
    return call.run(partial(_all_reduce_jobs, call, call.deal(tensors)), tensors, async_op)


def _all_reduce_jobs(call: _Call, dealt: list[Segment], transports: Sequence[Transport]) -> Iterator[Job]:
    first, outer, size = transports[0], transports[-1], call.codec.group_size
    for segment in dealt:
        flat = segment.load()
        cut = Shards.cut(segment.numel, first.world, size)
        own = cut.size(first.rank)
        two = call.inner_codec is not None
        rank = outer.rank * first.world + first.rank if two else first.rank
        exchange = call.exchange(segment, rank, own if two else segment.numel, own)
        inside = call.inner_codec if not segment.codec.is_plain else segment.codec
        chunks = list(cut.chunks(pipeline.chunk_width(first.world, size)))
        for chunk in chunks:
            if inside is None or not two:
                job = pipeline.all_reduce_chunk(first, flat, chunk, exchange)
            else:
                job = pipeline.two_level_chunk(first, outer, flat, chunk, inside, exchange)
            yield _then_store(job, segment, flat) if chunk is chunks[-1] else job


def _then_store(job: Job, segment: Segment, flat: Tensor) -> Job:
    yield from job
    segment.store(flat)


def reduce_scatter(
    output: Tensor | Sequence[Tensor],
    input: Tensor | Sequence[Tensor],
    op: str = "avg",
    group: dist.ProcessGroup | None = None,
    format: str = "int8",
    group_size: int = 128,
    scale_dtype: torch.dtype = torch.bfloat16,
    rounding: str = "nearest",
    seed: int | Tensor | None = None,
    async_op: bool = False,
    *,
    factor: float = 1.0,
    min_numel: int = MIN_NUMEL,
    feedback: ErrorFeedback | None = None,
) -> Work | None:
    """Writes this rank's share of the mean or sum of `input` over all ranks into `output`.

    Each rank encodes a message for each other; the receiver sums in FP32, in rank order, and rounds to the dtype of
    `output`: one encoding, where `all_reduce` has two.

    Args:
        output: any shape and strides, n elements; or a sequence. float32, float16 or bfloat16.
        input: world x n elements, the r-th n of them for rank r; or a sequence, one for each output. May overlap
            `output` only in a synchronous call on a group of one.
        min_numel: tensors whose output has fewer elements travel as float32.
        others: as for `all_reduce`.

    Returns, Raises: as for `all_reduce`.
    """
    name = "reduce_scatter"
    outputs, inputs = _as_list(name, "output", output), _as_list(name, "input", input, written=False)
    codec = Codec(format, group_size, scale_dtype, rounding)
    call = _Call(name, [*outputs, *inputs], group, codec, seed, op, factor, min_numel, feedback)
    _check_pairs(name, "input", inputs, "output", outputs, call.world)
    if call.world == 1 or not outputs:
        for out, each in zip(outputs, inputs, strict=True):
            out.detach().copy_((each.detach() * factor).view(out.shape))
        return _finished(name, outputs) if async_op else None
    jobs = partial(_reduce_scatter_jobs, call, call.deal(outputs), _by_id(outputs, inputs))
    return call.run(jobs, outputs, async_op)


def _reduce_scatter_jobs(
    call: _Call, dealt: list[Segment], inputs: dict[int, Tensor], transports: Sequence[Transport]
) -> Iterator[Job]:
    (transport,), size = transports, call.codec.group_size
    world = transport.world
    for segment in dealt:
        own = [inputs[id(out)] for out in segment.tensors]
        flat = _gathered_view(own[0]) if len(own) == 1 else _interleave(segment, own, world)
        out = segment.tensors[0].detach()
        share = out.view(-1) if len(own) == 1 and out.is_contiguous() else out.new_empty(segment.numel)
        if len(own) > 1:
            share = share.float()
        exchange = call.exchange(segment, transport.rank, flat.numel(), 0)
        cut = Shards.of_length(flat.numel(), world, segment.numel)
        chunks = list(cut.chunks(pipeline.chunk_width(world, size)))
        for chunk in chunks:
            job = pipeline.reduce_scatter_chunk(transport, flat, share, chunk, exchange)
            yield _then_store(job, segment, share) if chunk is chunks[-1] else job


def all_gather(
    output: Tensor | Sequence[Tensor],
    input: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    format: str = "int8",
    group_size: int = 128,
    scale_dtype: torch.dtype = torch.bfloat16,
    rounding: str = "nearest",
    seed: int | Tensor | None = None,
    async_op: bool = False,
    *,
    min_numel: int = MIN_NUMEL,
    feedback: ErrorFeedback | None = None,
) -> Work | None:
    """Writes the inputs of all ranks, in rank order, into `output` on every rank, exchanged in a quantized format.

    Every rank, for its own part too, decodes what was sent, so all end with identical bits.

    Args:
        output: world x n elements, any shape and strides; or a sequence. float32, float16 or bfloat16.
        input: n elements; or a sequence, one for each output.
        min_numel: inputs of fewer elements travel as float32.
        others: as for `all_reduce`.

    Returns, Raises: as for `all_reduce`.
    """
    name = "all_gather"
    outputs, inputs = _as_list(name, "output", output), _as_list(name, "input", input, written=False)
    codec = Codec(format, group_size, scale_dtype, rounding)
    call = _Call(name, [*outputs, *inputs], group, codec, seed, min_numel=min_numel, feedback=feedback)
    _check_pairs(name, "output", outputs, "input", inputs, call.world)
    if call.world == 1 or not outputs:
        for out, each in zip(outputs, inputs, strict=True):
            out.detach().copy_(each.detach().view(out.shape))
        return _finished(name, outputs) if async_op else None
    jobs = partial(_all_gather_jobs, call, call.deal(inputs), _by_id(inputs, outputs))
    return call.run(jobs, outputs, async_op)


def _all_gather_jobs(
    call: _Call, dealt: list[Segment], outputs: dict[int, Tensor], transports: Sequence[Transport]
) -> Iterator[Job]:
    (transport,), size = transports, call.codec.group_size
    world = transport.world
    for segment in dealt:
        own = [outputs[id(part)] for part in segment.tensors]
        part = segment.load()
        direct = len(own) == 1 and own[0].is_contiguous()
        flat = own[0].detach().view(-1) if direct else torch.empty(world * segment.numel, device=part.device)
        exchange = call.exchange(segment, transport.rank, segment.numel, 0)
        cut = Shards.of_length(flat.numel(), world, segment.numel)
        chunks = list(cut.chunks(pipeline.chunk_width(world, size)))
        for chunk in chunks:
            job = pipeline.all_gather_chunk(transport, part, flat, chunk, exchange)
            yield _then_spread(job, segment, own, flat) if chunk is chunks[-1] and not direct else job


def _then_spread(job: Job, segment: Segment, outputs: list[Tensor], flat: Tensor) -> Job:
    yield from job
    rows = flat.view(-1, segment.numel)
    for out, part, offset in zip(outputs, segment.tensors, segment.offsets, strict=True):
        values = rows[:, offset : offset + part.numel()].reshape(out.shape)
        out.detach().copy_(wire.saturated(values, out.dtype))


def _gathered_view(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1)


def _interleave(segment: Segment, inputs: list[Tensor], world: int) -> Tensor:
    """[world x segment.numel]: for each rank, its share of every input at the segment's offsets."""
    rows = torch.zeros(world, segment.numel, device=inputs[0].device)
    for tensor, offset in zip(inputs, segment.offsets, strict=True):
        share = tensor.numel() // world
        rows[:, offset : offset + share] = tensor.detach().reshape(world, share)
    return rows.view(-1)


def setup(
    group: dist.ProcessGroup | TwoLevel | None = None,
    format: str = "int8",
    group_size: int = 128,
    scale_dtype: torch.dtype = torch.bfloat16,
    rounding: str = "nearest",
    device: torch.device | str = "cpu",
) -> None:
    """Connects the ranks of a group for tensors of `device` and compares version and options. Optional.

    The first collective on a group does this by itself. Calling it apart puts the cost, and the error if ranks
    disagree, in a place of one's choosing. A collective: all ranks of the group call it.

    Raises:
        ValueError, TypeError: an argument is not one that `all_reduce` takes.
        Disagreement, RuntimeError: as for `all_reduce`.
    """
    codec = Codec(format, group_size, scale_dtype, rounding)
    call = _Call("setup", [torch.empty(0, device=device)], group, codec, 0)
    if call.world > 1:
        call.run(partial(_no_jobs), call.tensors, False)


def _no_jobs(transports: Sequence[Transport]) -> Iterator[Job]:
    return iter(())


def _finished(name: str, tensors: list[Tensor]) -> Work:
    work = Work(name, tensors)
    work.finish()
    return work


def _by_id(keys: list[Tensor], values: list[Tensor]) -> dict[int, Tensor]:
    return {id(key): value for key, value in zip(keys, values, strict=True)}


def _sizes(numels: list[int]) -> str:
    total = zlib.crc32(",".join(map(str, numels)).encode())
    return f"tensors={len(numels)} numel={sum(numels)} sizes_crc32={total:08x}"


def _check_pairs(
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


def _as_list(
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
