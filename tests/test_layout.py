"""Sizes and addresses: Python's layout, the native `_host` and the reference agree, also beyond 2^31 elements."""

from __future__ import annotations

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from agoq_ext import _host, layout, reference
from agoq_ext.layout import FORMATS


def test_format_tables_are_equal() -> None:
    assert _host.formats() == {f.name: (f.bits, f.qmax, f.zero_code) for f in FORMATS.values()}


@pytest.mark.parametrize("format", FORMATS)
def test_code_values_are_equal(format: str) -> None:
    for code, value in enumerate(reference.code_values(format).tolist()):
        native = _host.code_value(code, format)
        assert native == value or (math.isnan(native) and math.isnan(value))
    assert reference.code_values(format)[FORMATS[format].zero_code] == 0


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(
    numel=st.integers(0, 2**40),
    format=st.sampled_from(list(FORMATS)),
    group_size=st.sampled_from(layout.GROUP_SIZES),
    scale_dtype=st.sampled_from(layout.SCALE_DTYPES),
)
def test_sizes_are_equal(numel: int, format: str, group_size: int, scale_dtype: torch.dtype) -> None:
    assert _host.row_bytes(numel, format) == layout.row_bytes(numel, format)
    assert _host.num_groups(numel, group_size) == layout.num_groups(numel, group_size)
    wire = layout.wire_layout(numel, format, group_size, scale_dtype)
    native = _host.wire_layout(numel, format, group_size, scale_dtype.itemsize)
    assert native == (wire.codes_bytes, wire.scales_offset, wire.scales_bytes, wire.total_bytes)
    assert wire.scales_offset % 16 == 0 and wire.total_bytes % 16 == 0


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(
    rows=st.integers(1, 2**24),
    cols=st.integers(1, 2**34),
    format=st.sampled_from(list(FORMATS)),
    data=st.data(),
)
def test_block_addresses_beyond_32_bits(rows: int, cols: int, format: str, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, rows - 1))
    block = data.draw(st.integers(0, -(-cols // 32) - 1))
    start, low, bit4, bit5 = _host.block_address(row, block, cols, format)
    bits, padded = FORMATS[format].bits, -(-cols // 32) * 32
    assert start == row * (padded * bits // 8)
    assert low == block * (32 if bits == 8 else 16)
    if bits in (5, 6):
        assert bit4 == padded // 2 + 4 * block
        assert bit5 == padded // 2 + padded // 8 + 4 * block
