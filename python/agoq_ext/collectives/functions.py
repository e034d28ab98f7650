"""The collectives: what each takes, checks and computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import pipeline, wire
from .call import Call, as_list, check_pairs
from .feedback import ErrorFeedback
from .pipeline import Job
from .segments import Segment
from .transport import Transport
from .two_level import TwoLevel
from .wire import Codec, Shards
from .work import Work

# Tensors of fewer elements are not quantized unless asked: the message would be no faster.
MIN_NUMEL = 1024


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
            one chunk (docs/collectives.md) some chunks may hold the result already.
    """
    name = "all_reduce"
    tensors = as_list(name, "tensor", tensor)
    codec = Codec(format, group_size, scale_dtype, rounding)
    call = Call(name, tensors, group, codec, seed, op, factor, min_numel, feedback)
    if call.world == 1 or not tensors:
        if factor != 1.0:
            for each in tensors:
                each.detach().mul_(factor)
        return _finished(name, tensors) if async_op else None
    return call.run(partial(_all_reduce_jobs, call, call.deal(tensors)), tensors, async_op)


def _all_reduce_jobs(call: Call, dealt: list[Segment], transports: Sequence[Transport]) -> Iterator[Job]:
    first, outer, size = transports[0], transports[-1], call.codec.group_size
    for segment in dealt:
        flat = segment.load()
        cut = Shards.cut(segment.numel, first.world, size)
        own = cut.size(first.rank)
        two = call.inner_codec is not None
        rank = outer.rank * first.world + first.rank if two else first.rank
        exchange = call.exchange(segment, rank, own if two else segment.numel, own)
        inside = call.inner_codec if not segment.codec.is_plain else segment.codec
        chunks = list(cut.chunks(pipeline.chunk_width(first.world, segment.codec)))
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
    """Writes this rank's share of the mean or sum of `input` over all ranks into `output`.

    Each rank encodes a message for each other; the receiver sums in FP32, in rank order, and rounds to the dtype of
    `output`: one encoding, where `all_reduce` has two.

    Args:
        output: any shape and strides, n elements; or a sequence. float32, float16 or bfloat16.
        input: world x n elements, the r-th n of them for rank r; or a sequence, one for each output. May overlap
            `output` only in a synchronous call on a group of one.
        group: of a `TwoLevel`, rank r is the place r % R in node r // R, for nodes of R ranks; not with `async_op`.
        min_numel: tensors whose output has fewer elements travel as float32.
        others: as for `all_reduce`.

    Returns, Raises: as for `all_reduce`.
    """
    name = "reduce_scatter"
    outputs, inputs = as_list(name, "output", output), as_list(name, "input", input, written=False)
    codec = Codec(format, group_size, scale_dtype, rounding)
    call = Call(name, [*outputs, *inputs], group, codec, seed, op, factor, min_numel, feedback)
    check_pairs(name, "input", inputs, "output", outputs, call.world)
    if isinstance(group, TwoLevel):
        _check_synchronous(name, async_op)
        _two_level_reduce_scatter(call, group, outputs, inputs, seed)
        return None
    if call.world == 1 or not outputs:
        for out, each in zip(outputs, inputs, strict=True):
            out.detach().copy_((each.detach() * factor).view(out.shape))
        return _finished(name, outputs) if async_op else None
    jobs = partial(_reduce_scatter_jobs, call, call.deal(outputs), _by_id(outputs, inputs))
    return call.run(jobs, outputs, async_op)


def _reduce_scatter_jobs(
    call: Call, dealt: list[Segment], inputs: dict[int, Tensor], transports: Sequence[Transport]
) -> Iterator[Job]:
    (transport,) = transports
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
        chunks = list(cut.chunks(pipeline.chunk_width(world, segment.codec)))
        for chunk in chunks:
            job = pipeline.reduce_scatter_chunk(transport, flat, share, chunk, exchange)
            yield _then_store(job, segment, share) if chunk is chunks[-1] else job


def all_gather(
    output: Tensor | Sequence[Tensor],
    input: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup | TwoLevel | None = None,
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
        group: as for `reduce_scatter`.
        min_numel: inputs of fewer elements travel as float32.
        others: as for `all_reduce`.

    Returns, Raises: as for `all_reduce`.
    """
    name = "all_gather"
    outputs, inputs = as_list(name, "output", output), as_list(name, "input", input, written=False)
    codec = Codec(format, group_size, scale_dtype, rounding)
    call = Call(name, [*outputs, *inputs], group, codec, seed, min_numel=min_numel, feedback=feedback)
    check_pairs(name, "output", outputs, "input", inputs, call.world)
    if isinstance(group, TwoLevel):
        _check_synchronous(name, async_op)
        _two_level_all_gather(call, group, outputs, inputs, seed)
        return None
    if call.world == 1 or not outputs:
        for out, each in zip(outputs, inputs, strict=True):
            out.detach().copy_(each.detach().view(out.shape))
        return _finished(name, outputs) if async_op else None
    jobs = partial(_all_gather_jobs, call, call.deal(inputs), _by_id(inputs, outputs))
    return call.run(jobs, outputs, async_op)


def _all_gather_jobs(
    call: Call, dealt: list[Segment], outputs: dict[int, Tensor], transports: Sequence[Transport]
) -> Iterator[Job]:
    (transport,) = transports
    world = transport.world
    for segment in dealt:
        own = [outputs[id(part)] for part in segment.tensors]
        part = segment.load()
        direct = len(own) == 1 and own[0].is_contiguous()
        flat = own[0].detach().view(-1) if direct else torch.empty(world * segment.numel, device=part.device)
        exchange = call.exchange(segment, transport.rank, segment.numel, 0)
        cut = Shards.of_length(flat.numel(), world, segment.numel)
        chunks = list(cut.chunks(pipeline.chunk_width(world, segment.codec)))
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


def _two_level_reduce_scatter(
    call: Call, group: TwoLevel, outputs: list[Tensor], inputs: list[Tensor], seed: int | Tensor | None
) -> None:
    """One call inside the node, which sums what each of its ranks owns for all nodes, and one between nodes."""
    nodes, ranks = group.outer.size(), group.inner.size()
    by_place = [each.detach().reshape(nodes, ranks, -1).transpose(0, 1) for each in inputs]
    sums = [torch.empty(nodes, each.shape[2], device=each.device) for each in by_place]
    reduce_scatter(sums, by_place, "sum", group.inner, **_inside_node(call, group))
    reduce_scatter(outputs, sums, "sum", group.outer, factor=call.factor, **_between_nodes(call, group, seed))


def _two_level_all_gather(
    call: Call, group: TwoLevel, outputs: list[Tensor], inputs: list[Tensor], seed: int | Tensor | None
) -> None:
    """One call between nodes, and one inside, which hands on what was decoded."""
    nodes, ranks = group.outer.size(), group.inner.size()
    mine = [torch.empty(nodes, each.numel(), device=each.device) for each in inputs]
    all_gather(mine, inputs, group.outer, **_between_nodes(call, group, seed))
    by_place = [torch.empty(ranks, *each.shape, device=each.device) for each in mine]
    all_gather(by_place, mine, group.inner, **_inside_node(call, group))
    for out, values in zip(outputs, by_place, strict=True):
        out.detach().copy_(wire.saturated(values.transpose(0, 1).reshape(out.shape), out.dtype))


def _inside_node(call: Call, group: TwoLevel) -> dict[str, Any]:
    # Values that are not encoded between nodes are not encoded inside them either.
    codec = call.codec if call.codec.is_plain else replace(call.codec, format=group.inner_format)
    return {**vars(codec), "rounding": "nearest", "min_numel": call.min_numel}


def _between_nodes(call: Call, group: TwoLevel, seed: int | Tensor | None) -> dict[str, Any]:
    if (
        call.seed is not None
    ):  # ranks of a node have the same rank between nodes, and shall not share their noise
        seed = wire.mix_seed(call.seed, group.inner.rank())
    return {**vars(call.codec), "seed": seed, "min_numel": call.min_numel, "feedback": call.feedback}


def _check_synchronous(op: str, async_op: bool) -> None:
    if async_op:
        raise ValueError(f"{op}: async_op must be False for a TwoLevel; got True")


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
    call = Call("setup", [torch.empty(0, device=device)], group, codec, 0)
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
