"""Attention that keeps q, k, v and its output quantized: values, gradients, what is kept, and every kernel's call."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agoq_ext.activation import activation_report
from agoq_ext.attention import _BACKWARD, _FORWARD, Call, _expanded, choose_kernel
from agoq_ext.nn import functional as agoq
from agoq_ext.tensor import quantize

BATCH, HEADS, LENGTH, DIM = 2, 4, 24, 16
DTYPES = [torch.float32, torch.bfloat16]


def tensors(
    dtype: torch.dtype = torch.float32, kv_heads: int = HEADS, kv_length: int = LENGTH
) -> list[Tensor]:
    """q, k and v as projections lay them out: the heads of a token side by side."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, LENGTH, HEADS), *[(BATCH, kv_length, kv_heads)] * 2]
    made = [torch.randn(*shape, DIM, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]
    return [x.requires_grad_() for x in made]


def masks(kind: str | None, kv_length: int = LENGTH) -> Tensor | None:
    if kind is None:
        return None
    keep = torch.ones(BATCH, 1, LENGTH, kv_length, dtype=torch.bool).tril()
    keep[0, :, :, :3] = False
    keep[..., 0] = True
    return keep if kind == "bool" else torch.where(keep, 0.3, float("-inf"))


def decoded(x: Tensor, format: str) -> Tensor:
    """x as it comes back from storage: groups run along the heads of a token."""
    rows = x.detach().transpose(1, 2).flatten(2)
    heads = quantize(rows, format, 64).dequantize().view(x.shape[0], x.shape[2], *x.shape[1::2])
    return heads.transpose(1, 2)


def kernels_own_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, format: str
) -> tuple[Tensor, ...]:
    """The CPU kernel's backward with decoded q, k, v and out in the place of the saved ones."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask
    )
    kept = [decoded(x, format) for x in (q, k, v, out)]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, *kept, lse, 0.0, causal, attn_mask=mask
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("format", ["int8", "int5", "nf4"])
@pytest.mark.parametrize(
    ("mask", "causal", "kv_heads", "kv_length"),
    [
        (None, True, HEADS, LENGTH),
        (None, False, HEADS, 40),
        (None, True, 2, LENGTH),
        ("bool", False, HEADS, LENGTH),
        ("float", False, HEADS, 40),
    ],
)
def test_values_are_pytorchs_and_gradients_those_of_the_decoded_tensors(
    dtype, format, mask, causal, kv_heads, kv_length
):
    q, k, v = tensors(dtype, kv_heads, kv_length)
    given = masks(mask, kv_length)
    given = given.to(dtype) if mask == "float" else given
    options = {"attn_mask": given, "is_causal": causal, "enable_gqa": kv_heads != HEADS}
    out = agoq.attention(q, k, v, **options, format=format)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, **options))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = torch.autograd.grad(out, (q, k, v), dout)
    expected = kernels_own_backward(dout, q, k, v, given, causal, format)
    assert all(map(torch.equal, got, expected))


def test_without_a_format_everything_is_pytorchs():
    q, k, v = tensors()
    weight = torch.randn(8, HEADS * DIM, requires_grad=True)
    exact = F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), weight)
    out = agoq.attention_linear(q, k, v, weight, format=None)
    assert torch.equal(out, exact)
    got, expected = (torch.autograd.grad(y.sum(), (q, k, v, weight)) for y in (out, exact))
    assert all(map(torch.equal, got, expected))


class Block(nn.Module):
    """Attention and its output projection."""

    def __init__(self, together: bool, format: str | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, HEADS * DIM, generator=torch.Generator().manual_seed(2)))
        self.together, self.format = together, format

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.together:
            return agoq.attention_linear(q, k, v, self.weight, is_causal=True, format=self.format)
        out = agoq.attention(q, k, v, is_causal=True, format=self.format)
        return agoq.linear(out.transpose(1, 2).flatten(2), self.weight, format=self.format)


def test_the_output_is_kept_once():
    q, k, v = tensors(torch.bfloat16)
    one = quantize(q.detach().transpose(1, 2).flatten(2), "int8", 64).nbytes
    lse = BATCH * HEADS * LENGTH * 4
    together, apart = (Block(t, "int8").bfloat16() for t in (True, False))
    assert activation_report(together, (q, k, v)).total_bytes == 4 * one + lse
    assert activation_report(apart, (q, k, v)).total_bytes == 5 * one + lse
    results = []
    for block in (together, apart):
        block(q, k, v).float().square().sum().backward()
        results.append([block.weight.grad, *(x.grad.clone() for x in (q, k, v))])
        for x in (q, k, v):
            x.grad = None
    assert all(map(torch.equal, *results))


def test_a_frozen_projection_and_frozen_inputs():
    q, k, v = tensors(torch.bfloat16)
    block = Block(True, "int8").bfloat16().requires_grad_(False)
    block(q, k, v).float().sum().backward()
    assert block.weight.grad is None and q.grad is not None
    block.requires_grad_(True)
    q, k, v = (x.detach() for x in tensors(torch.bfloat16))
    report = activation_report(block, (q, k, v))
    assert report.total_bytes == quantize(q.transpose(1, 2).flatten(2), "int8", 64).nbytes
    with torch.no_grad():
        assert not block(q, k, v).requires_grad


def test_autocast_computes_and_keeps_its_own_dtype():
    q, k, v = tensors()
    block, plain = Block(True, "int8"), Block(True, None)
    with torch.autocast("cpu", torch.bfloat16):
        out, exact = block(q, k, v), plain(q, k, v)
    assert out.dtype == torch.bfloat16 and torch.equal(out, exact)
    got = torch.autograd.grad(out.float().square().sum(), (q, k, v, block.weight))
    expected = torch.autograd.grad(exact.float().square().sum(), (q, k, v, plain.weight))
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == torch.float32
        assert (g - e).norm() < 0.03 * e.norm()


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant):
    q, k, v = tensors()
    block = Block(True, "int6")
    expected = torch.autograd.grad(block(q, k, v).sum(), (q, k, v))
    checkpoint(block, q, k, v, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(x.grad, e) for x, e in zip((q, k, v), expected, strict=True))


@pytest.mark.parametrize("together", [True, False])
def test_compiles_in_one_graph(together):
    q, k, v = tensors()
    block = Block(together, "int6")
    expected = torch.autograd.grad(block(q, k, v).square().sum(), (q, k, v, block.weight))
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v, block.weight))
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-5, atol=1e-6)


def test_double_backward_is_refused():
    q, k, v = tensors()
    out = agoq.attention(q, k, v)
    with pytest.raises(RuntimeError, match="attention: double backward is not supported"):
        torch.autograd.grad(out.sum(), (q, k, v), create_graph=True)


def test_what_no_kernel_takes_is_left_to_pytorch():
    """Dropout on the CPU, three dimensions, a mask that is trained."""
    q, k, v = tensors()
    torch.manual_seed(3)
    out = agoq.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    assert torch.equal(agoq.attention(*flat), F.scaled_dot_product_attention(*flat))
    mask = torch.zeros(1, 1, LENGTH, LENGTH, requires_grad=True)
    agoq.attention(q, k, v, attn_mask=mask).square().sum().backward()
    assert mask.grad is not None
    assert choose_kernel(q, k, v, None, 0.0, True, None, False) == "cpu_flash"
    assert choose_kernel(q[:0], k[:0], v[:0], None, 0.0, True, None, False) is None


def test_a_nan_stays_visible():
    q, k, v = tensors()
    with torch.no_grad():
        k[0, 0, 0, 0] = float("nan")
    agoq.attention(q, k, v, is_causal=True).sum().backward()
    assert all(x.grad[0].isnan().any() for x in (q, k, v))


def test_wrong_arguments_are_named():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="attention: format must be one of"):
        agoq.attention(q, k, v, format="int7")
    with pytest.raises(ValueError, match=r"attention_linear: weight must have shape \[out, 64\]"):
        agoq.attention_linear(q, k, v, torch.zeros(8, 65))


@pytest.mark.parametrize(
    ("kernel", "masked"),
    [("flash", False), *((k, m) for k in ("efficient", "cudnn") for m in (False, True))],
)
def test_every_cuda_kernel_is_called_as_its_schema_says(kernel, masked):
    """On the meta device: arguments in their places, gradients of the right shapes."""
    q, k, v = (x.detach().to("meta", torch.bfloat16) for x in tensors(kv_length=40))
    bias = torch.empty(BATCH, 1, LENGTH, 40, device="meta", dtype=torch.bfloat16) if masked else None
    call = Call(kernel, 0.1, False, 0.2, 1)
    out, lse, *state = _FORWARD[kernel](q, k, v, bias, call)
    assert out.shape == q.shape and lse.dtype == torch.float32
    grads = _BACKWARD[kernel](torch.empty_like(out), q, k, v, out, lse, bias, state, call)
    assert [g.shape for g in grads] == [x.shape for x in (q, k, v)]


def test_mask_rows_are_aligned_for_the_efficient_kernel():
    q, k, _ = (x.detach() for x in tensors(kv_length=40))
    bias = torch.randn(BATCH, 1, LENGTH, 40)
    got = _expanded(bias, q, k)
    assert got.shape == (BATCH, HEADS, LENGTH, 40) and got.stride(2) % 16 == 0
    assert all(torch.equal(a, b) for a, b in pairwise([bias[:, 0], *got.unbind(1)]))
