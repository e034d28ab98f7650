"""The reduction of a store's buckets over the ranks: when each is issued, and what travels."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..collectives import Codec, Work, pipeline
from ..collectives.channel import Channel, channel_of, resolve_group
from ..collectives.transport import Transport
from . import exchange, shards
from .buckets import Bucket
from .shards import Piece

NextSeed = Callable[[], Tensor | None]


class Reduction:
    """Exchanges buckets in their order, each once a step, on the group's background thread.

    All ranks issue the same exchanges in the same order, whatever the order in which their gradients arrive: bucket i
    after bucket i - 1, and what backward has left out in `finish`.

    Attributes:
        launched: buckets that have been issued in this step.
        gathers_codes: whether parameters are gathered as codes.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, codec: Codec, sharded: bool, gather: str | None
    ) -> None:
        self._codec, self._sharded = codec, sharded
        self._gather_codec = replace(codec, format=gather, rounding="nearest") if gather else None
        self._group = None
        if group is not None or dist.is_initialized():
            self._group = resolve_group("GradientStore", group)
        self.world = self._group.size() if self._group else 1
        self.rank = self._group.rank() if self._group else 0
        self.buckets: list[Bucket] = []
        self.launched = 0
        self.record = ""
        self.gathers_codes = gather is not None
        self._channel: Channel | None = None
        self._works: list[Work] = []

    def connect(self, model: nn.Module, buckets: list[Bucket]) -> None:
        """Compares the ranks' parameters and options, and gives all ranks rank 0's parameters and buffers."""
        self.buckets = buckets
        entries = [entry for bucket in buckets for entry in bucket.entries]
        text = ",".join(f"{e.name}:{tuple(e.parameter.shape)}:{e.parameter.dtype}" for e in entries)
        gather = self._gather_codec.format if self._gather_codec else None
        self.record = (
            f"{len(entries)} parameters crc32={zlib.crc32(text.encode()):08x} buckets={len(buckets)} "
            f"world={self.world} sharded={self._sharded} gather={gather} {self._codec}"
        )
        if self._group is None or self.world == 1:
            return
        channel = self._channel = channel_of(self._group)

        def compare(*transports: Transport) -> None:
            channel.agree(transports, "GradientStore", f"GradientStore {self.record}")

        channel.run_now("GradientStore", compare, [buckets[0].memory], [self._group])
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), group=self._group, group_src=0)

    # --- gradients -----------------------------------------------------------------------------------------------

    def launch_ready(self, next_seed: NextSeed) -> None:
        """Issues the next buckets as far as all their gradients have arrived."""
        while self._channel and self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if not all(entry.ready for entry in bucket.entries):
                return
            self._launch(bucket, next_seed)

    def finish(self, next_seed: NextSeed) -> None:
        """Issues the buckets that are left, and waits for all. What got no gradient counts as zero."""
        if self._channel is None:
            for bucket in self.buckets:
                bucket.clear_unwritten(bucket.entries)
        while self._channel and self.launched < len(self.buckets):
            self._launch(self.buckets[self.launched], next_seed)
        self.wait()

    def _launch(self, bucket: Bucket, next_seed: NextSeed) -> None:
        assert self._channel is not None and self._group is not None
        self.launched += 1
        bucket.clear_unwritten(bucket.entries)
        seed = None if self._sharded else next_seed()
        body = partial(self._exchange, bucket, seed)
        inputs = [] if seed is None else [seed]
        self._works.append(self._channel.run("GradientStore", body, [bucket.memory], [self._group], inputs))

    def _exchange(self, bucket: Bucket, seed: Tensor | None, transport: Transport) -> None:
        if self._sharded:
            pipeline.run(exchange.scatter_chunk(transport, chunk) for chunk in bucket.chunks)
            return
        base = bucket.entries[0].base
        pipeline.run(
            exchange.all_reduce_chunk(transport, chunk, self._codec, seed, base) for chunk in bucket.chunks
        )

    def wait(self) -> None:
        """Waits for what is in flight."""
        while self._works:
            self._works[0].wait()
            self._works.pop(0)

    def reset(self) -> None:
        """Begins a step; waits for what is in flight."""
        self.wait()
        self.launched = 0

    # --- what a sharded store exchanges besides ------------------------------------------------------------------

    def sum(self, value: Tensor) -> Tensor:
        """The sum of float64 [] over the ranks, in their order."""
        if self._channel is None or self._group is None:
            return value
        message = value.reshape(1).view(torch.uint8)
        gathered = message.new_empty(self.world, message.numel())

        def body(transport: Transport) -> None:
            pipeline.run([exchange.gather_chunk(transport, gathered, message)])

        self._channel.run_now("GradientStore.norm", body, [gathered], [self._group], [message])
        total = torch.zeros_like(value)
        for each in gathered.view(value.dtype).view(-1):
            total = total + each
        return total

    def gather(self, pieces: dict[Bucket, list[Piece]]) -> None:
        """Gives all ranks the parameters that each of them has stepped."""
        if self._channel is None or self._group is None:
            for piece in (piece for each in pieces.values() for piece in each):
                shards.store_exactly(piece)
            return

        def body(transport: Transport) -> None:
            for bucket in self.buckets:
                pipeline.run(shards.gather_jobs(bucket, pieces[bucket], transport, self._gather_codec))

        written: Sequence[Tensor] = [e.parameter.detach() for bucket in self.buckets for e in bucket.entries]
        self._channel.run_now("GradientStore.step", body, list(written), [self._group])
