"""agoq_ext.nn.functional: values, gradients and saved bytes against plain PyTorch on the decoded inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from agoq_ext import quantize
from agoq_ext.nn import functional as A

EPS = 1e-5
WIDTH, OUT = 96, 40  # a group and a half, and something else
NF4 = {"format": "nf4", "group_size": 64, "scale_dtype": torch.bfloat16}


# --- the plain twins -----------------------------------------------------------------------------------------


def plain_norm(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """LlamaRMSNorm of x, FP32 inside, for an input of `dtype`."""
    hidden = x.to(torch.float32)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * hidden.to(dtype)


class Case:
    """One operator: how to call it, its plain twin, and which of its tensors are saved quantized."""

    def __init__(self, name: str, call: Callable, twin: Callable, quantized: tuple[str, ...], **shapes: Any):
        self.name, self.call, self.twin, self.quantized, self.shapes = name, call, twin, quantized, shapes

    def tensors(
        self, dtype: torch.dtype, lead: tuple[int, ...] = (3, 7), *, params: torch.dtype | None = None
    ):
        generator = torch.Generator().manual_seed(1)
        out = {}
        for name, shape in self.shapes.items():
            size = (*lead, WIDTH) if shape == "data" else shape
            x = torch.randn(size, generator=generator) * (1 if shape == "data" else 0.2)
            out[name] = x.to(dtype if shape == "data" else params or dtype).requires_grad_()
        return out

    def __repr__(self) -> str:
        return self.name


def outputs(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


CASES = [
    Case(
        "linear",
        lambda x, w, b, **k: A.linear(x, w, b, **k),
        lambda d, x, w, b: F.linear(x, w, b),
        ("x",),
        x="data", w=(OUT, WIDTH), b=(OUT,),
    ),
    Case(
        "linear_no_bias",
        lambda x, w, **k: A.linear(x, w, **k),
        lambda d, x, w: F.linear(x, w),
        ("x",),
        x="data", w=(OUT, WIDTH),
    ),
    Case(
        "multi_linear",
        lambda x, w, v, b, **k: A.multi_linear(x, [w, v], [None, b], **k),
        lambda d, x, w, v, b: (F.linear(x, w), F.linear(x, v, b)),
        ("x",),
        x="data", w=(OUT, WIDTH), v=(8, WIDTH), b=(8,),
    ),
    Case(
        "rms_norm",
        lambda x, g, **k: A.rms_norm(x, g, EPS, **k),
        lambda d, x, g: plain_norm(x, g, d),
        ("x",),
        x="data", g=(WIDTH,),
    ),
    Case(
        "rms_norm_linear",
        lambda x, g, w, v, u, b, **k: A.rms_norm_linear(x, g, EPS, [w, v, u], [None, b, None], **k),
        lambda d, x, g, w, v, u, b: (
            F.linear(n := plain_norm(x, g, d), w), F.linear(n, v, b), F.linear(n, u),
        ),
        ("x",),
        x="data", g=(WIDTH,), w=(OUT, WIDTH), v=(8, WIDTH), u=(8, WIDTH), b=(8,),
    ),
    Case(
        "swiglu",
        lambda gate, up, **k: A.swiglu(gate, up, **k),
        lambda d, gate, up: F.silu(gate) * up,
        ("gate", "up"),
        gate="data", up="data",
    ),
    Case(
        "swiglu_linear",
        lambda gate, up, w, b, **k: A.swiglu_linear(gate, up, w, b, **k),
        lambda d, gate, up, w, b: F.linear(F.silu(gate) * up, w, b),
        ("gate", "up"),
        gate="data", up="data", w=(OUT, WIDTH), b=(OUT,),
    ),
]  # fmt: skip
cases = pytest.mark.parametrize("case", CASES, ids=repr)


def autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    return torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def activation(x: Tensor) -> Tensor:
    """No leaf: autocast would take a leaf for a parameter and sum the gradients of its one cached copy in BF16."""
    return leaf(x).clone()


def decoded(
    case: Case, tensors: dict[str, Tensor], cast: torch.dtype | None, **codec: Any
) -> dict[str, Tensor]:
    """The tensors as backward sees them. A norm's input is decoded to FP32, where the norm computes; a linear
    layer's input is what the product reads, after autocast."""
    seen = {}
    for name, x in tensors.items():
        if name not in case.quantized:
            seen[name] = leaf(x)
        elif case.name.startswith("rms_norm"):
            seen[name] = activation(quantize(x, **codec).dequantize(torch.float32))
        elif "linear" in case.name and name == "x":
            seen[name] = activation(quantize(x.to(cast or x.dtype), **codec).dequantize().to(x.dtype))
        else:
            seen[name] = activation(quantize(x, **codec).dequantize())
    return seen


def saved_storages(run: Callable[[], Any]) -> tuple[Any, dict[int, Tensor]]:
    """What `run` returns and the distinct storages it saves for backward, by address."""
    saved: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.detach()
        return x.detach()

    with saved_tensors_hooks(pack, lambda x: x):
        return run(), saved


# --- values and gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "params", "cast"),
    [
        (torch.float32, torch.float32, None),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.float16, torch.float16, None),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.float16),
    ],
    ids=["fp32", "bf16", "fp16", "fp32-autocast", "bf16-autocast", "fp32-autocast-fp16"],
)
@cases
def test_forward_and_gradients_are_those_of_plain_pytorch_on_the_decoded_input(case, dtype, params, cast):
    """Bit for bit: the forward on the input itself, every gradient on the decoded input, and their dtypes."""
    tensors = case.tensors(dtype, params=params)
    with autocast(cast):
        got = outputs(case.call(**tensors, **NF4))
        plain = outputs(case.twin(dtype, **tensors))
        seen = decoded(case, tensors, cast, **NF4)
        exact = outputs(case.twin(dtype, **seen))
    generator = torch.Generator().manual_seed(2)
    upstream = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in got]
    gradients = torch.autograd.grad(got, list(tensors.values()), upstream)
    expected = torch.autograd.grad(exact, list(seen.values()), upstream)
    for y, y_plain in zip(got, plain, strict=True):
        assert y.dtype == y_plain.dtype
        assert torch.equal(y, y_plain)
    for (name, x), dx, dx_exact in zip(tensors.items(), gradients, expected, strict=True):
        assert dx.dtype == x.dtype
        assert torch.equal(dx, dx_exact.to(x.dtype)), f"{name}: {(dx - dx_exact).abs().max()}"


@pytest.mark.parametrize("codec", [("int8", 32, torch.float32), ("uint4", 128, torch.bfloat16)], ids=str)
@cases
def test_every_codec_reaches_the_saved_tensor(case, codec):
    codec = dict(zip(("format", "group_size", "scale_dtype"), codec, strict=True))
    tensors = case.tensors(torch.float32)
    seen = decoded(case, tensors, None, **codec)
    got = torch.autograd.grad(
        [y.sum() for y in outputs(case.call(**tensors, **codec))], list(tensors.values())
    )
    exact = torch.autograd.grad(
        [y.sum() for y in outputs(case.twin(torch.float32, **seen))], list(seen.values())
    )
    assert all(map(torch.equal, got, exact))


@cases
def test_format_none_is_plain_pytorch(case):
    tensors = case.tensors(torch.float64)
    with torch.no_grad():  # the plain norm rounds to FP32 inside
        tensors = {name: x.float().double().requires_grad_() for name, x in tensors.items()}
    got = outputs(case.call(**tensors, format=None))
    plain = outputs(case.twin(torch.float64, **tensors))
    assert all(map(torch.equal, got, plain))
    upstream = [torch.ones_like(y) for y in got]
    inputs = list(tensors.values())
    assert all(
        map(
            torch.equal,
            torch.autograd.grad(got, inputs, upstream),
            torch.autograd.grad(plain, inputs, upstream),
        )
    )


@cases
def test_strided_and_one_row_inputs(case):
    """A transposed input and a single row give what contiguous and batched ones give."""
    tensors = case.tensors(torch.float32, (7, 3))
    strided = {
        n: leaf(x).transpose(0, 1) if case.shapes[n] == "data" else leaf(x) for n, x in tensors.items()
    }
    flat = {n: leaf(strided[n].contiguous()) for n in tensors}
    got = torch.autograd.grad([y.sum() for y in outputs(case.call(**strided))], list(strided.values()))
    expected = torch.autograd.grad([y.sum() for y in outputs(case.call(**flat))], list(flat.values()))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    row = {n: leaf(x[0, 0]) if case.shapes[n] == "data" else leaf(x) for n, x in tensors.items()}
    batch = {n: leaf(x[None]) if case.shapes[n] == "data" else leaf(x) for n, x in row.items()}
    got = torch.autograd.grad([y.sum() for y in outputs(case.call(**row))], list(row.values()))
    expected = torch.autograd.grad([y.sum() for y in outputs(case.call(**batch))], list(batch.values()))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b.reshape(a.shape))


@cases
def test_empty_batch(case):
    tensors = case.tensors(torch.float32, (0, 7))
    got = outputs(case.call(**tensors))
    assert [y.shape[:2] for y in got] == [(0, 7)] * len(got)
    for name, dx in zip(
        tensors, torch.autograd.grad([y.sum() for y in got], list(tensors.values())), strict=True
    ):
        assert dx.shape == tensors[name].shape
        assert not dx.any()


@cases
def test_shapes_on_the_meta_device(case):
    tensors = {n: leaf(x.to("meta")) for n, x in case.tensors(torch.bfloat16).items()}
    got = outputs(case.call(**tensors))
    gradients = torch.autograd.grad([y.sum() for y in got], list(tensors.values()))
    for x, dx in zip(tensors.values(), gradients, strict=True):
        assert (dx.shape, dx.dtype, dx.device) == (x.shape, x.dtype, x.device)


@cases
def test_nan_in_a_saved_input_reaches_the_gradients(case):
    """Nothing non-finite is hidden: the group that held it decodes to NaN."""
    for name in case.quantized:
        tensors = case.tensors(torch.float32)
        with torch.no_grad():
            tensors[name][1, 2, 70] = torch.nan
        got = outputs(case.call(**tensors))
        upstream = [torch.ones_like(y) for y in got]  # finite, as if the loss had swallowed the NaN
        gradients = torch.autograd.grad(got, list(tensors.values()), upstream)
        reached = {n: dx.isnan() for n, dx in zip(tensors, gradients, strict=True) if dx.isnan().any()}
        seen = decoded(case, tensors, None, **NF4)
        exact = torch.autograd.grad(outputs(case.twin(torch.float32, **seen)), list(seen.values()), upstream)
        expected = {n: dx.isnan() for n, dx in zip(tensors, exact, strict=True) if dx.isnan().any()}
        assert reached
        assert reached.keys() == expected.keys()
        assert all(torch.equal(reached[n], expected[n]) for n in reached)


# --- what is saved -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=["plain", "autocast"])
@cases
def test_saved_bytes_are_codes_and_scales_and_the_parameters_themselves(case, cast):
    tensors = case.tensors(torch.float32)
    with autocast(cast):
        _, saved = saved_storages(lambda: case.call(**tensors, **NF4))
    parameters = {x.untyped_storage().data_ptr() for n, x in tensors.items() if n not in case.quantized}
    kept = sum(x.untyped_storage().nbytes() for address, x in saved.items() if address not in parameters)
    assert kept == sum(quantize(tensors[n], **NF4).nbytes for n in case.quantized)


SAVED = [
    # operator, what requires a gradient, what is kept: names of parameters, "q:" for a packed input
    ("linear", "xwb", {"q:x", "w"}),
    ("linear", "x", {"w"}),
    ("linear", "w", {"q:x"}),
    ("linear", "b", set()),
    ("multi_linear", "v", {"q:x"}),
    ("multi_linear", "x", {"w", "v"}),
    ("rms_norm", "x", {"q:x", "g"}),
    ("rms_norm", "g", {"q:x"}),
    ("rms_norm_linear", "x", {"q:x", "g", "w", "v", "u"}),
    ("rms_norm_linear", "g", {"q:x", "w", "v", "u"}),
    ("rms_norm_linear", "w", {"q:x", "g"}),
    ("rms_norm_linear", "b", set()),
    ("swiglu", ["gate"], {"q:gate", "q:up"}),
    ("swiglu", ["up"], {"q:gate"}),
    ("swiglu_linear", ["gate"], {"q:gate", "q:up", "w"}),
    ("swiglu_linear", ["up"], {"q:gate", "w"}),
    ("swiglu_linear", "w", {"q:gate", "q:up"}),
    ("swiglu_linear", "b", set()),
]


@pytest.mark.parametrize(("name", "trained", "kept"), SAVED)
def test_frozen_tensors_keep_nothing_and_the_rest_get_the_same_gradients(name, trained, kept):
    case = next(c for c in CASES if c.name == name)
    tensors = case.tensors(torch.float32)
    everything = torch.autograd.grad([y.sum() for y in outputs(case.call(**tensors))], list(tensors.values()))
    expected = dict(zip(tensors, everything, strict=True))
    for n, x in tensors.items():
        x.requires_grad_(n in trained)
    result, saved = saved_storages(lambda: outputs(case.call(**tensors)))
    names = {x.untyped_storage().data_ptr(): n for n, x in tensors.items()}
    parameters = {names[a] for a in saved if a in names}
    sizes = {n: quantize(tensors[n], **NF4).nbytes for n in case.quantized}
    assert parameters == {n for n in kept if not n.startswith("q:")}
    packed = sum(x.untyped_storage().nbytes() for a, x in saved.items() if a not in names)
    assert packed == sum(sizes[n[2:]] for n in kept if n.startswith("q:"))
    got = torch.autograd.grad([y.sum() for y in result if y.requires_grad], [tensors[n] for n in trained])
    for n, dx in zip(trained, got, strict=True):
        assert torch.equal(dx, expected[n])


@cases
def test_without_gradients_nothing_is_encoded(case, monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("encoded")

    monkeypatch.setattr("agoq_ext.ops.quantize", fail)
    tensors = case.tensors(torch.float32)
    with pytest.raises(AssertionError, match="encoded"):
        case.call(**tensors)
    with torch.no_grad():
        result, saved = saved_storages(lambda: outputs(case.call(**tensors)))
    assert not saved
    assert not any(y.requires_grad for y in result)
    with torch.inference_mode():
        case.call(**tensors)
    case.call(**{n: x.detach() for n, x in tensors.items()})


@cases
def test_the_saved_copy_is_not_the_input(case):
    """Writing over the input after the forward neither changes the gradients nor raises."""
    tensors = case.tensors(torch.float32)
    inputs = list(tensors.values())
    expected = torch.autograd.grad([y.sum() for y in outputs(case.call(**tensors))], inputs)
    result = outputs(case.call(**tensors))
    with torch.no_grad():
        for n in case.quantized:
            tensors[n].zero_()
    assert all(map(torch.equal, torch.autograd.grad([y.sum() for y in result], inputs), expected))


def test_a_changed_weight_is_noticed():
    case = CASES[0]
    tensors = case.tensors(torch.float32)
    y = case.call(**tensors).sum()
    with torch.no_grad():
        tensors["w"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# --- autocast, checkpointing, compilation --------------------------------------------------------------------


@cases
def test_backward_inside_an_autocast_region_keeps_the_forward_dtypes(case):
    """FP32 products stay FP32 although backward itself is called under autocast, and autocast ones stay BF16."""
    tensors = case.tensors(torch.float32)
    inputs = list(tensors.values())
    for cast in (None, torch.bfloat16):
        with autocast(cast):
            expected = [y.float().sum() for y in outputs(case.call(**tensors))]
            result = [y.float().sum() for y in outputs(case.call(**tensors))]
        outside = torch.autograd.grad(expected, inputs)
        with torch.autocast("cpu", torch.bfloat16):
            inside = torch.autograd.grad(result, inputs)
        assert all(map(torch.equal, inside, outside))


def test_no_copy_without_gradient_history_is_left_in_the_autocast_cache():
    """A plain use of the same weight in the same region still gets its gradient."""
    case = CASES[0]
    tensors = case.tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        case.call(**tensors)
        y = F.linear(tensors["x"], tensors["w"])
    assert torch.autograd.grad(y.float().sum(), tensors["w"])[0].any()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=["plain", "autocast"])
@cases
def test_under_activation_checkpointing(case, cast, reentrant):
    tensors = case.tensors(torch.float32)
    inputs = list(tensors.values())

    def run(*args: Tensor) -> Tensor:
        return sum(y.float().square().sum() for y in outputs(case.call(*args)))

    with autocast(cast):
        run(*inputs).backward()
        expected = [x.grad for x in inputs]
        for x in inputs:
            x.grad = None
        y, saved = saved_storages(lambda: checkpoint(run, *inputs, use_reentrant=reentrant))
    assert not any(x.dtype == torch.uint8 for x in saved.values())
    y.backward()
    assert all(map(torch.equal, [x.grad for x in inputs], expected))


@cases
def test_double_backward_is_refused(case):
    tensors = case.tensors(torch.float32)
    y = sum(y.sum() for y in outputs(case.call(**tensors)))
    with pytest.raises(RuntimeError, match=r"\w+: double backward is not supported"):
        torch.autograd.grad(y, list(tensors.values()), create_graph=True)


@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=["plain", "autocast"])
def test_compiles_without_graph_breaks(cast):
    """Forward and backward of every operator in one full graph: the results of eager, bit for bit."""

    def run(x: Tensor, g: Tensor, w: Tensor, other: Tensor, square: Tensor, b: Tensor) -> Tensor:
        q, k, v = A.rms_norm_linear(x, g, EPS, [square, w, other], [None, b, None])
        h = A.rms_norm(q, g, EPS)
        a, c = A.multi_linear(A.linear(h, square), [square, w])
        return A.swiglu_linear(a, A.swiglu(a, h), w, b) * k + v + c

    generator = torch.Generator().manual_seed(3)
    sizes = [(3, 7, WIDTH), (WIDTH,), (OUT, WIDTH), (OUT, WIDTH), (WIDTH, WIDTH), (OUT,)]
    tensors = [(torch.randn(s, generator=generator) * 0.3).requires_grad_() for s in sizes]
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with autocast(cast):
        eager = run(*tensors)
        got, saved = saved_storages(lambda: compiled(*tensors))
    assert torch.equal(got, eager)
    upstream = torch.randn(eager.shape, generator=generator).to(eager.dtype)
    expected = torch.autograd.grad(eager, tensors, upstream)
    assert all(map(torch.equal, torch.autograd.grad(got, tensors, upstream), expected))
    assert any(x.dtype == torch.uint8 for x in saved.values())


# --- wrong arguments -----------------------------------------------------------------------------------------


def test_wrong_arguments_are_named():
    x, w, g = torch.randn(2, 8), torch.randn(4, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"linear: format must be one of .*; got 'int3'"):
        A.linear(x, w, format="int3")
    with pytest.raises(ValueError, match=r"linear: group_size must be one of 32, 64, 128, 256; got 48"):
        A.linear(x, w, group_size=48)
    with pytest.raises(ValueError, match=r"swiglu: scale_dtype must be .*; got torch.float16"):
        A.swiglu(x, x, scale_dtype=torch.float16)
    with pytest.raises(TypeError, match=r"swiglu: up's dtype must be float32, .*; got torch.float64"):
        A.swiglu(x, x.double())
    with pytest.raises(TypeError, match=r"linear: x must be a torch.Tensor; got list"):
        A.linear([1.0], w)
    with pytest.raises(ValueError, match=r"linear: weight must have shape \[out, 8\]; got \(8, 4\)"):
        A.linear(x, w.t())
    with pytest.raises(ValueError, match=r"linear: bias must have shape \(4,\); got \(8,\)"):
        A.linear(x, w, g)
    with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \(8,\); got \(4,\)"):
        A.rms_norm(x, g[:4])
    with pytest.raises(ValueError, match=r"rms_norm_linear: weights must hold at least one weight; got none"):
        A.rms_norm_linear(x, g, EPS, [])
    with pytest.raises(
        ValueError, match=r"rms_norm_linear: biases must hold one entry for each of 2 weights; got 1"
    ):
        A.rms_norm_linear(x, g, EPS, [w, w], [None])
    with pytest.raises(ValueError, match=r"swiglu_linear: up must have gate's shape \(2, 8\); got \(8,\)"):
        A.swiglu_linear(x, x[0], w)
    with pytest.raises(ValueError, match=r"linear: x must have at least one dimension; got a scalar"):
        A.linear(x[0, 0], w)
