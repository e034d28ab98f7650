"""The cross-entropy of a linear layer, computed over blocks of the vocabulary so that the logits never exist whole.

    l_t = log sum_j exp(z_tj) - z_t,y(t)        z = x w^T + b, [tokens, vocabulary]
    dz_tj = g_t (exp(z_tj - lse_t) - [j = y(t)])    dx = dz w, dw = dz^T x, db = sum_t dz

Forward runs over blocks of w's rows with a running maximum and sum; it keeps x, w, the targets and lse [tokens] FP32.
Backward computes each block of z a second time: one more product of the head's size buys tokens x vocabulary x 4 bytes
and more (at a vocabulary of 128k and hidden 4096 the FP32 logits are 63 activations of BF16). Over blocks of the
vocabulary, not of tokens, each block of dw is one product over all tokens, written once where it belongs.

z is rounded to the dtype of the product and then widened to FP32, dz is rounded to that dtype, as plain PyTorch does.
Two registered ops, so that compilers see one node each way instead of an unrolled loop.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .autograd import Codec, _refuse_double_backward

# FP32 logits that exist at one time, as elements: 64 MiB.
BLOCK_ELEMENTS = 2**24
_MIN_ROWS = 256


def block_rows(tokens: int, vocabulary: int) -> int:
    """Rows of w that one block takes for so many tokens."""
    return min(vocabulary, max(_MIN_ROWS, BLOCK_ELEMENTS // max(1, tokens)))


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, first: int, rows: int) -> Tensor:
    """FP32 [tokens, rows] of one block, rounded to x's dtype first."""
    block_bias = None if bias is None else bias[first : first + rows].to(x.dtype)
    return F.linear(x, weight[first : first + rows].to(x.dtype), block_bias).float()


def _inside(target: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """(whether the target lies in the block, its place there or 0), each [tokens]."""
    place = target - first
    inside = (place >= 0) & (place < rows)
    return inside, torch.where(inside, place, 0)


@torch.library.custom_op("agoq::linear_cross_entropy", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """(loss FP32 [tokens], 0 where the target is `ignore_index`; lse FP32 [tokens])."""
    tokens, vocabulary = x.shape[0], weight.shape[0]
    valid = (target == ignore_index) | ((target >= 0) & (target < vocabulary))
    torch._assert_async(valid.all(), "linear_cross_entropy: targets must be rows of weight or ignore_index")
    rows = block_rows(tokens, vocabulary)
    highest = x.new_full((tokens,), float("-inf"), dtype=torch.float32)
    total = torch.zeros_like(highest)
    chosen = torch.zeros_like(highest)
    for first in range(0, vocabulary, rows):
        z = _logits(x, weight, bias, first, rows)
        new = torch.maximum(highest, z.amax(1))
        # A row of -inf alone has no finite maximum to subtract.
        safe = torch.where(new == float("-inf"), 0.0, new)
        total = total * torch.exp(highest - safe) + torch.exp(z - safe[:, None]).sum(1)
        highest = new
        inside, place = _inside(target, first, z.shape[1])
        chosen = torch.where(inside, z.gather(1, place[:, None])[:, 0], chosen)
    lse = highest + torch.log(total)
    return torch.where(target == ignore_index, 0.0, lse - chosen), lse


@_forward.register_fake
def _forward_fake(x, weight, bias, target, ignore_index):  # type: ignore[no-untyped-def]
    loss = x.new_empty(x.shape[0], dtype=torch.float32)
    return loss, torch.empty_like(loss)


@torch.library.custom_op("agoq::linear_cross_entropy_backward", mutates_args=())
def _backward(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, db) in the dtypes of x, weight and bias, empty where not needed; dloss FP32 [tokens]."""
    tokens, vocabulary = x.shape[0], weight.shape[0]
    rows = block_rows(tokens, vocabulary)
    dx = torch.zeros(x.shape if need_x else (0,), dtype=torch.float32, device=x.device)
    dweight = torch.empty_like(weight) if need_weight else weight.new_empty(0)
    dbias = weight.new_empty(0) if bias is None or not need_bias else torch.empty_like(bias)
    for first in range(0, vocabulary, rows):
        z = _logits(x, weight, bias, first, rows)
        inside, place = _inside(target, first, z.shape[1])
        dz = z.sub_(lse[:, None]).exp_()
        dz.scatter_add_(1, place[:, None], -inside.float()[:, None])
        dz = (dz * dloss[:, None]).to(x.dtype)
        block = slice(first, first + rows)
        if need_x:
            dx += dz @ weight[block].to(x.dtype)
        if need_weight:
            dweight[block] = dz.t() @ x
        if dbias.numel():
            dbias[block] = dz.float().sum(0)
    return dx.to(x.dtype), dweight, dbias


@_backward.register_fake
def _backward_fake(dloss, x, weight, bias, target, lse, need_x, need_weight, need_bias):  # type: ignore[no-untyped-def]
    dbias = weight.new_empty(0) if bias is None or not need_bias else torch.empty_like(bias)
    return (
        x.new_empty(x.shape if need_x else (0,)),
        torch.empty_like(weight) if need_weight else weight.new_empty(0),
        dbias,
    )


class LinearCrossEntropy(Function):
    """The loss of each token; keeps x, as codes if a codec is given, w, b, the targets and the log-sum-exp.

    x [tokens, in] is in the dtype of the product; w [vocabulary, in] and b [vocabulary] or None as they are.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        codec: Codec | None,
    ) -> Tensor:
        loss, lse = _forward(x, weight, bias, target, ignore_index)
        ctx.set_materialize_grads(False)
        ctx.codec, ctx.shape, ctx.dtype, ctx.ignore_index = codec, x.shape, x.dtype, ignore_index
        kept = (x, None) if codec is None else codec.encode(x)
        ctx.save_for_backward(*kept, weight, bias, target, lse)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_double_backward("linear_cross_entropy")
        if dloss is None:
            return (None,) * 6
        x, scales, weight, bias, target, lse = ctx.saved_tensors
        if ctx.codec is not None:
            x = ctx.codec.decode(x, scales, ctx.shape, ctx.dtype)
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dloss = torch.where(target == ctx.ignore_index, 0.0, dloss.float())
        grads = _backward(dloss, x, weight, bias, target, lse, need_x, need_weight, need_bias)
        needed = (need_x, need_weight, need_bias)
        return (*(g if n else None for g, n in zip(grads, needed, strict=True)), None, None, None)
