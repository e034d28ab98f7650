"""LayerNorm in front of linear layers and an activation function in front of one, kept as quantized inputs.

As in `autograd`, x' is the decoded copy of the saved input and backward returns what exact autograd returns with x' in
its place:

    layer norm    n = g (x - m(x)) r(x) + b, r(x) = (var(x) + eps)^-1/2, and dx, dg, db with x', m(x'), r(x')
    projections   y_i = n w_i^T + b_i      dn = sum_i dy_i w_i  dw_i = dy_i^T n(x'), then as layer norm
    activation    y = f(u) w^T + b         dh = dy w            dw = dy^T f(u'), du = dh f'(u')

f is one of `ACTIVATIONS`: GELU, its two ways of writing the tanh approximation, SiLU and ReLU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .autograd import (
    NOTHING,
    Codec,
    _bias_grad,
    _cast,
    _input_grad,
    _linear,
    _refuse_double_backward,
    _weight_grad,
    _without_autocast,
)

_aten = torch.ops.aten


def _gelu_new(x: Tensor) -> Tensor:
    """The tanh approximation as transformers writes it out."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


# Name: (f, du of (dh, u)).
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (F.gelu, lambda dh, u: _aten.gelu_backward(dh, u, approximate="none")),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda dh, u: _aten.gelu_backward(dh, u, approximate="tanh"),
    ),
    "gelu_new": (_gelu_new, lambda dh, u: _aten.gelu_backward(dh, u, approximate="tanh")),
    "silu": (F.silu, _aten.silu_backward),
    "relu": (F.relu, lambda dh, u: _aten.threshold_backward(dh, u, 0)),
}


class LayerNormProjections(Function):
    """Linear layers that read one LayerNorm, or with `count` = 0 the norm itself: keeps packed x and the weights.

    Inputs: x [..., in]; norm weight and bias [in] or None; `count` weights [out_i, in], `count` biases or None.
    Outputs: `count` tensors [..., out_i], or the norm's output [..., in].
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        eps: float,
        codec: Codec,
        dtype: torch.dtype | None,
        count: int,
        *params: Any,
    ) -> tuple[Tensor, ...]:
        weights, biases = params[:count], params[count:]
        # In the caller's autocast, so that the norm computes in the dtype that it would.
        normed = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps)
        needs = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        ctx.codec, ctx.eps, ctx.count, ctx.shape = codec, eps, count, x.shape
        # Where autocast widens a norm, it widens all of its inputs.
        ctx.norm_dtype = normed.dtype if normed.dtype == torch.float32 else x.dtype
        ctx.widened = ctx.norm_dtype != x.dtype
        ctx.dtypes = (x.dtype, normed.dtype, dtype or normed.dtype)
        ctx.param_dtypes = tuple(None if p is None else p.dtype for p in (norm_weight, norm_bias, *params))
        need_dn = any(needs[:3])
        # dn alone gives the bias's gradient; everything else reads x.
        need_source = any(needs[:2]) or any(needs[7 : 7 + count])
        packed, scales = codec.encode(x) if need_source else NOTHING
        ctx.save_for_backward(
            packed, scales, norm_weight, norm_bias, *(w if need_dn else None for w in weights)
        )
        if count == 0:
            return (normed,)
        with _without_autocast(x):
            source = _cast(normed, dtype)
            return tuple(_linear(source, w, b, dtype) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_double_backward("layer_norm_linear" if ctx.count else "layer_norm")
        packed, scales, norm_weight, norm_bias, *weights = ctx.saved_tensors
        count, needs = ctx.count, ctx.needs_input_grad
        x_dtype, n_dtype, compute_dtype = ctx.dtypes
        given = [dy for dy in dys if dy is not None]
        grads: list[Tensor | None] = [None] * (7 + 2 * count)
        if not given:
            return tuple(grads)
        with _without_autocast(given[0]):
            widen = torch.float32 if ctx.widened else None
            gain = None if norm_weight is None else _cast(norm_weight, widen)
            shift = None if norm_bias is None else _cast(norm_bias, widen)
            x = normed = mean = rstd = product = None
            if packed is not None:
                x = ctx.codec.decode(packed, scales, ctx.shape, ctx.norm_dtype)
                normed, mean, rstd = torch.native_layer_norm(x, ctx.shape[-1:], gain, shift, ctx.eps)
            if any(needs[7 : 7 + count]):
                assert normed is not None
                product = normed.to(compute_dtype)
            dn = None if count else given[0]
            for i in reversed(range(count)):
                dy = dys[i]
                if dy is None:
                    continue
                if needs[7 + i]:
                    assert product is not None
                    grads[7 + i] = _weight_grad(dy, product).to(ctx.param_dtypes[2 + i])
                if needs[7 + count + i]:
                    grads[7 + count + i] = _bias_grad(dy).to(ctx.param_dtypes[2 + count + i])
                if any(needs[:3]):
                    part = _input_grad(dy, weights[i].to(dy.dtype), ctx.shape).to(n_dtype)
                    dn = part if dn is None else dn + part
            if dn is not None and x is not None:
                masks = [bool(n) for n in needs[:3]]
                parts = _aten.native_layer_norm_backward(
                    dn, x, ctx.shape[-1:], mean, rstd, gain, shift, masks
                )
                dtypes = (x_dtype, *ctx.param_dtypes[:2])
                for i, (part, wanted) in enumerate(zip(parts, dtypes, strict=True)):
                    grads[i] = part.to(wanted) if masks[i] else None
            elif dn is not None and needs[2]:
                grads[2] = _bias_grad(dn).to(ctx.param_dtypes[1])
        return tuple(grads)


class ActivationLinear(Function):
    """A linear layer of f(x): keeps packed x, and w where x needs a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        codec: Codec,
        dtype: torch.dtype | None,
    ) -> Tensor:
        need_x, need_weight = ctx.needs_input_grad[:2]
        packed, scales = codec.encode(x) if need_x or need_weight else NOTHING
        ctx.save_for_backward(packed, scales, weight if need_x else None)
        ctx.codec, ctx.shape, ctx.dtype, ctx.activation = codec, x.shape, x.dtype, activation
        ctx.param_dtypes = (weight.dtype, None if bias is None else bias.dtype)
        # The activation runs in the caller's autocast, as it would by itself.
        hidden = ACTIVATIONS[activation][0](x)
        ctx.hidden_dtype = hidden.dtype
        with _without_autocast(x):
            return _linear(_cast(hidden, dtype), weight, bias, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward("activation_linear")
        packed, scales, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        function, derivative = ACTIVATIONS[ctx.activation]
        dx = dweight = dbias = None
        with _without_autocast(dy):
            if need_bias:
                dbias = _bias_grad(dy).to(ctx.param_dtypes[1])
            if packed is not None:
                x = ctx.codec.decode(packed, scales, ctx.shape, ctx.hidden_dtype)
                if need_weight:
                    dweight = _weight_grad(dy, function(x).to(dy.dtype)).to(ctx.param_dtypes[0])
                if need_x:
                    dh = _input_grad(dy, weight.to(dy.dtype), ctx.shape).to(ctx.hidden_dtype)
                    dx = derivative(dh, x).to(ctx.dtype)
        return dx, dweight, dbias, None, None, None
