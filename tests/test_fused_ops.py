"""The fused norms and activations on the CPU: against their readable twins, and against plain PyTorch.

Packed results have quantize's bits. The others may differ from the reference where FP32 sums are added in another order
and where exp, erf or tanh end in another last place: by a few FP32 roundings, and by one unit in the last place of the
output's dtype for each rounding to it on the way (a value next to a midpoint may fall to the other side).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agoq_ext import fused_ops, layout, ops, reference_fused

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-5
FORMATS = list(layout.FORMATS)
SHAPES = ((1, 1), (3, 31), (5, 64), (2, 96), (4, 300), (2, 1536))


def randn(*shape: int, seed: int, dtype: torch.dtype = F32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_near(got: Tensor | None, want: Tensor | None, roundings: int = 1) -> None:
    """Equal up to `roundings` units in the last place of the dtype, and FP32 sums relative to a row's largest value."""
    if want is None:
        assert got is None
        return
    assert got is not None and got.dtype == want.dtype and got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan())
    if want.numel() == 0:
        return
    x, y = got.double().nan_to_num(), want.double().nan_to_num()
    sums = 4e-6 * y.abs().amax(-1, keepdim=True)
    error = (x - y).abs() - sums - roundings * torch.finfo(want.dtype).eps * y.abs()
    assert error.max() <= 0, (
        f"off by {(x - y).abs().max():.3g} at {(error == error.max()).nonzero()[0].tolist()}"
    )


def assert_same(got: Tensor | None, want: Tensor | None) -> None:
    if want is None:
        assert got is None
    else:
        assert (
            got is not None
            and got.dtype == want.dtype
            and torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        )


class Case:
    """One family of ops: how to make its arguments, and how its results compare to the twin's."""

    def __init__(self, name: str, run: Callable[..., list[tuple[Tensor | None, int]]]):
        self.name, self.run = name, run

    def __repr__(self) -> str:
        return self.name


# Each runs quantize, dequantize and backward of a module (fused_ops or reference_fused) and returns pairs of a result and
# its roundings; 0 stands for equal bits.


def run_rms_norm(module: Any, shape, dtypes, format, group_size, scale_dtype):
    dtype, weight_dtype = dtypes
    x, weight = randn(*shape, seed=1, dtype=dtype), randn(shape[-1], seed=2, dtype=weight_dtype)
    y, packed, scales = module.rms_norm_quantize(x, weight, EPS, format, group_size, scale_dtype)
    again = module.rms_norm_dequantize(packed, scales, shape[-1], weight, EPS, format, group_size, dtype)
    dy = randn(*shape, seed=3, dtype=y.dtype)
    dx, dweight = module.rms_norm_backward(dy, packed, scales, weight, EPS, format, group_size, dtype)
    only_dx, absent = module.rms_norm_backward(
        dy, packed, scales, weight, EPS, format, group_size, dtype, False
    )
    absent_too, only_dweight = module.rms_norm_backward(
        dy, packed, scales, None, EPS, format, group_size, dtype
    )
    assert absent is None and absent_too is None
    assert torch.equal(only_dx, dx) and torch.equal(only_dweight, dweight)
    return [(packed, 0), (scales, 0), (y, 2), (again, 2), (dx, 3), (dweight, 1)]


def run_layer_norm(module: Any, shape, dtypes, format, group_size, scale_dtype):
    dtype, weight_dtype = dtypes
    x = randn(*shape, seed=1, dtype=dtype)
    weight, bias = randn(shape[-1], seed=2, dtype=weight_dtype), randn(shape[-1], seed=4, dtype=weight_dtype)
    results: list[tuple[Tensor | None, int]] = []
    for w, b in ((weight, bias), (weight, None), (None, None)):
        y, packed, scales = module.layer_norm_quantize(x, w, b, EPS, format, group_size, scale_dtype)
        again = module.layer_norm_dequantize(packed, scales, shape[-1], w, b, EPS, format, group_size, dtype)
        dy = randn(*shape, seed=3, dtype=y.dtype)
        grads = module.layer_norm_backward(dy, packed, scales, w, EPS, format, group_size, dtype)
        one = module.layer_norm_backward(
            dy, packed, scales, w, EPS, format, group_size, dtype, False, False, True
        )
        assert one[:2] == (None, None) and torch.equal(one[2], grads[2])
        results += [(packed, 0), (scales, 0), (y, 1), (again, 1), *((g, 1) for g in grads)]
    return results


def run_swiglu(module: Any, shape, dtypes, format, group_size, scale_dtype):
    gate, up = randn(*shape, seed=1, dtype=dtypes[0], scale=3), randn(*shape, seed=2, dtype=dtypes[1])
    codec = (format, group_size)
    h, *kept = module.swiglu_quantize(gate, up, *codec, scale_dtype)
    h2, gate_packed, gate_scales, *absent = module.swiglu_quantize(
        gate, up, *codec, scale_dtype, keep_up=False
    )
    assert torch.equal(h2, h) and absent == [None, None]
    assert torch.equal(gate_packed, kept[0]) and torch.equal(gate_scales, kept[1])
    again = module.swiglu_dequantize(*kept, shape[-1], *codec, *dtypes)
    dh = randn(*shape, seed=3, dtype=h.dtype)
    grads = module.swiglu_backward(dh, *kept, *codec, *dtypes, need_h=True)
    assert torch.equal(grads[2], again)
    only_dup = module.swiglu_backward(dh, *kept[:2], None, None, *codec, *dtypes, need_dgate=False)
    assert only_dup[0] is None and only_dup[2] is None and torch.equal(only_dup[1], grads[1])
    return [*((k, 0) for k in kept), (h, 2), (again, 2), *((g, 2) for g in grads)]


def run_gelu(module: Any, shape, dtypes, format, group_size, scale_dtype):
    x = randn(*shape, seed=1, dtype=dtypes[0], scale=3)
    results: list[tuple[Tensor | None, int]] = []
    for approximate in ("none", "tanh"):
        y, packed, scales = module.gelu_quantize(x, approximate, format, group_size, scale_dtype)
        again = module.gelu_dequantize(packed, scales, shape[-1], approximate, format, group_size, dtypes[0])
        dy = randn(*shape, seed=3, dtype=y.dtype)
        dx, y2 = module.gelu_backward(
            dy, packed, scales, approximate, format, group_size, dtypes[0], need_y=True
        )
        assert torch.equal(y2, again)
        results += [(packed, 0), (scales, 0), (y, 1), (again, 1), (dx, 1)]
    return results


CASES = [
    Case("rms_norm", run_rms_norm),
    Case("layer_norm", run_layer_norm),
    Case("swiglu", run_swiglu),
    Case("gelu", run_gelu),
]
cases = pytest.mark.parametrize("case", CASES, ids=repr)
MIXED = [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F32, BF16)]


def compare(case: Case, *arguments: Any) -> None:
    got, want = case.run(fused_ops, *arguments), case.run(reference_fused, *arguments)
    for (x, roundings), (y, _) in zip(got, want, strict=True):
        if roundings == 0:
            assert_same(x, y)
        else:
            assert_near(x, y, roundings)


# --- the reference -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@cases
def test_equals_the_reference(case: Case, format: str) -> None:
    for i, shape in enumerate(SHAPES):
        group_size = layout.GROUP_SIZES[(i + FORMATS.index(format)) % 4]
        compare(
            case,
            shape,
            MIXED[(i + FORMATS.index(format)) % 5],
            format,
            group_size,
            layout.SCALE_DTYPES[i % 2],
        )


@pytest.mark.parametrize("dtypes", MIXED, ids=str)
@cases
def test_every_pair_of_dtypes(case: Case, dtypes) -> None:
    for (format, group_size), shape in itertools.product((("nf4", 64), ("int6", 128)), ((9, 200), (3, 64))):
        compare(case, shape, dtypes, format, group_size, BF16)


@cases
def test_empty_tensors(case: Case) -> None:
    for shape in ((0, 64), (3, 0), (0, 0)):
        compare(case, shape, (F32, F32), "int4", 32, BF16)


def test_more_rows_than_parts_and_batches_of_them() -> None:
    """The sums over rows are cut into parts; 200 rows are more than there are parts."""
    compare(CASES[0], (2, 100, 40), (BF16, BF16), "int8", 32, F32)
    compare(CASES[1], (2, 100, 40), (F32, F32), "int8", 32, F32)


# --- plain PyTorch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_twins_are_plain_pytorch(dtype: torch.dtype) -> None:
    """reference_fused against PyTorch's own operators and their autograd, on the decoded input."""
    codec = ("int8", 32, F32)
    x, w, b = (
        randn(6, 96, seed=1, dtype=dtype),
        randn(96, seed=2, dtype=dtype),
        randn(96, seed=3, dtype=dtype),
    )
    y, packed, scales = reference_fused.layer_norm_quantize(x, w, b, EPS, *codec)
    assert_near(y, F.layer_norm(x, (96,), w, b, EPS))
    seen = ops.dequantize(packed, scales, 96, *codec[:2], F32).requires_grad_()
    w32, b32 = w.float().requires_grad_(), b.float().requires_grad_()
    dy = randn(6, 96, seed=4, dtype=dtype)
    want = torch.autograd.grad(F.layer_norm(seen, (96,), w32, b32, EPS), (seen, w32, b32), dy.float())
    got = reference_fused.layer_norm_backward(dy, packed, scales, w, EPS, *codec[:2], dtype)
    assert_near(got[0], want[0].to(dtype))
    assert_near(got[1], want[1])
    assert_near(got[2], want[2])

    for approximate in ("none", "tanh"):
        _, packed, scales = reference_fused.gelu_quantize(x, approximate, *codec)
        seen = ops.dequantize(packed, scales, 96, *codec[:2], dtype).requires_grad_()
        want_y = F.gelu(seen, approximate=approximate)
        got_dx, got_y = reference_fused.gelu_backward(
            dy, packed, scales, approximate, *codec[:2], dtype, True
        )
        assert_near(got_y, want_y.detach())
        assert_near(got_dx, torch.autograd.grad(want_y, seen, dy)[0])

    up = randn(6, 96, seed=5, dtype=dtype)
    _, *kept = reference_fused.swiglu_quantize(x, up, *codec)
    gate = ops.dequantize(*kept[:2], 96, *codec[:2], dtype).requires_grad_()
    up = ops.dequantize(*kept[2:], 96, *codec[:2], dtype).requires_grad_()
    want = torch.autograd.grad(F.silu(gate) * up, (gate, up), dy)
    got = reference_fused.swiglu_backward(dy, *kept, *codec[:2], dtype, dtype)
    assert_near(got[0], want[0])
    assert_near(got[1], want[1])


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_activations_on_every_bfloat16(name: str) -> None:
    """All bfloat16 numbers in FP32: at most 4e-7 of max(|x|, 1) off; NaN and infinities where the formula has them."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16).float().reshape(1, -1)
    if name == "silu":
        got, want = fused_ops.swiglu_quantize(x, torch.ones_like(x), "int8", 32)[0], F.silu(x.double())
    else:
        approximate = "tanh" if name == "gelu_tanh" else "none"
        got = fused_ops.gelu_quantize(x, approximate, "int8", 32)[0]
        want = reference_fused.gelu(x.double(), approximate)
    assert torch.equal(got.isnan(), want.isnan())
    finite = want.isfinite()
    assert torch.equal(got[~finite].double().nan_to_num(), want[~finite].nan_to_num())
    error = ((got - want).abs() / x.abs().clamp(min=1))[finite]
    assert error.max() < 4e-7, f"{error.max():.3g}"


# --- contracts -----------------------------------------------------------------------------------------------


@cases
def test_results_do_not_depend_on_threads(case: Case) -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            results.append(case.run(fused_ops, (700, 256), (BF16, BF16), "nf4", 64, BF16))
    finally:
        torch.set_num_threads(threads)
    for (a, _), (b, _) in zip(*results, strict=True):
        assert_same(a, b)


def test_strides_and_offsets() -> None:
    base = randn(40, 130, seed=7)
    for view in (
        base.t(),
        base[:, 3:70],
        base[::2],
        base[:, ::2],
        base[3:4].expand(4, 130),
        base.view(4, 10, 130)[:, 2:5],
    ):
        cols, weight = view.shape[-1], randn(view.shape[-1] * 2, seed=8)[::2]
        flat = view.clone(memory_format=torch.contiguous_format)
        got = fused_ops.rms_norm_quantize(view, weight, EPS, "int4", 32)
        want = fused_ops.rms_norm_quantize(flat, weight.contiguous(), EPS, "int4", 32)
        back = fused_ops.rms_norm_backward(view, *got[1:], weight, EPS, "int4", 32, F32)
        want_back = fused_ops.rms_norm_backward(flat, *got[1:], weight.contiguous(), EPS, "int4", 32, F32)
        got += fused_ops.swiglu_quantize(view, flat, "int4", 32) + back
        want += fused_ops.swiglu_quantize(flat, flat, "int4", 32) + want_back
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)
        assert got[0].shape == (view.numel() // cols, cols)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nothing_non_finite_is_hidden(value: float) -> None:
    x = randn(3, 96, seed=1)
    x[1, 70] = value
    weight, dy = torch.ones(96), torch.ones(3, 96)
    y, packed, scales = fused_ops.rms_norm_quantize(x, weight, EPS, "nf4", 64)
    assert not y[1, 70].isfinite() and y[[0, 2]].isfinite().all()
    dx, dweight = fused_ops.rms_norm_backward(dy, packed, scales, weight, EPS, "nf4", 64, F32)
    assert dx[1].isnan().all() and dx[[0, 2]].isfinite().all() and dweight.isnan().all()
    h, *kept = fused_ops.swiglu_quantize(x, dy, "nf4", 64)
    grads = fused_ops.swiglu_backward(dy, *kept, "nf4", 64, F32, F32)
    assert grads[0][1, 64:].isnan().all() and grads[0][1, :64].isfinite().all()


def test_opcheck() -> None:
    x, w = randn(3, 70, seed=1, dtype=BF16), randn(70, seed=2, dtype=BF16)
    codec = ("uint4", 32)
    y, packed, scales = fused_ops.rms_norm_quantize(x, w, EPS, *codec)
    kept = (packed, scales, packed, scales)
    agoq, check = torch.ops.agoq, torch.library.opcheck
    check(agoq.rms_norm_quantize.default, (x, w, EPS, *codec, BF16))
    check(agoq.rms_norm_dequantize.default, (packed, scales, 70, w, EPS, *codec, BF16))
    check(agoq.rms_norm_backward.default, (y, packed, scales, w, EPS, *codec, BF16, True))
    check(agoq.rms_norm_backward.default, (y, packed, scales, None, EPS, *codec, BF16, False))
    check(agoq.layer_norm_quantize.default, (x, w, None, EPS, *codec, BF16))
    check(agoq.layer_norm_dequantize.default, (packed, scales, 70, w, w, EPS, *codec, BF16))
    check(agoq.layer_norm_backward.default, (y, packed, scales, w, EPS, *codec, BF16, True, False, True))
    check(agoq.swiglu_quantize.default, (x, x, *codec, BF16, True))
    check(agoq.swiglu_quantize.default, (x, x, *codec, BF16, False))
    check(agoq.swiglu_dequantize.default, (*kept, 70, *codec, BF16, F32))
    check(agoq.swiglu_backward.default, (x, *kept, *codec, BF16, BF16, True, False, True))
    check(
        agoq.swiglu_backward.default, (x, packed, scales, None, None, *codec, BF16, BF16, False, True, False)
    )
    check(agoq.gelu_quantize.default, (x, "none", *codec, BF16))
    check(agoq.gelu_dequantize.default, (packed, scales, 70, "tanh", *codec, BF16))
    check(agoq.gelu_backward.default, (y, packed, scales, "tanh", *codec, BF16, True))


def test_errors_name_op_argument_requirement_and_value() -> None:
    x, w = torch.ones(2, 64), torch.ones(64)
    codec = ("int4", 32)
    y, packed, scales = fused_ops.rms_norm_quantize(x, w, EPS, *codec)
    saved, no_up = (packed, scales), (packed, scales, None, None)
    agoq, dtypes = torch.ops.agoq, (F32, F32)
    for call, error, message in (
        (
            lambda: fused_ops.rms_norm_quantize(x, w[:5], EPS, *codec),
            ValueError,
            r"rms_norm_quantize: weight must have shape \(64,\); got \(5,\)",
        ),
        (
            lambda: fused_ops.rms_norm_quantize(x, w, EPS, "int4", 48),
            ValueError,
            "rms_norm_quantize: group_size must be one of .*; got 48",
        ),
        (
            lambda: fused_ops.layer_norm_quantize(x.double(), w, None, EPS, *codec),
            TypeError,
            "layer_norm_quantize: x's dtype must be .*; got torch.float64",
        ),
        (
            lambda: fused_ops.rms_norm_backward(y[:1], *saved, w, EPS, *codec, F32),
            ValueError,
            "rms_norm_backward: dy must have packed's 2 rows; got 1",
        ),
        (
            lambda: fused_ops.swiglu_quantize(x, x[:1], *codec),
            ValueError,
            r"swiglu_quantize: up must have shape \(2, 64\); got \(1, 64\)",
        ),
        (
            lambda: fused_ops.swiglu_backward(x, *no_up, *codec, *dtypes),
            ValueError,
            "swiglu_backward: up_packed and up_scales must be given",
        ),
        (
            lambda: fused_ops.gelu_quantize(x, "fast", *codec),
            ValueError,
            "gelu_quantize: approximate must be one of none, tanh; got 'fast'",
        ),
        (
            lambda: agoq.rms_norm_backward(x[:1], *saved, w, EPS, *codec, F32, True),
            RuntimeError,
            "rms_norm_backward: dy must be",
        ),
        (
            lambda: agoq.swiglu_backward(x, *no_up, *codec, *dtypes, True, True, False),
            RuntimeError,
            "swiglu_backward: dgate and h need up_packed",
        ),
    ):
        with pytest.raises(error, match=message):
            call()
