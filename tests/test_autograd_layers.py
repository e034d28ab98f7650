"""layer_norm, layer_norm_linear and activation_linear: PyTorch's values, gradients of the decoded input, what is kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agoq_ext.activation import activation_report
from agoq_ext.autograd_layers import ACTIVATIONS
from agoq_ext.nn import functional as agoq
from agoq_ext.tensor import quantize

ROWS, COLS = (3, 5), 80
CASES = [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)]
IDS = ["fp32", "bf16", "autocast"]


def tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def decoded(x: Tensor, format: str = "nf4") -> Tensor:
    return quantize(x.detach(), format, 64).dequantize().requires_grad_()


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    douts = [tensor(*y.shape, seed=50 + i, dtype=y.dtype).detach() for i, y in enumerate(outputs)]
    return torch.autograd.grad(outputs, inputs, douts)


def equal(got: Sequence[Tensor], expected: Sequence[Tensor], rtol: float) -> None:
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape
        assert (g - e).float().norm() <= rtol * e.float().norm()


@pytest.mark.parametrize(("dtype", "cast"), CASES, ids=IDS)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_and_its_projections(dtype, cast, affine):
    x = tensor(*ROWS, COLS, seed=0, dtype=dtype)
    g, b = (tensor(COLS, seed=s, dtype=dtype) for s in (1, 2)) if affine else (None, None)
    weights = [tensor(n, COLS, seed=3 + n, dtype=dtype) for n in (24, 8)]
    biases = [tensor(24, seed=7, dtype=dtype), None]
    at = decoded(x)
    parameters = [p for p in (g, b, *weights, biases[0]) if p is not None]
    with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
        got = agoq.layer_norm_linear(x, g, b, 1e-5, weights, biases)
        normed = F.layer_norm(x, (COLS,), g, b, 1e-5)
        exact = [F.linear(normed, w, c) for w, c in zip(weights, biases, strict=True)]
        shifted = F.layer_norm(at, (COLS,), g, b, 1e-5)
        expected = [F.linear(shifted, w, c) for w, c in zip(weights, biases, strict=True)]
    assert all(map(torch.equal, got, exact))
    equal(gradients(got, (x, *parameters)), gradients(expected, (at, *parameters)), 1e-6)
    with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
        got = agoq.layer_norm(x, g, b)
        assert torch.equal(got, F.layer_norm(x, (COLS,), g, b))
        expected = F.layer_norm(at, (COLS,), g, b)
    affine_parameters = parameters[:2] if affine else []
    equal(gradients([got], (x, *affine_parameters)), gradients([expected], (at, *affine_parameters)), 1e-6)


@pytest.mark.parametrize(("dtype", "cast"), CASES, ids=IDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_linear(dtype, cast, activation):
    x = tensor(*ROWS, COLS, seed=0, dtype=dtype)
    weight, bias = tensor(24, COLS, seed=1, dtype=dtype), tensor(24, seed=2, dtype=dtype)
    at = decoded(x)
    function = ACTIVATIONS[activation][0]
    with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
        got = agoq.activation_linear(x, weight, bias, activation)
        assert torch.equal(got, F.linear(function(x), weight, bias))
        expected = F.linear(function(at), weight, bias)
    # gelu_new's derivative is taken from PyTorch's own tanh approximation.
    rtol = 1e-6 if activation != "gelu_new" else (1e-5 if dtype == torch.float32 else 1e-2)
    equal(gradients([got], (x, weight, bias)), gradients([expected], (at, weight, bias)), rtol)


class Pair(nn.Module):
    """Norm -> linear -> GELU -> linear."""

    def __init__(self, format: str | None = "int6") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)
        self.format = format

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        (hidden,) = agoq.layer_norm_linear(
            x, norm.weight, norm.bias, norm.eps, [self.up.weight], [self.up.bias], format=self.format
        )
        return agoq.activation_linear(hidden, self.down.weight, self.down.bias, format=self.format)


def test_what_is_kept():
    x = tensor(32, 64, seed=0, dtype=torch.bfloat16)
    pair = Pair().bfloat16()
    both = [quantize(torch.zeros(32, n), "int6", 64).nbytes for n in (64, 128)]
    assert activation_report(pair, x).total_bytes == sum(both)
    pair.requires_grad_(False)
    assert activation_report(pair, x).total_bytes == sum(both)  # dx reads both
    pair.down.requires_grad_(True)
    assert activation_report(pair, x.detach()).total_bytes == both[1]
    pair.requires_grad_(False)
    pair.up.bias.requires_grad_(True)
    assert activation_report(pair, x.detach()).total_bytes == both[1]
    with torch.no_grad():
        assert not pair(x).requires_grad


def test_checkpointing_compiling_and_double_backward():
    x, pair = tensor(32, 64, seed=0), Pair()
    parameters = (x, *pair.parameters())
    expected = torch.autograd.grad(pair(x).square().sum(), parameters)
    again = checkpoint(pair, x, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(again.square().sum(), parameters), expected))
    torch._dynamo.reset()
    compiled = torch.compile(pair, backend="aot_eager", fullgraph=True)
    equal(torch.autograd.grad(compiled(x).square().sum(), parameters), expected, 1e-5)
    with pytest.raises(RuntimeError, match="activation_linear: double backward is not supported"):
        torch.autograd.grad(pair(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="layer_norm: double backward is not supported"):
        torch.autograd.grad(agoq.layer_norm(x, None).sin().sum(), x, create_graph=True)
    plain = Pair(None)
    exact = torch.autograd.grad(plain(x).square().sum(), (x, *plain.parameters()))
    equal(expected, exact, 0.1)


def test_an_output_that_nobody_reads():
    x = tensor(32, 64, seed=0)
    weights = [tensor(8, 64, seed=1), tensor(8, 64, seed=2)]
    first, _ = agoq.layer_norm_linear(x, None, None, 1e-5, weights)
    got = torch.autograd.grad(first.sum(), (x, *weights), allow_unused=True)
    assert got[2] is None and got[1].any()


def test_wrong_arguments_are_named():
    x = tensor(4, 64, seed=0)
    with pytest.raises(ValueError, match="activation must be one of gelu, .*; got 'tanh'"):
        agoq.activation_linear(x, tensor(8, 64, seed=1), activation="tanh")
    with pytest.raises(ValueError, match=r"layer_norm: bias must have shape \(64,\); got \(63,\)"):
        agoq.layer_norm(x, None, tensor(63, seed=1))
    with pytest.raises(ValueError, match="weights must hold at least one weight"):
        agoq.layer_norm_linear(x, None, None, 1e-5, [])
