"""Whatever reads bytes from a wire, a file or a caller: damaged contents and sizes that lie end in values or in errors.

The native ops are called directly, past the checks of Python's wrappers, since a checkpoint or a peer may be of any age.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import agoq_ext
from agoq_ext import layout
from agoq_ext.collectives import Codec, wire

FORMATS = tuple(layout.FORMATS)
SCALE_DTYPES = (torch.bfloat16, torch.float32)


def random_bytes(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.sampled_from(layout.GROUP_SIZES),
    st.sampled_from(SCALE_DTYPES),
    st.integers(1, 700),
    st.integers(0, 2**31),
)
def test_any_message_decodes(
    format: str, group_size: int, scale_dtype: torch.dtype, numel: int, seed: int
) -> None:
    """Random bytes in the place of a message: every value is a float, every sum runs; nothing is out of bounds."""
    codec = Codec(format, group_size, scale_dtype)
    slots = random_bytes((3, codec.message(numel).total_bytes), seed)
    out = torch.empty(numel)
    wire.decode_part(slots[0], out, codec)
    assert wire.reduced_values(slots, numel, codec, 0.5).shape == (numel,)
    reduced = torch.zeros_like(slots[0])
    wire.reduce(slots, reduced, wire.Shards.of_length(numel, 1, numel), 0, codec, 1.0, None)


sizes = st.integers(0, 200)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*FORMATS, "int7", ""]),
    st.sampled_from([*layout.GROUP_SIZES, 0, -32, 48, 2**40]),
    st.lists(sizes, min_size=0, max_size=3),
    st.lists(sizes, min_size=0, max_size=4),
    st.sampled_from([*SCALE_DTYPES, torch.int32]),
    st.integers(-5, 300) | st.sampled_from([2**31, 2**62, -(2**62)]),
    st.integers(0, 1000),
)
def test_sizes_that_lie_are_errors(
    format: str,
    group_size: int,
    packed_shape: list[int],
    scales_shape: list[int],
    scale_dtype: torch.dtype,
    cols: int,
    seed: int,
) -> None:
    packed = random_bytes(tuple(packed_shape), seed)
    scales = torch.zeros(scales_shape, dtype=scale_dtype)
    calls: list[Any] = [
        lambda: torch.ops.agoq.dequantize(packed, scales, cols, format, group_size, torch.float32),
        lambda: torch.ops.agoq.norm(packed, scales, cols, format, group_size),
        lambda: torch.ops.agoq.reduce(packed, scales, cols, format, group_size, 1.0, torch.float32),
    ]
    fits = (
        format in FORMATS
        and group_size in layout.GROUP_SIZES
        and cols >= 0
        and scale_dtype in SCALE_DTYPES
        and len(packed_shape) == 2
        and tuple(packed_shape) == layout.packed_shape(packed_shape[0], cols, format)
        and tuple(scales_shape) == layout.scales_shape(packed_shape[0], cols, format, group_size)
    )
    for call in calls[:2]:
        if fits:
            call()
        else:
            with pytest.raises((RuntimeError, ValueError)):
                call()
    if len(packed_shape) != 3:
        with pytest.raises((RuntimeError, ValueError)):
            calls[2]()


def damaged(data: bytes, seed: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    at = int(torch.randint(len(data), (1,), generator=generator))
    if seed % 2:
        return data[:at]
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_tensor_file_is_an_error_or_values(seed: int, tmp_path) -> None:
    q = agoq_ext.quantize(torch.randn(4, 96), "int4", group_size=32)
    path = tmp_path / "q.pt"
    torch.save(q, path)
    path.write_bytes(damaged(path.read_bytes(), seed))
    try:
        loaded = torch.load(path, weights_only=True)
        loaded.dequantize()
    except Exception as error:  # the unpickler's own, many kinds
        assert str(error) or isinstance(error, EOFError)


def test_states_of_other_shapes_are_refused() -> None:
    store = agoq_ext.GradientStore(nn.Linear(64, 64))
    state = store.state_dict()
    content = state["rank0"].content
    for key, value in (("record", "something else"), ("rank", 3)):
        broken = pickle.loads(pickle.dumps(state))
        broken["rank0"].content[key] = value
        with pytest.raises(ValueError, match="load_state_dict: state must be of rank 0"):
            agoq_ext.GradientStore(nn.Linear(64, 64)).load_state_dict(broken)
    truncated = pickle.loads(pickle.dumps(state))
    truncated["rank0"].content["memory"] = [content["memory"][0][:-1]]
    with pytest.raises((RuntimeError, ValueError), match="size|shape|bytes"):
        agoq_ext.GradientStore(nn.Linear(64, 64)).load_state_dict(truncated)
