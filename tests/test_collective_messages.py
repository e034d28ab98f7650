"""Messages of the quantized collectives, without processes: shards, encodings, seeds, against the emulation."""

from __future__ import annotations

import pytest
import torch
from all_reduce_twin import emulate, random_flat, seed_of, shard_bounds, splitmix
from hypothesis import given, settings
from hypothesis import strategies as st

from agoq_ext import layout, reference
from agoq_ext.collectives import (
    Codec,
    mix_seed,
    wire,
)
from agoq_ext.collectives.call import OPS


@given(numel=st.integers(0, 5000), world=st.integers(1, 9), group_size=st.sampled_from(layout.GROUP_SIZES))
def test_shards_cover_the_tensor_in_whole_groups(numel: int, world: int, group_size: int) -> None:
    shards = wire.Shards.cut(numel, world, group_size)
    bounds = [(shards.start(r), shards.start(r) + shards.size(r)) for r in range(world)]
    assert bounds == shard_bounds(numel, world, group_size)
    assert bounds[0][0] == 0 and bounds[-1][1] == numel
    assert all(start % group_size == 0 or start == numel for start, _ in bounds)
    assert shards.length * world < numel + world * group_size, (
        "no slot is longer than rounding to groups asks"
    )


@pytest.mark.parametrize("scale_dtype", layout.SCALE_DTYPES)
@pytest.mark.parametrize("format", layout.FORMATS)
def test_messages_are_codes_then_scales_with_zero_padding(format: str, scale_dtype: torch.dtype) -> None:
    codec = Codec(format, 64, scale_dtype)
    flat = random_flat(1, 0, 1000, torch.float32)
    shards = wire.Shards.cut(1000, 3, 64)  # 384, 384, 232
    slots = torch.full((3, wire.slot_bytes(shards, codec)), 0xAB, dtype=torch.uint8)
    wire.encode(flat, slots, shards, codec, None)
    for rank in range(3):
        packed, scales = reference.quantize(shards.of(flat, rank), format, 64, scale_dtype, "nearest", None)
        data = bytearray()
        for part in (packed, scales):
            data += part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            data += bytes(-len(data) % layout.WIRE_ALIGNMENT)
        assert bytes(slots[rank].tolist()) == bytes(data).ljust(slots.shape[1], b"\0")


@settings(deadline=None, max_examples=60)
@given(
    numel=st.integers(1, 1500),
    world=st.integers(1, 5),
    format=st.sampled_from(list(layout.FORMATS)),
    group_size=st.sampled_from(layout.GROUP_SIZES),
    scale_dtype=st.sampled_from(layout.SCALE_DTYPES),
    rounding=st.sampled_from(layout.ROUNDINGS),
    op=st.sampled_from(OPS),
)
def test_encode_reduce_decode_equal_the_emulation(
    numel: int, world: int, format: str, group_size: int, scale_dtype: torch.dtype, rounding: str, op: str
) -> None:
    codec = Codec(format, group_size, scale_dtype, rounding)
    flats = [random_flat(2, rank, numel, torch.float32) for rank in range(world)]
    shards = wire.Shards.cut(numel, world, group_size)
    slot = wire.slot_bytes(shards, codec)
    sent = torch.empty(world, world, slot, dtype=torch.uint8)
    gathered = torch.empty(world, slot, dtype=torch.uint8)
    for rank, flat in enumerate(flats):
        wire.encode(flat, sent[rank], shards, codec, seed_of(codec, 7, rank, 0))
    for rank in range(world):
        factor = 1 / world if op == "avg" else 1.0
        received = sent[:, rank].contiguous()
        wire.reduce(received, gathered[rank], shards, rank, codec, factor, seed_of(codec, 7, rank, 1))
    out = torch.empty(numel)
    wire.decode(gathered, out, shards, codec)
    assert torch.equal(out, emulate(flats, op, codec, [7] * world))


def test_the_cut_does_not_change_the_noise() -> None:
    codec = Codec("int4", 32, torch.float32, "stochastic")
    flat, seed = random_flat(3, 0, 3000, torch.float32), torch.tensor([5])
    whole, _ = reference.quantize(flat, "int4", 32, torch.float32, "stochastic", seed)
    for world in (1, 2, 3):
        shards = wire.Shards.cut(3000, world, 32)
        slots = torch.empty(world, wire.slot_bytes(shards, codec), dtype=torch.uint8)
        wire.encode(flat, slots, shards, codec, seed)
        packed = [wire.message_views(slots[r], shards.size(r), codec)[0][0] for r in range(world)]
        assert torch.equal(torch.cat(packed)[: whole.numel()], whole[0])


def test_mix_seed() -> None:
    # The first output of the published splitmix64 for the state 1234567.
    assert int(mix_seed(torch.tensor([1234567]), 0)) == 6457827717110365317
    seen = set()
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        for words in [(0,), (1,), (0, 0), (0, 1), (1, 0), (3, 1), (3, 1, 10**6)]:
            mixed = int(mix_seed(torch.tensor([seed]), *words))
            assert mixed % 2**64 == splitmix(seed % 2**64, *words)
            seen.add(mixed)
    assert len(seen) == 5 * 7
