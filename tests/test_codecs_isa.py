"""The CPU kernels of every instruction set that this machine runs, bit for bit against reference.py.

Ops named `_test_*` take the instruction set as their last argument. What an instruction set computes must not
depend on how wide its vectors are, on how rows are joined or cut into runs, or on whether outputs bypass the caches.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agoq_ext import layout, ops, reference
from agoq_ext.layout import FLOAT_DTYPES, FORMATS, GROUP_SIZES, ROUNDINGS, SCALE_DTYPES

native = torch.ops.agoq
ISAS = [isa for isa in ("baseline", "avx2", "avx512") if native._test_isa_available(isa)]
# One element to more than eight groups of 256, which is a run; short groups and blocks, and none.
COLS = (1, 31, 32, 33, 100, 130, 256, 300, 2080, 2337)

each_isa = pytest.mark.parametrize("isa", ISAS)
each_format = pytest.mark.parametrize("format", FORMATS)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    )


def assert_same(got: Tensor, want: Tensor, what: str) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, what
    wrong = bits(got) != bits(want)
    if wrong.any():
        where = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} differ, first at {where}: {got[where]} for {want[where]}"
        )


def rows_of_every_kind(cols: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """[12, cols]: heavy tails, edge values one by one and mixed, groups that are constant, zero or not finite."""
    top = torch.finfo(dtype).max
    edges = [0.0, -0.0, 1e-36, -1e-36, 1e-45, 65504.0, -65504.0, 1.0, 127.0, top, -top, 3.0e38, -1e-30, 2.5]
    edge = torch.tensor(edges).clamp(-top, top)
    x = torch.randn(12, cols, generator=generator) * torch.exp(3 * torch.randn(12, cols, generator=generator))
    x[1] = x[1].round()  # ties are frequent
    x[2] = edge[torch.randint(len(edges), (cols,), generator=generator)]
    x[3] *= 1e-38
    x[4] = x[4].abs() * 1e-24 + 1.0  # nearly constant
    x[5] = float(edge[int(torch.randint(len(edges), (1,), generator=generator))])
    x[6] = 0.0
    x[6, :: max(1, cols // 7)] = -1e-45
    x[7] = -0.0
    x[8] = top
    x[8, cols // 2 :] = -top
    x[9, cols // 2] = torch.nan
    x[10, -1] = -torch.inf
    x[11] = x[11].abs()  # one-sided
    return x.to(dtype)


def quantize_both(
    x: Tensor, format: str, group_size: int, scale_dtype: torch.dtype, rounding: str, offset: int, isa: str
) -> tuple[Tensor, Tensor]:
    """The reference's codes and scales, after comparing those of `isa` with them."""
    seed = torch.tensor([1234 + offset]) if rounding == "stochastic" else None
    arguments = (x, format, group_size, scale_dtype, rounding, seed, offset)
    packed, scales = reference.quantize(*arguments)
    got_packed, got_scales = native._test_quantize(*arguments, isa)
    what = f"{isa} {format} {group_size} {x.dtype} {scale_dtype} {rounding} {tuple(x.shape)}"
    assert_same(got_scales, scales, what + ": scales")
    assert_same(got_packed, packed, what + ": packed")
    return packed, scales


# --- quantize and dequantize ---------------------------------------------------------------------------------


@each_isa
@each_format
def test_rows_of_every_kind(isa: str, format: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for i, (group_size, dtype) in enumerate(itertools.product(GROUP_SIZES, FLOAT_DTYPES)):
        for j, rounding in enumerate(ROUNDINGS):
            x = rows_of_every_kind(COLS[(3 * i + j) % len(COLS)], dtype, generator)
            scale_dtype = SCALE_DTYPES[(i + j) % 2]
            packed, scales = quantize_both(x, format, group_size, scale_dtype, rounding, 7 * i, isa)
            out = FLOAT_DTYPES[(i + j) % 3]
            arguments = (packed, scales, x.shape[1], format, group_size, out)
            what = f"{isa} {format} {group_size} {scale_dtype} to {out} {x.shape[1]}"
            assert_same(native._test_dequantize(*arguments, isa), reference.dequantize(*arguments), what)


@each_isa
@each_format
def test_any_codes_and_any_scales(isa: str, format: str) -> None:
    """Stored bytes that quantize never writes: every pattern, scales that are negative, tiny, huge or not finite."""
    generator = torch.Generator().manual_seed(2)
    special = [0.0, -1.5, 1e-40, 3e38, torch.inf, -torch.inf, torch.nan, 2.0**-126, 600.0]
    for i, (cols, group_size) in enumerate(itertools.product((33, 256, 2080), GROUP_SIZES)):
        packed = torch.randint(
            256, layout.packed_shape(6, cols, format), dtype=torch.uint8, generator=generator
        )
        packed[0, : min(256, packed.shape[1])] = torch.arange(min(256, packed.shape[1]), dtype=torch.uint8)
        for scale_dtype, out in itertools.product(SCALE_DTYPES, FLOAT_DTYPES):
            scales = torch.randn(layout.scales_shape(6, cols, format, group_size), generator=generator)
            scales[2:] = torch.tensor(special)[
                torch.randint(len(special), scales[2:].shape, generator=generator)
            ]
            arguments = (packed, scales.to(scale_dtype), cols, format, group_size, out)
            what = f"{isa} {format} {group_size} {scale_dtype} to {out} {cols} ({i})"
            assert_same(native._test_dequantize(*arguments, isa), reference.dequantize(*arguments), what)


@each_isa
@each_format
def test_strides_and_offsets(isa: str, format: str) -> None:
    x = torch.randn(40, 400, generator=torch.Generator().manual_seed(3))
    for i, dtype in enumerate(FLOAT_DTYPES):
        y = x.to(dtype)
        flat = torch.cat([y.new_zeros(1), y.reshape(-1)])[1:].view(40, 400)  # rows start at odd addresses
        views = (
            y[:, 3:70],
            y[::2, 5:300],
            y.t(),
            flat,
            y[:8].reshape(2, 4, 400)[:, :, 1:],
            y[0, :1].expand(3, 64),
        )
        for j, view in enumerate(views):
            quantize_both(
                view, format, GROUP_SIZES[(i + j) % 4], SCALE_DTYPES[j % 2], ROUNDINGS[j % 2], 5 * j + i, isa
            )


@each_isa
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_and_values(isa: str, data: st.DataObject) -> None:
    rows, cols = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 700))
    dtype = data.draw(st.sampled_from(FLOAT_DTYPES))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    x = torch.randn(rows, cols, generator=generator) * 10.0 ** data.draw(st.integers(-40, 36))
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    format, group_size = data.draw(st.sampled_from(list(FORMATS))), data.draw(st.sampled_from(GROUP_SIZES))
    scale_dtype, rounding = data.draw(st.sampled_from(SCALE_DTYPES)), data.draw(st.sampled_from(ROUNDINGS))
    offset = data.draw(st.sampled_from((0, 1, 2, 3, 2**32 - 5, 2**34 - 2, 2**40 + 1)))
    packed, scales = quantize_both(x, format, group_size, scale_dtype, rounding, offset, isa)
    arguments = (packed, scales, cols, format, group_size, data.draw(st.sampled_from(FLOAT_DTYPES)))
    assert_same(native._test_dequantize(*arguments, isa), reference.dequantize(*arguments), f"{isa} {format}")


@each_isa
@pytest.mark.parametrize("format", ["int8", "int6", "int4", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_outputs_that_bypass_the_caches(isa: str, format: str, dtype: torch.dtype) -> None:
    """An output of 32 MiB and its quarters, which are below the limit, hold the same bits."""
    cols = 2**12
    rows = 2**25 // dtype.itemsize // cols
    packed = torch.randint(256, layout.packed_shape(rows, cols, format), dtype=torch.uint8)
    scales = torch.rand(layout.scales_shape(rows, cols, format, 128)).bfloat16()
    whole = native._test_dequantize(packed, scales, cols, format, 128, dtype, isa)
    for part in torch.arange(rows).chunk(4):
        rows_of_part = slice(int(part[0]), int(part[-1]) + 1)
        arguments = (packed[rows_of_part], scales[rows_of_part], cols, format, 128, dtype, isa)
        assert torch.equal(bits(whole[rows_of_part]), bits(native._test_dequantize(*arguments)))
    assert_same(whole[:2], reference.dequantize(packed[:2], scales[:2], cols, format, 128, dtype), format)


# --- division by way of a reciprocal -------------------------------------------------------------------------


def boundaries(format: str) -> Tensor:
    """Positive FP32 values between two codes of `format` at which nearest rounding changes, ascending."""
    values = reference.code_values(format).double()
    values = values[values.isfinite() & (values >= 0)].unique()
    if format in ("int6", "int5", "int4", "int8"):
        values = values[values <= FORMATS[format].qmax]
    return ((values[1:] + values[:-1]) / 2).float()


def compare_at_boundaries(format: str, mantissas: Tensor, isa: str) -> None:
    """The codes of the FP32 numbers whose quotients lie next to a boundary, for scales of the given mantissas."""
    qmax = FORMATS[format].qmax
    largest = ((1 + mantissas.double() / 2**23) * qmax).float()
    scale = native._test_quantize(
        largest[:, None], format, 32, torch.float32, "nearest", None, 0, "baseline"
    )[1]
    at = boundaries(format)
    up, down = torch.nextafter(at, torch.tensor(torch.inf)), torch.nextafter(at, torch.tensor(0.0))
    # A quotient changes sides of a boundary at the midpoints between it and its neighbours, and only there.
    midpoints = torch.cat([(at.double() + up.double()) / 2, (at.double() + down.double()) / 2])
    nearest = (scale.double() * midpoints).float()
    x = torch.stack([(nearest.view(torch.int32) + step).view(torch.float32) for step in (-1, 0, 1)], dim=-1)
    x = torch.minimum(x.reshape(len(mantissas), -1), largest[:, None])
    groups = -(-x.shape[1] // 31)
    x = torch.nn.functional.pad(x, (0, groups * 31 - x.shape[1])).view(-1, groups, 31)
    x = torch.cat([largest[:, None, None].expand(-1, groups, 1), x], dim=-1).reshape(-1, groups * 32)
    if format == "nf4":  # its code book is not symmetric
        x = torch.cat([x, -x])
    arguments = (x, format, 32, torch.float32, "nearest", None, 0)
    got, want = native._test_quantize(*arguments, isa), native._test_quantize(*arguments, "baseline")
    assert_same(got[1], want[1], f"{isa} {format}: scales")
    assert_same(got[0], want[0], f"{isa} {format}: packed")


@each_isa
@each_format
def test_quotients_next_to_rounding_boundaries(isa: str, format: str) -> None:
    if FORMATS[format].has_min:
        pytest.skip("its boundaries are among int8's")
    compare_at_boundaries(
        format, torch.randint(2**23, (500,), generator=torch.Generator().manual_seed(4)), isa
    )


@pytest.mark.slow
@each_isa
@pytest.mark.parametrize("format", ["int8", "nf4", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "fp4_e3m0"])
def test_quotients_for_many_mantissas_of_a_scale(isa: str, format: str) -> None:
    """One scale mantissa in 256; all of them, in an hour, with AGOQ_ALL_MANTISSAS set in the environment."""
    step = 1 if os.environ.get("AGOQ_ALL_MANTISSAS") else 256
    for mantissas in torch.arange(step - 1, 2**23, step).split(2**12):
        compare_at_boundaries(format, mantissas, isa)


@each_isa
@each_format
def test_every_quotient_of_bfloat16_significands(isa: str, format: str) -> None:
    """All significands of elements, over twelve binades, in groups whose largest element has each of the significands."""
    largest = (torch.arange(128) + (127 << 7)).to(torch.int16)
    below = largest[:, None] - torch.arange(12 * 128).to(torch.int16)  # patterns order like magnitudes
    x = torch.cat([below, below ^ -0x8000], dim=1)  # of both signs
    groups = -(-x.shape[1] // 31)
    x = torch.nn.functional.pad(x, (0, groups * 31 - x.shape[1])).view(128, groups, 31)
    x = torch.cat([largest[:, None, None].expand(-1, groups, 1), x], dim=-1).reshape(128, -1)
    quantize_both(x.view(torch.bfloat16), format, 32, torch.bfloat16, "nearest", 0, isa)


# --- more than 2^31 elements ---------------------------------------------------------------------------------


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages the system provides when they are written, however large the tensor."""
    size = math.prod(shape) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype).view(shape)


@pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE"), reason="needs memory that is mapped when it is touched")
@each_isa
@pytest.mark.parametrize("format", ["int8", "int6", "int4", "uint4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2**31 + 4100), (2**20 + 2, 4100)])
def test_the_end_of_more_than_two_to_the_31_elements(
    isa: str, format: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Long rows, and many rows; the last groups alone are encoded and decoded, as those of a small tensor."""
    (rows, cols), group_size = shape, 64
    row_groups = -(-cols // group_size)
    last = torch.randn(1, 9 * group_size + cols % group_size, generator=torch.Generator().manual_seed(6)).to(
        dtype
    )
    x = untouched(shape, dtype)
    x[-1, -last.shape[1] :] = last[0]
    packed = untouched(layout.packed_shape(rows, cols, format), torch.uint8)
    scales = untouched(layout.scales_shape(rows, cols, format, group_size), torch.bfloat16)
    groups = rows * row_groups - 10, rows * row_groups
    native._test_quantize_range(x, packed, scales, format, group_size, *groups, isa)
    want = reference.quantize(last, format, group_size, torch.bfloat16, "nearest", None)
    assert_same(scales[-1, -10:], want[1][0], "scales")
    out = untouched(shape, dtype)
    native._test_dequantize_range(packed, scales, out, format, group_size, *groups, isa)
    values = reference.dequantize(*want, last.shape[1], format, group_size, dtype)
    assert_same(out[-1, -last.shape[1] :], values[0], "values")


# --- accumulate_, reduce, norm -------------------------------------------------------------------------------


@each_isa
@each_format
def test_accumulate(isa: str, format: str) -> None:
    generator = torch.Generator().manual_seed(5)
    for i, (group_size, dtype) in enumerate(itertools.product(GROUP_SIZES, FLOAT_DTYPES)):
        cols, rounding = COLS[(3 * i) % len(COLS)], ROUNDINGS[i % 2]
        seed = torch.tensor([i]) if rounding == "stochastic" else None
        first = torch.randn(12, cols, generator=generator)
        packed, scales = ops.quantize(first, format, group_size, SCALE_DTYPES[i // 2 % 2])
        want = packed.clone(), scales.clone()
        x = rows_of_every_kind(cols, dtype, generator)
        reference.accumulate_(*want, x, 0.3, format, group_size, rounding, seed, i)
        native._test_accumulate_(packed, scales, x, 0.3, format, group_size, rounding, seed, i, isa)
        what = f"{isa} {format} {group_size} {dtype} {rounding} {cols}"
        assert_same(scales, want[1], what)
        assert_same(packed, want[0], what)


@each_isa
@each_format
@pytest.mark.parametrize("world", [1, 2, 4, 7])
def test_reduce(isa: str, format: str, world: int) -> None:
    generator = torch.Generator().manual_seed(6)
    for i, group_size in enumerate(GROUP_SIZES):
        cols = COLS[(i + 2 * world) % len(COLS)]
        shards = [
            ops.quantize(
                rows_of_every_kind(cols, torch.float32, generator).roll(3 * w, 0),
                format,
                group_size,
                SCALE_DTYPES[i % 2],
            )
            for w in range(world)
        ]
        packed, scales = torch.stack([s[0] for s in shards]), torch.stack([s[1] for s in shards])
        for dtype in FLOAT_DTYPES:
            arguments = (packed, scales, cols, format, group_size, 0.2, dtype)
            what = f"{isa} {format} {group_size} {dtype} {cols}"
            assert_same(native._test_reduce(*arguments, isa), reference.reduce(*arguments), what)
        total = reference.reduce(packed, scales, cols, format, group_size, 0.2, torch.float32)
        rounding, seed = ROUNDINGS[i % 2], torch.tensor([7])
        want = reference.quantize(total, format, group_size, scales.dtype, rounding, seed, 3)
        out = torch.empty_like(packed[0]), torch.empty_like(scales[0])
        native._test_reduce_quantize_out(
            packed, scales, cols, format, group_size, 0.2, rounding, seed, 3, *out, isa
        )
        assert_same(out[1], want[1], f"{isa} {format} {group_size} {rounding} {cols}")
        assert_same(out[0], want[0], f"{isa} {format} {group_size} {rounding} {cols}")


@each_isa
@each_format
def test_norm(isa: str, format: str) -> None:
    generator = torch.Generator().manual_seed(8)
    for group_size, cols in zip(GROUP_SIZES, (33, 1000, 16384, 40001), strict=True):
        packed, scales = ops.quantize(torch.randn(3, cols, generator=generator), format, group_size)
        arguments = (packed, scales, cols, format, group_size)
        for got, want in zip(native._test_norm(*arguments, isa), reference.norm(*arguments), strict=True):
            assert torch.equal(got, want), (isa, format, group_size, cols)
        scales[1, 0] = torch.nan
        assert native._test_norm(*arguments, isa)[1].item()
