"""The codec ops on the CPU: equal to the reference bit for bit, and the contracts of docs/formats.md and docs/design.md."""

from __future__ import annotations

import io
import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

import agoq_ext
from agoq_ext import layout, ops, reference
from agoq_ext.layout import FORMATS

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# Values that break quantizers: zeros, tiny and denormal, the largest of each dtype, codes and halves.
EDGE_VALUES = (0.0, -0.0, 1e-36, -1e-36, 1e-45, 5e-39, 3.4028234663852886e38, -3.4028234663852886e38, 65504.0,
               -65504.0, 3.3895313892515355e38, 1.0, -7.0, 0.5, 127.0, -6.0)  # fmt: skip


def bits(x: Tensor) -> Tensor:
    """The bit patterns of a tensor, so that NaN equals itself and -0 differs from 0."""
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(dtype)


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    differs = (bits(got) != bits(want)).nonzero()
    assert len(differs) == 0, (
        f"first at {differs[0].tolist()}: got {got[tuple(differs[0])]}, want {want[tuple(differs[0])]}"
    )


def heavy_tailed(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * torch.exp(2 * torch.randn(shape, generator=g))


def check_against_reference(
    x: Tensor, format: str, group_size: int, scale_dtype: torch.dtype, rounding: str, offset: int = 0
) -> None:
    seed = torch.tensor([1234567]) if rounding == "stochastic" else None
    args = (format, group_size, scale_dtype, rounding, seed, offset)
    packed, scales = ops.quantize(x, *args)
    want_packed, want_scales = reference.quantize(x, *args)
    assert_same_bits(packed, want_packed)
    assert_same_bits(scales, want_scales)
    _, cols = layout.as_rows(x.shape)
    for dtype in layout.FLOAT_DTYPES:
        got = ops.dequantize(packed, scales, cols, format, group_size, dtype)
        assert_same_bits(got, reference.dequantize(packed, scales, cols, format, group_size, dtype))


# --- the same bits as the reference --------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("group_size", layout.GROUP_SIZES)
def test_equals_reference(format: str, group_size: int) -> None:
    for i, cols in enumerate((1, 31, 32, 33, 100, 256, 301)):
        dtype = layout.FLOAT_DTYPES[i % 3]
        x = heavy_tailed(3, cols, seed=i).clamp(-6e4, 6e4).to(dtype)
        for scale_dtype in layout.SCALE_DTYPES:
            for rounding in layout.ROUNDINGS:
                check_against_reference(x, format, group_size, scale_dtype, rounding, offset=i)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_equals_reference_for_any_input(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), max_size=2)) + data.draw(
        st.lists(st.integers(0, 300), max_size=1)
    )
    seed = data.draw(st.integers(0, 2**20))
    scale = data.draw(st.sampled_from([1.0, 1e-40, 1e-30, 1e30, 1e38]))
    x = heavy_tailed(*shape, seed=seed) * scale
    edges = torch.tensor(EDGE_VALUES + (math.nan, math.inf))
    choose = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < data.draw(
        st.sampled_from([0, 0.01, 0.5])
    )
    index = torch.randint(len(edges), x.shape, generator=torch.Generator().manual_seed(seed))
    x = torch.where(choose, edges[index], x).to(data.draw(st.sampled_from(layout.FLOAT_DTYPES)))
    check_against_reference(
        x,
        data.draw(st.sampled_from(list(FORMATS))),
        data.draw(st.sampled_from(layout.GROUP_SIZES)),
        data.draw(st.sampled_from(layout.SCALE_DTYPES)),
        data.draw(st.sampled_from(layout.ROUNDINGS)),
        data.draw(st.integers(0, 2**40)),
    )


@pytest.mark.parametrize("format", FORMATS)
def test_every_pattern_decodes_like_the_reference(format: str) -> None:
    """Also patterns that no encoder writes and scales that no encoder writes: corrupted bytes must not differ."""
    g = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (4, layout.row_bytes(512, format)), generator=g, dtype=torch.uint8)
    for scale_dtype in layout.SCALE_DTYPES:
        scales = torch.randn(layout.scales_shape(4, 512, format, 32), generator=g).to(scale_dtype)
        flat = scales.view(-1)
        flat[3], flat[5], flat[7], flat[9] = math.inf, math.nan, -1e38, 1e-40
        for dtype in layout.FLOAT_DTYPES:
            got = ops.dequantize(packed, scales, 512, format, 32, dtype)
            assert_same_bits(got, reference.dequantize(packed, scales, 512, format, 32, dtype))


@pytest.mark.parametrize("format", FORMATS)
def test_strides_and_offsets(format: str) -> None:
    base = heavy_tailed(70, 97)
    views = [base.t(), base[:, 5:70], base[::2], base[:, ::3], base[3:4].expand(4, 97), base[:, 0]]
    views += [base.view(7, 10, 97)[:, 2:5], base[:1, :1], base.reshape(-1)[1:130]]
    for view in views:
        packed, scales = ops.quantize(view, format, 32)
        want = ops.quantize(view.clone(memory_format=torch.contiguous_format), format, 32)
        assert_same_bits(packed, want[0])
        assert_same_bits(scales, want[1])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rounding", layout.ROUNDINGS)
def test_accumulate_equals_reference(format: str, rounding: str) -> None:
    seed = torch.tensor([5]) if rounding == "stochastic" else None
    for dtype in layout.FLOAT_DTYPES:
        for cols in (33, 300):
            x, y = heavy_tailed(3, cols, seed=1), heavy_tailed(3, cols, seed=2).clamp(-6e4, 6e4).to(dtype)
            packed, scales = ops.quantize(x, format, 64)
            want = packed.clone(), scales.clone()
            ops.accumulate_(packed, scales, y, 0.37, format, 64, rounding, seed, 11)
            reference.accumulate_(*want, y, 0.37, format, 64, rounding, seed, 11)
            assert_same_bits(packed, want[0])
            assert_same_bits(scales, want[1])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shards", (1, 2, 5))
def test_reduce_equals_reference(format: str, shards: int) -> None:
    cols, group_size = 300, 64
    wire = layout.wire_layout(cols, format, group_size, BF16)
    buffer = torch.zeros(shards, wire.total_bytes, dtype=torch.uint8)
    packed = buffer[:, : wire.codes_bytes].unsqueeze(1)
    scales = buffer[:, wire.scales_offset : wire.scales_offset + wire.scales_bytes].view(BF16)
    scales = scales.view(shards, *layout.scales_shape(1, cols, format, group_size))
    for i in range(shards):
        ops.quantize_out(heavy_tailed(1, cols, seed=i), packed[i], scales[i], format, group_size)
    for dtype in layout.FLOAT_DTYPES:
        got = ops.reduce(packed, scales, cols, format, group_size, 1 / 3, dtype)
        assert_same_bits(got, reference.reduce(packed, scales, cols, format, group_size, 1 / 3, dtype))
        out = torch.empty(1, cols, dtype=dtype)
        ops.reduce_out(packed, scales, out, format, group_size, 1 / 3)
        assert_same_bits(out, got)
    total = reference.reduce(packed, scales, cols, format, group_size, 1 / 3, F32)
    for rounding in layout.ROUNDINGS:
        seed = torch.tensor([9]) if rounding == "stochastic" else None
        out = torch.empty_like(packed[0]), torch.empty_like(scales[0])
        ops.reduce_quantize_out(packed, scales, cols, format, group_size, 1 / 3, *out, rounding, seed, 7)
        want = reference.quantize(total, format, group_size, BF16, rounding, seed, 7)
        assert_same_bits(out[0], want[0])
        assert_same_bits(out[1], want[1])


@pytest.mark.parametrize("format", FORMATS)
def test_norm_equals_reference(format: str) -> None:
    for shape in ((3, 40000), (5, 31), (1, 16384), (0, 8), (2, 0)):
        packed, scales = ops.quantize(heavy_tailed(*shape), format, 128)
        got = ops.norm(packed, scales, shape[1], format, 128)
        want = reference.norm(packed, scales, shape[1], format, 128)
        assert_same_bits(got[0], want[0])
        assert not got[1] and not want[1]


def test_results_do_not_depend_on_threads() -> None:
    x = heavy_tailed(64, 8192)
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 4):
            torch.set_num_threads(n)
            packed, scales = ops.quantize(x, "int5", 128, rounding="stochastic", seed=3)
            results.append((packed, scales, ops.norm(packed, scales, 8192, "int5", 128)[0]))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_same_bits(a, b)


# --- edge values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_zero_groups_decode_to_exact_zeros(format: str) -> None:
    x = torch.zeros(2, 200)
    x[1, 0] = -0.0
    q = agoq_ext.quantize(x, format, 64)
    assert (q.scales == 0).all()
    assert_same_bits(q.dequantize(), torch.zeros(2, 200))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", (1e-36, 1e-40, 1e-45, 3.4028234663852886e38, -3.4028234663852886e38))
def test_extreme_values_stay_finite(format: str, value: float) -> None:
    x = torch.zeros(1, 64)
    x[0, 5] = value
    for dtype in (F32, BF16):
        out = agoq_ext.quantize(x, format, 32).dequantize(dtype)
        assert torch.isfinite(out).all()
        assert (out[0, 6:] == 0).all()
        # A bfloat16 scale is within 2^-7 of amax / qmax, or one subnormal step (9.2e-41) where it is tiny; the
        # quotient then falls between codes, which for fp8 are up to 1/4 (e5m2) apart.
        relative = 2**-3 if format.startswith("fp8") else 2**-7
        assert abs(out[0, 5].item() - value) <= max(abs(value) * relative, 9.2e-41)


@pytest.mark.parametrize("format", FORMATS)
def test_largest_half_stays_finite(format: str) -> None:
    x = torch.full((1, 64), 65504.0, dtype=F16)
    x[0, ::3] *= -1
    out = agoq_ext.quantize(x, format, 32).dequantize()
    assert out.dtype == F16 and torch.isfinite(out).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_nonfinite_values_make_their_group_nan_and_no_other(format: str, bad: float) -> None:
    for dtype in layout.FLOAT_DTYPES:
        x = torch.randn(2, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
        clean = agoq_ext.quantize(x, format, 32).dequantize()
        x[1, 70] = bad
        q = agoq_ext.quantize(x, format, 32)
        out = q.dequantize()
        assert torch.isnan(out[1, 64:96]).all()
        mask = torch.ones(2, 128, dtype=torch.bool)
        mask[1, 64:96] = False
        assert torch.equal(out[mask], clean[mask])
        total, nonfinite = ops.norm(q.packed, q.scales, 128, format, 32)
        assert nonfinite and torch.isnan(total)
        x[1, 70] = 0
        ops.accumulate_(q.packed, q.scales, x, 1.0, format, 32)
        assert torch.isnan(q.dequantize()[1, 64:96]).all(), "accumulation must not hide NaN"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", ((), (1,), (0,), (0, 7), (3, 0), (2, 3, 5), (1, 1)))
def test_shapes(format: str, shape: tuple[int, ...]) -> None:
    x = heavy_tailed(*shape)
    q = agoq_ext.quantize(x, format, 32)
    out = q.dequantize()
    assert out.shape == x.shape and out.dtype == x.dtype
    rows, cols = layout.as_rows(shape)
    assert tuple(q.packed.shape) == layout.packed_shape(rows, cols, format)
    assert tuple(q.scales.shape) == layout.scales_shape(rows, cols, format, 32)
    assert q.nbytes == q.packed.numel() + 2 * q.scales.numel()


def test_bfloat16_does_not_pass_through_half() -> None:
    x = torch.tensor([[1e20, -3e38, 1e-20, 1.0] * 16], dtype=BF16)
    out = agoq_ext.quantize(x, "int8", 32).dequantize()
    assert torch.isfinite(out).all() and (out[0, 1] / -3e38 - 1).abs() < 0.01


# --- stochastic rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_stochastic_rounding_never_moves_a_code_value(format: str) -> None:
    values = reference.code_values(format)
    values = values[torch.isfinite(values)]
    if format in ("int8", "int6", "int5", "int4"):
        values = values[values.abs() <= FORMATS[format].qmax]
    cols = layout.round_up(values.numel(), 32)
    x = values.repeat(2)[:cols][None] * 0.25
    x = torch.cat([x] * (256 // cols), dim=1) if cols < 256 else x
    for seed in range(20):
        q = agoq_ext.quantize(x, format, 256, torch.float32, "stochastic", seed)
        assert torch.equal(q.dequantize(), x)


@pytest.mark.parametrize("format", FORMATS)
def test_stochastic_rounding_is_unbiased(format: str) -> None:
    """The mean of n draws is within 5 standard errors of the value, the error bounded by half the widest step."""
    n = 20000
    row = torch.linspace(-1, 1, 32)[None]
    q = agoq_ext.quantize(row.repeat(n, 1), format, 32, torch.float32, "stochastic", seed=0)
    mean = q.dequantize().double().mean(0)
    values = reference.code_values(format).double().unique()
    values = values[torch.isfinite(values)]
    step = float(values.diff().max()) * float(q.scales.reshape(n, -1)[0, 0])
    assert (mean - row[0]).abs().max() < 5 * (step / 2) / math.sqrt(n)


def test_seeds() -> None:
    x = torch.rand(4, 256, generator=torch.Generator().manual_seed(0))

    def codes(seed: int | Tensor | None = None) -> Tensor:
        return agoq_ext.quantize(x, "int4", 128, rounding="stochastic", seed=seed).packed

    assert torch.equal(codes(1), codes(1)) and torch.equal(codes(1), codes(torch.tensor([1])))
    assert not torch.equal(codes(1), codes(2))
    assert not torch.equal(codes(), codes()), "two calls must not share noise"
    torch.manual_seed(7)
    first = codes()
    torch.manual_seed(7)
    assert torch.equal(first, codes())
    assert torch.equal(codes(-1), codes(2**64 - 1)), "the seed is its 64-bit pattern"
    rows = codes(3)
    assert not torch.equal(
        rows[0], agoq_ext.quantize(x[1:2], "int4", 128, rounding="stochastic", seed=3).packed[0]
    )


def test_chunks_draw_the_same_noise_as_the_whole() -> None:
    x = heavy_tailed(1, 1000)
    packed, _ = ops.quantize(x, "int8", 32, rounding="stochastic", seed=5, element_offset=3)
    parts = [ops.quantize(x[:, i : i + 96], "int8", 32, rounding="stochastic", seed=5, element_offset=3 + i)[0][0, :96]
             for i in range(0, 1000, 96)]  # fmt: skip
    assert torch.equal(torch.cat(parts)[:1000], packed[0, :1000])


# --- torch integration ---------------------------------------------------------------------------------------


def op_samples() -> list[tuple[str, tuple]]:
    x = heavy_tailed(3, 70)
    q = agoq_ext.quantize(x, "uint4", 32)
    seed = torch.tensor([3])
    shards = (torch.stack([q.packed] * 2), torch.stack([q.scales] * 2))
    return [
        ("quantize", (x, "uint4", 32, BF16, "nearest", None, 0)),
        ("quantize", (x.half(), "int5", 64, F32, "stochastic", seed, 5)),
        ("quantize_out", (x, "uint4", 32, "nearest", None, 0, q.packed.clone(), q.scales.clone())),
        ("dequantize", (q.packed, q.scales, 70, "uint4", 32, BF16)),
        ("dequantize_out", (q.packed, q.scales, "uint4", 32, torch.empty(3, 70))),
        ("accumulate_", (q.packed.clone(), q.scales.clone(), x, 0.5, "uint4", 32, "nearest", None, 0)),
        ("reduce", (*shards, 70, "uint4", 32, 0.5, F32)),
        ("reduce_out", (*shards, "uint4", 32, 0.5, torch.empty(3, 70))),
        ("reduce_quantize_out", (*shards, 70, "uint4", 32, 0.5, "nearest", None, 0, q.packed.clone(), q.scales.clone())),
        ("norm", (q.packed, q.scales, 70, "uint4", 32)),
    ]  # fmt: skip


@pytest.mark.parametrize("name,args", op_samples(), ids=lambda v: v if isinstance(v, str) else "")
def test_opcheck(name: str, args: tuple) -> None:
    torch.library.opcheck(getattr(torch.ops.agoq, name).default, args)


@pytest.mark.parametrize("name,args", op_samples(), ids=lambda v: v if isinstance(v, str) else "")
def test_mutation_raises_version_counters(name: str, args: tuple) -> None:
    """Of what is written and of nothing else, so that autograd notices a saved tensor that has changed."""
    op = getattr(torch.ops.agoq, name).default
    tensors = [(a, v) for a, v in zip(op._schema.arguments, args, strict=True) if isinstance(v, Tensor)]
    before = [v._version for _, v in tensors]
    op(*args)
    for (argument, value), version in zip(tensors, before, strict=True):
        written = argument.alias_info is not None and argument.alias_info.is_write
        assert (value._version > version) == written, argument.name


def test_a_changed_saved_tensor_is_noticed() -> None:
    x = torch.randn(2, 64, requires_grad=True)
    factors = torch.zeros(2, 64)
    loss = (x * factors).sum()  # saves factors
    ops.dequantize_out(*ops.quantize(torch.randn(2, 64), "int8", 64), factors, "int8", 64)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_every_op_is_checked() -> None:
    """The fused ops, all named after their stage, are checked in test_fused_ops.py; the head's in test_head.py."""
    registered = {
        schema.name.removeprefix("agoq::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("agoq::") and not schema.name.startswith("agoq::_test")
    }
    fused = {name for name in registered if name.endswith(("_quantize", "_dequantize", "_backward"))}
    assert registered - fused - {"linear_cross_entropy"} == {name for name, _ in op_samples()} | {"cpu_isa"}


@pytest.mark.parametrize("dynamic", (False, True))
def test_compiles_without_graph_breaks(dynamic: bool) -> None:
    def f(x: Tensor) -> Tensor:
        q = agoq_ext.quantize(x * 2, "int4", 32)
        return q.dequantize() + 1

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 5):
        x = heavy_tailed(rows, 70)
        assert torch.equal(compiled(x), f(x))


def test_saves_and_loads() -> None:
    q = agoq_ext.quantize(heavy_tailed(3, 4, 70).bfloat16(), "int6", 32)
    file = io.BytesIO()
    torch.save({"q": q}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["q"]
    assert torch.equal(loaded.dequantize(), q.dequantize())
    assert (loaded.shape, loaded.dtype, loaded.format) == (q.shape, q.dtype, q.format)
    assert loaded.to("cpu") is loaded and loaded.to("meta").device.type == "meta"
    assert "int6" in repr(q)


def test_ops_leave_inputs_alone_and_do_not_track_gradients() -> None:
    x = heavy_tailed(3, 70).requires_grad_()
    before = x.detach().clone()
    q = agoq_ext.quantize(x, "int4", 32)
    assert torch.equal(x.detach(), before)
    assert not q.packed.requires_grad and not q.dequantize().requires_grad


# --- errors --------------------------------------------------------------------------------------------------

X = torch.zeros(2, 64)


@pytest.mark.parametrize(
    "call,message",
    (
        (
            lambda: agoq_ext.quantize(X, group_size=48),
            "quantize: group_size must be one of 32, 64, 128, 256; got 48",
        ),
        (lambda: agoq_ext.quantize(X, "int3"), "quantize: format must be one of int8, .*; got 'int3'"),
        (
            lambda: agoq_ext.quantize(X, rounding="up"),
            "quantize: rounding must be 'nearest' or 'stochastic'; got 'up'",
        ),
        (
            lambda: agoq_ext.quantize(X, scale_dtype=F16),
            "quantize: scale_dtype must be .*; got torch.float16",
        ),
        (lambda: agoq_ext.quantize(X, layout="tiles"), "quantize: layout must be one of rows; got 'tiles'"),
        (
            lambda: agoq_ext.quantize(X, rounding="stochastic", seed=torch.tensor([1.0])),
            "quantize: seed must be an int",
        ),
        (
            lambda: agoq_ext.quantize(X, rounding="stochastic", seed=2**64),
            "quantize: seed must fit in 64 bits",
        ),
        (lambda: ops.quantize(X, element_offset=-1), "quantize: element_offset must not be negative; got -1"),
        (
            lambda: ops.dequantize(*ops.quantize(X), 200, "int4", 128),
            r"dequantize: packed must have shape \(2, 112\); got \(2, 32\)",
        ),
        (
            lambda: ops.accumulate_(*ops.quantize(X), torch.zeros(3, 64), 1.0, "int4", 128),
            r"accumulate_: packed must have shape \(3, 32\); got \(2, 32\)",
        ),
        (
            lambda: ops.reduce(X.byte()[None], X[None, :, :1].bfloat16(), 64, "int4", 128),
            r"reduce: packed must have shape \(1, 2, 32\); got \(1, 2, 64\)",
        ),
        (
            lambda: ops.reduce_out(X.byte()[None], X[None, :, :1].bfloat16(), X[:1], "int8", 128),
            r"reduce_out: packed must have shape \(1, 1, 64\); got \(1, 2, 64\)",
        ),
        (
            lambda: ops.dequantize_out(X.byte(), X[:, :1].bfloat16(), X.t().contiguous().t(), "int8", 128),
            r"dequantize_out: out must be contiguous; got strides \(1, 2\) for shape \(2, 64\)",
        ),
        (
            lambda: ops.dequantize_out(
                X.byte(), X[:, :1].bfloat16(), X.clone().requires_grad_(), "int8", 128
            ),
            "dequantize_out: out must not require gradients",
        ),
        (
            lambda: ops.accumulate_(X.byte(), X[:, :1].bfloat16(), X.to("meta"), 1.0, "int8", 128),
            "accumulate_: x must be on packed's device cpu; got meta",
        ),
    ),
)
def test_value_errors(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "call,message",
    (
        (
            lambda: agoq_ext.quantize(X.double()),
            "quantize: x's dtype must be float32, float16 or bfloat16; got torch.float64",
        ),
        (
            lambda: agoq_ext.quantize([1.0]),
            "quantize: x must be a torch.Tensor or an array with DLPack; got list",
        ),
        (lambda: agoq_ext.quantize(X.to_sparse()), "quantize: x must be a dense"),
        (lambda: agoq_ext.dequantize(X), "dequantize: q must be a QuantizedTensor; got Tensor"),
        (
            lambda: agoq_ext.quantize(X).dequantize(torch.int8),
            "dequantize: dtype must be float32.*got torch.int8",
        ),
        (lambda: ops.norm(X, X[:, :1], 64, "int4", 128), "norm: packed must be uint8; got torch.float32"),
    ),
)
def test_type_errors(call, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_direct_calls_of_the_ops_cannot_reach_out_of_bounds() -> None:
    packed, scales = ops.quantize(X)
    with pytest.raises(RuntimeError, match="packed must be contiguous with shape"):
        torch.ops.agoq.dequantize(packed, scales, 4096, "int4", 128, F32)
    with pytest.raises(RuntimeError, match="scales must be contiguous"):
        torch.ops.agoq.dequantize(packed, scales[:1], 64, "int4", 128, F32)
    with pytest.raises(RuntimeError, match="needs a seed"):
        torch.ops.agoq.quantize(X, "int4", 128, BF16, "stochastic", None, 0)
