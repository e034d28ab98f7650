"""Chunks in flight: what is done to each chunk of an exchange, and how the chunks overlap.

A job is a generator that encodes a chunk, issues an exchange, yields it, and goes on once it is over. `run` starts
a job, then lets each older one take a step, so that a chunk is encoded or summed while others are on the wire. The
order of all steps is fixed, never by timing, so that every rank issues its exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import layout
from . import feedback, wire
from .transport import Pending, Transport
from .wire import Codec, Shards

# Elements of a chunk, all shards together, of less than 8 bits each; half as many of longer ones. So messages have
# about half a megabyte: on slow links longer ones were up to 4 % slower, on fast ones shorter ones are. A multiple of
# every group size.
CHUNK_ELEMENTS = 2**20
# Chunks that are issued after a chunk before its exchange is waited for. Two keep the wire busy through the time that a
# busy machine takes to wake a thread; 2 LAG + 1 chunks are in flight at most.
LAG = 2

Job = Generator[Pending, None, None]


@dataclass(frozen=True)
class Exchange:
    """What all chunks of one flat tensor share.

    Attributes:
        codec: how values travel.
        factor: multiplies the FP32 sum, once.
        send_seed, reduced_seed: int64 [1] of the two encodings, for stochastic rounding; else None.
        residuals: what earlier exchanges have left over, if errors are fed back.
    """

    codec: Codec
    factor: float = 1.0
    send_seed: Tensor | None = None
    reduced_seed: Tensor | None = None
    residuals: feedback.Residuals | None = None


def chunk_width(world: int, codec: Codec) -> int:
    """Elements of one shard in a chunk: whole groups."""
    long = codec.is_plain or layout.FORMATS[codec.format].bits >= 8
    elements = CHUNK_ELEMENTS // 2 if long else CHUNK_ELEMENTS
    return max(elements // world // codec.group_size, 1) * codec.group_size


def run(jobs: Iterable[Job]) -> None:
    """Runs the jobs, overlapping them, in an order that depends on nothing but the jobs."""
    flying: list[_Flight] = []  # newest first
    for job in jobs:
        first = next(job, None)
        flying = _round(flying)
        if first is not None:
            flying.insert(0, _Flight(job, first))
    while flying:
        flying = _round(flying)


@dataclass
class _Flight:
    job: Job
    pending: Pending
    rounds: int = 0


def _round(flying: list[_Flight]) -> list[_Flight]:
    """Lets every job whose exchange is LAG rounds old take its next step; those still in flight."""
    still = []
    for flight in flying:
        flight.rounds += 1
        if flight.rounds < LAG:
            still.append(flight)
            continue
        flight.pending.wait()
        following = next(flight.job, None)
        if following is not None:
            still.append(_Flight(flight.job, following))
    return still


def _scatter(
    transport: Transport, flat: Tensor, shards: Shards, exchange: Exchange, sent: Tensor | None, base: int = 0
) -> Generator[Pending, None, tuple[Tensor, Tensor]]:
    """Sends each rank its shard of `flat`; what was received, and a buffer as long, both uint8 [world, slot].

    Args:
        sent: residuals float32 [numel] that are added before encoding and replaced by what it loses; or None.
        base: index of the first element of `flat`, for the noise.
    """
    codec, seed = exchange.codec, exchange.send_seed
    size = wire.slot_bytes(shards, codec)
    slots = torch.empty(transport.world, size, dtype=torch.uint8, device=flat.device)
    if sent is None or codec.is_plain:
        wire.encode(flat, slots, shards, codec, seed, base)
    else:
        for rank in range(shards.world):
            part, left = shards.of(flat, rank), shards.of(sent, rank)
            feedback.encode_part(part, slots[rank], codec, seed, base + shards.start(rank), left)
    # The copies here and below are none where messages lie on the tensor's own device already.
    slots = slots.to(transport.device)
    received = torch.empty_like(slots)
    yield transport.all_to_all(received, slots)
    return received, slots


def _reduce(
    received: Tensor, shards: Shards, rank: int, exchange: Exchange, owned: Tensor | None, base: int = 0
) -> Tensor:
    """The message of this rank's sum: uint8 [slot]. `owned`: residuals of its elements, as `sent` above."""
    codec, seed = exchange.codec, exchange.reduced_seed
    reduced = received.new_empty(received.shape[1])
    seed = None if seed is None else seed.to(received.device)
    if owned is None or codec.is_plain:
        wire.reduce(received, reduced, shards, rank, codec, exchange.factor, seed, base)
    else:
        total = wire.reduced_values(received, shards.size(rank), codec, exchange.factor)
        feedback.encode_part(total, reduced, codec, seed, base + shards.start(rank), owned)
    return reduced


def all_reduce_chunk(transport: Transport, flat: Tensor, shards: Shards, exchange: Exchange) -> Job:
    """A chunk of the mean or sum of `flat` [numel] over all ranks, in place."""
    sent = owned = None
    if exchange.residuals is not None:
        sent = exchange.residuals.sent
        owned = exchange.residuals.owned[shards.first : shards.first + shards.size(transport.rank)]
    received, slots = yield from _scatter(transport, flat, shards, exchange, sent)
    reduced = _reduce(received, shards, transport.rank, exchange, owned)
    del received
    yield transport.all_gather(slots, reduced)
    wire.decode(slots.to(flat.device), flat, shards, exchange.codec)


def reduce_scatter_chunk(
    transport: Transport, flat: Tensor, out: Tensor, shards: Shards, exchange: Exchange
) -> Job:
    """A chunk of this rank's shard of the mean or sum of `flat` [numel], into `out` [the shard's length]."""
    sent = None if exchange.residuals is None else exchange.residuals.sent
    received, _ = yield from _scatter(transport, flat, shards, exchange, sent)
    numel = shards.size(transport.rank)
    total = wire.reduced_values(received, numel, exchange.codec, exchange.factor)
    out[shards.first : shards.first + numel].copy_(wire.saturated(total, out.dtype))


def all_gather_chunk(
    transport: Transport, part: Tensor, flat: Tensor, shards: Shards, exchange: Exchange
) -> Job:
    """A chunk of `flat` [numel] from the shards of all ranks; `part` [the shard's length] is this rank's."""
    codec, rank, seed = exchange.codec, transport.rank, exchange.send_seed
    size = wire.slot_bytes(shards, codec)
    message = torch.empty(size, dtype=torch.uint8, device=part.device)
    stretch = slice(shards.first, shards.first + shards.size(rank))
    if exchange.residuals is None or codec.is_plain:
        wire.encode_part(part[stretch], message, codec, seed, shards.start(rank))
    else:
        left = exchange.residuals.sent[stretch]
        feedback.encode_part(part[stretch], message, codec, seed, shards.start(rank), left)
    message = message.to(transport.device)
    slots = message.new_empty(transport.world, size)
    yield transport.all_gather(slots, message)
    wire.decode(slots.to(flat.device), flat, shards, codec)


def two_level_chunk(
    inner: Transport, outer: Transport, flat: Tensor, shards: Shards, inside: Codec, exchange: Exchange
) -> Job:
    """A chunk of the mean or sum of `flat` [numel] over all ranks of all nodes, in place.

    Inside a node values travel as `inside` says and are summed to FP32; between the nodes each rank exchanges its
    shard, with those of its place in the other nodes, in `exchange.codec`. The encoded result is what the node then
    gathers, so the way back costs no further rounding.

    Args:
        inner, outer: between the ranks of this node, and between the ranks of the same place in all nodes.
        shards: the cut into one shard for each rank of the node.
    """
    codec, numel, base = exchange.codec, shards.size(inner.rank), shards.start(inner.rank)
    near = Exchange(inside, send_seed=exchange.send_seed)
    received, _ = yield from _scatter(inner, flat, shards, near, None)
    part = wire.reduced_values(received, numel, inside, 1.0)
    del received
    # Cut as a full chunk is, so that the slots of all places are equally long.
    length = Shards.cut(shards.width, outer.world, codec.group_size).length
    shares = Shards.of_length(numel, outer.world, length)
    sent = owned = None
    if exchange.residuals is not None:
        first = shards.first
        sent = exchange.residuals.sent[first : first + numel]
        first += shares.start(outer.rank)
        owned = exchange.residuals.owned[first : first + shares.size(outer.rank)]
    received, slots = yield from _scatter(outer, part.to(flat.device), shares, exchange, sent, base)
    reduced = _reduce(received, shares, outer.rank, exchange, owned, base)
    del received, part
    yield outer.all_gather(slots, reduced)
    gathered = slots.new_empty(inner.world, slots.numel())
    yield inner.all_gather(gathered, slots.view(-1))
    gathered = gathered.view(inner.world, *slots.shape).to(flat.device)
    for rank in range(inner.world):
        values = shards.of(flat, rank)
        wire.decode(gathered[rank], values, Shards.of_length(values.numel(), outer.world, length), codec)
