"""The exchange of a bucket: codes to the owners of the shards, summed there in FP32, and gathered or kept.

Steps are those of `collectives.pipeline`, without the encoding before and the decoding after: memory holds codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives import wire
from ..collectives.pipeline import Job
from ..collectives.transport import Transport
from ..collectives.wire import Codec
from .buckets import Chunk


def all_reduce_chunk(transport: Transport, chunk: Chunk, codec: Codec, seed: Tensor | None, base: int) -> Job:
    """Replaces a chunk on all ranks by the mean over them, encoded once more.

    `base` is the index of the bucket's first element, for the noise.
    """
    sent = chunk.memory.to(transport.device)
    received = torch.empty_like(sent)
    yield transport.all_to_all(received, sent)
    reduced = received.new_empty(received.shape[1])
    wire.reduce(received, reduced, chunk.shards, transport.rank, codec, 1 / transport.world, seed, base)
    del received
    yield transport.all_gather(sent, reduced)
    if sent.data_ptr() != chunk.memory.data_ptr():
        chunk.memory.copy_(sent)


def scatter_chunk(transport: Transport, chunk: Chunk) -> Job:
    """Replaces a chunk by what all ranks have sent for this rank's shard: their messages, in rank order."""
    sent = chunk.memory.to(transport.device)
    received = torch.empty_like(sent)
    yield transport.all_to_all(received, sent)
    chunk.memory.copy_(received)


def gather_chunk(transport: Transport, gathered: Tensor, message: Tensor) -> Job:
    """gathered [world, n] <- the message uint8 [n] of every rank, both on one device."""
    own = message.to(transport.device)
    rows = gathered if gathered.device == transport.device else own.new_empty(gathered.shape)
    yield transport.all_gather(rows, own)
    if rows is not gathered:
        gathered.copy_(rows)
