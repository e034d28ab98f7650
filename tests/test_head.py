"""linear_cross_entropy: PyTorch's values and gradients without ever holding the logits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from agoq_ext import head
from agoq_ext.activation import activation_report
from agoq_ext.nn.functional import linear_cross_entropy
from agoq_ext.tensor import quantize

TOKENS, HIDDEN, VOCABULARY = (2, 15), 64, 700


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three blocks of the vocabulary, the last one short."""
    monkeypatch.setattr(head, "BLOCK_ELEMENTS", 30 * 300)
    yield


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(VOCABULARY, HIDDEN, generator=generator)).to(dtype).requires_grad_()
    bias = torch.randn(VOCABULARY, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(VOCABULARY, TOKENS, generator=generator)
    target[0, 3] = -100
    target[1, :4] = torch.tensor([0, 299, 300, VOCABULARY - 1])
    return x, weight, bias, target


def plain(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: str) -> Tensor:
    logits = F.linear(x, weight, bias).float().flatten(0, 1)
    loss = F.cross_entropy(logits, target.flatten(), **options)
    return loss.view(target.shape) if loss.dim() else loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("dtype", "cast", "rtol"),
    [(torch.float32, None, 1e-5), (torch.bfloat16, None, 1e-2), (torch.float32, torch.bfloat16, 1e-2)],
    ids=["fp32", "bf16", "autocast"],
)
@pytest.mark.parametrize("biased", [False, True])
def test_values_and_gradients_are_pytorchs(dtype, cast, rtol, reduction, biased):
    x, weight, bias, target = inputs(dtype)
    given = (x, weight, *([bias] if biased else []))
    results = []
    for function in (linear_cross_entropy, plain):
        with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
            loss = function(x, weight, target, bias if biased else None, reduction=reduction)
        scale = torch.linspace(1, 2, loss.numel()).view(loss.shape)
        results.append((loss, *torch.autograd.grad((loss * scale).sum(), given)))
    got, expected = results
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
    for g, e in zip(got[1:], expected[1:], strict=True):
        assert g.dtype == e.dtype
        assert (g - e).float().norm() <= rtol * e.float().norm()


def test_what_is_kept():
    x, weight, _, target = inputs(torch.bfloat16)
    tokens = target.numel()

    class Head(torch.nn.Module):
        format: str | None = None

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight.detach())

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return linear_cross_entropy(x, self.weight, target, reduction="sum", format=self.format)

    module = Head()
    assert activation_report(module, (x, target)).total_bytes == tokens * (2 * HIDDEN + 8 + 4)
    module.format = "int8"
    coded = quantize(x.detach(), "int8", 64).nbytes
    assert activation_report(module, (x, target)).total_bytes == coded + tokens * (8 + 4)


def test_the_logits_never_exist_whole():
    """No tensor of forward or backward has more elements than a block's logits or a parameter."""
    x, weight, _, target = inputs()
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor) and t.shape != weight.shape]
            largest = max([largest, *sizes])
            return out

    with Watch():
        linear_cross_entropy(x, weight, target).backward()
    watched = largest
    with Watch():
        plain(x, weight, target, None).backward()
    rows = head.block_rows(30, VOCABULARY)
    assert rows == 300
    assert watched <= max(30 * rows, rows * HIDDEN) < VOCABULARY * 30 <= largest


def test_a_quantized_input_and_a_frozen_weight():
    x, weight, _, target = inputs()
    weight.requires_grad_(False)
    linear_cross_entropy(x, weight, target, format="int6").backward()
    assert weight.grad is None
    exact = torch.autograd.grad(plain(x, weight, target, None), x)[0]
    assert 0 < (x.grad - exact).norm() < 0.1 * exact.norm()


def test_nothing_but_ignored_targets_and_extreme_logits():
    x, weight, _, target = inputs()
    assert linear_cross_entropy(x, weight, torch.full_like(target, -100)).isnan()  # as PyTorch's mean of none
    none = linear_cross_entropy(x, weight, torch.full_like(target, -100), reduction="sum")
    none.backward()
    assert none == 0 and not x.grad.any() and not weight.grad.any()
    big = linear_cross_entropy(x * 1e4, weight, target)
    torch.testing.assert_close(big, plain(x * 1e4, weight, target, None))
    low = torch.full((VOCABULARY,), -float("inf"))
    low[target[0, 0]] = 0.0
    one = (x[:1, :1], weight, target[:1, :1], low)
    assert linear_cross_entropy(*one) == plain(*one) == 0


def test_compiles_checkpoints_and_refuses_double_backward():
    x, weight, _, target = inputs()
    expected = torch.autograd.grad(linear_cross_entropy(x, weight, target), (x, weight))
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for function in (
        compiled,
        lambda *a: checkpoint(linear_cross_entropy, *a, use_reentrant=False),
    ):
        got = torch.autograd.grad(function(x, weight, target), (x, weight))
        assert all(map(torch.equal, got, expected))
    with pytest.raises(RuntimeError, match="linear_cross_entropy: double backward is not supported"):
        torch.autograd.grad(linear_cross_entropy(x, weight, target), x, create_graph=True)


def test_the_ops_pass_opcheck():
    x, weight, bias, target = (t.detach() for t in inputs())
    x = x.flatten(0, 1)
    loss, lse = head._forward(x, weight, bias, target.flatten(), -100)
    torch.library.opcheck(head._forward, (x, weight, bias, target.flatten(), -100))
    torch.library.opcheck(head._backward, (loss, x, weight, None, target.flatten(), lse, True, True, False))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"reduction": "max"}, ValueError, "reduction must be 'mean', 'sum' or 'none'; got 'max'"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, ValueError, r"target must be int64 \(2, 15\)"),
        ({"target": torch.full(TOKENS, VOCABULARY)}, RuntimeError, "targets must be rows of weight"),
        ({"format": "int7"}, ValueError, "format must be one of"),
    ],
)
def test_wrong_arguments_are_named(changes, error, message):
    x, weight, _, target = inputs()
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{"x": x, "weight": weight, "target": target, **changes})
