"""Drop-in operators that keep a quantized input for backward instead of full-precision intermediates.

Forward values equal plain PyTorch's bit for bit. Gradients equal those of exact autograd with the saved input
replaced by its decoded copy; `autograd.py` gives the formulas and docs/activations.md the bytes. Under
`torch.no_grad()`, and where no argument requires a gradient, nothing is encoded.

Every function takes the same three keywords:

    format: code of the saved input (`agoq_ext.quantize` lists them), or None to keep what plain PyTorch keeps.
    group_size: 32, 64, 128 or 256 elements along the last dimension that share one scale.
    scale_dtype: torch.bfloat16 or torch.float32.

The default, NF4 in groups of 64 with BF16 scales, takes 4.25 bits an element: as much as the paper's FP4 in groups of
128 with FP32 scales, at 1.4 dB less noise on Gaussian data (docs/activations.md). Rounding is to nearest.

All work on float32, float16 and bfloat16 (float64 with `format=None`), under autocast, activation checkpointing and
torch.compile. A backward with `create_graph=True` raises RuntimeError. Wrong arguments raise ValueError or TypeError.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import attention as _attention
from .. import autograd
from ..attention import Call, Codecs
from ..autograd import NOTHING, Codec
from ..head import LinearCrossEntropy
from .checks import check_gate_up, check_norm, check_projections, codec_of, needs_grad
from .layers import (
    DEFAULT_FORMAT,
    DEFAULT_GROUP_SIZE,
    DEFAULT_SCALE_DTYPE,
    activation_linear,
    layer_norm,
    layer_norm_linear,
)

DEFAULT_ATTENTION_FORMAT = "int8"  # 4-bit q and k spoil the gradient (docs/activations.md)

__all__ = [
    "DEFAULT_ATTENTION_FORMAT",
    "DEFAULT_FORMAT",
    "DEFAULT_GROUP_SIZE",
    "DEFAULT_SCALE_DTYPE",
    "activation_linear",
    "attention",
    "attention_linear",
    "layer_norm",
    "layer_norm_linear",
    "linear",
    "linear_cross_entropy",
    "multi_linear",
    "rms_norm",
    "rms_norm_linear",
    "swiglu",
    "swiglu_linear",
]


# --- operators -----------------------------------------------------------------------------------------------


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    format: str | None = DEFAULT_FORMAT,
    group_size: int = DEFAULT_GROUP_SIZE,
    scale_dtype: torch.dtype = DEFAULT_SCALE_DTYPE,
) -> Tensor:
    """x weight^T + bias; keeps packed x if `weight` requires a gradient, and `weight` if `x` does.

    Args:
        x: [..., in].
        weight: [out, in]. bias: [out] or None.

    Returns:
        [..., out], the dtype that `torch.nn.functional.linear` gives.
    """
    return multi_linear(x, [weight], [bias], format=format, group_size=group_size, scale_dtype=scale_dtype)[0]


def multi_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    format: str | None = DEFAULT_FORMAT,
    group_size: int = DEFAULT_GROUP_SIZE,
    scale_dtype: torch.dtype = DEFAULT_SCALE_DTYPE,
) -> tuple[Tensor, ...]:
    """Several `linear` of one input, of which one packed copy is kept.

    Args:
        x: [..., in].
        weights: each [out_i, in]. biases: None, or for each weight [out_i] or None.

    Returns:
        For each weight [..., out_i].
    """
    biases = check_projections("linear", x, weights, biases)
    codec = codec_of("linear", format, group_size, scale_dtype, x=x)
    if codec is None or not needs_grad(x, *weights, *biases):
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
    return autograd.Projections.apply(
        x, None, *NOTHING, 0.0, codec, autograd.autocast_dtype(x), len(weights), *weights, *biases
    )


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    format: str | None = DEFAULT_FORMAT,
    group_size: int = DEFAULT_GROUP_SIZE,
    scale_dtype: torch.dtype = DEFAULT_SCALE_DTYPE,
) -> Tensor:
    """weight * (x / sqrt(mean(x^2) + eps)); keeps packed x.

    As LlamaRMSNorm computes it: FP32 inside, the normalized x rounded to x's dtype before the weight multiplies.

    Args:
        x: [..., cols]. weight: [cols].

    Returns:
        [..., cols], the dtype that `weight` and `x` promote to.
    """
    check_norm("rms_norm", x, weight)
    codec = codec_of("rms_norm", format, group_size, scale_dtype, x=x)
    if codec is None or not needs_grad(x, weight):
        return _plain_rms_norm(x, weight, eps)
    return autograd.RMSNorm.apply(x, weight, eps, codec)


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    format: str | None = DEFAULT_FORMAT,
    group_size: int = DEFAULT_GROUP_SIZE,
    scale_dtype: torch.dtype = DEFAULT_SCALE_DTYPE,
) -> tuple[Tensor, ...]:
    """Several `linear` of one `rms_norm`, e.g. q, k and v; keeps packed x alone and recomputes the norm's output.

    Args:
        x: [..., in]. norm_weight: [in].
        weights: each [out_i, in]. biases: None, or for each weight [out_i] or None.

    Returns:
        For each weight [..., out_i].
    """
    check_norm("rms_norm_linear", x, norm_weight, "norm_weight")
    biases = check_projections("rms_norm_linear", x, weights, biases)
    codec = codec_of("rms_norm_linear", format, group_size, scale_dtype, x=x)
    if codec is None or not needs_grad(x, norm_weight, *weights, *biases):
        normed = _plain_rms_norm(x, norm_weight, eps)
        return tuple(F.linear(normed, w, b) for w, b in zip(weights, biases, strict=True))
    return autograd.Projections.apply(
        x, norm_weight, *NOTHING, eps, codec, autograd.autocast_dtype(x), len(weights), *weights, *biases
    )


def swiglu(
    gate: Tensor,
    up: Tensor,
    *,
    format: str | None = DEFAULT_FORMAT,
    group_size: int = DEFAULT_GROUP_SIZE,
    scale_dtype: torch.dtype = DEFAULT_SCALE_DTYPE,
) -> Tensor:
    """silu(gate) * up; keeps packed gate and, if `gate` requires a gradient, packed up.

    Args:
        gate, up: [..., cols], the same shape.

    Returns:
        [..., cols], the dtype that `gate` and `up` promote to.
    """
    check_gate_up("swiglu", gate, up)
    codec = codec_of("swiglu", format, group_size, scale_dtype, gate=gate, up=up)
    if codec is None or not needs_grad(gate, up):
        return F.silu(gate) * up
    return autograd.SwiGLU.apply(gate, up, codec)


def swiglu_linear(
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    format: str | None = DEFAULT_FORMAT,
    group_size: int = DEFAULT_GROUP_SIZE,
    scale_dtype: torch.dtype = DEFAULT_SCALE_DTYPE,
) -> Tensor:
    """`linear` of `swiglu`; keeps packed gate and up alone and recomputes their product.

    Args:
        gate, up: [..., in], the same shape.
        weight: [out, in]. bias: [out] or None.

    Returns:
        [..., out].
    """
    check_gate_up("swiglu_linear", gate, up)
    check_projections("swiglu_linear", gate, [weight], [bias])
    codec = codec_of("swiglu_linear", format, group_size, scale_dtype, gate=gate, up=up)
    if codec is None or not needs_grad(gate, up, weight, bias):
        return F.linear(F.silu(gate) * up, weight, bias)
    return autograd.SwiGLULinear.apply(gate, up, weight, bias, codec, autograd.autocast_dtype(gate))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    format: str | None = DEFAULT_ATTENTION_FORMAT,
    group_size: int = DEFAULT_GROUP_SIZE,
    scale_dtype: torch.dtype = DEFAULT_SCALE_DTYPE,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`; keeps packed query, key, value and output.

    Where PyTorch would take no fused kernel (dropout on the CPU, say), or the tensors have not four dimensions, it
    is PyTorch's function itself and keeps what that keeps.

    Args:
        query: [batch, heads, length, head_dim].
        key, value: [batch, kv_heads, kv_length, head_dim]; kv_heads = heads unless `enable_gqa`.
        attn_mask, dropout_p, is_causal, scale, enable_gqa: as there; a mask that requires a gradient keeps PyTorch's.

    Returns:
        [batch, heads, length, head_dim].
    """
    codec = codec_of("attention", format, group_size, scale_dtype, query=query, key=key, value=value)
    attended = None
    if codec is not None and needs_grad(query, key, value):
        attended = _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, codec)
    if attended is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return attended[0].transpose(1, 2)


def attention_linear(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    format: str | None = DEFAULT_ATTENTION_FORMAT,
    group_size: int = DEFAULT_GROUP_SIZE,
    scale_dtype: torch.dtype = DEFAULT_SCALE_DTYPE,
) -> Tensor:
    """`linear` of `attention` with its heads side by side; both read one packed copy of attention's output.

    Args:
        query, key, value and the keywords: see `attention`.
        weight: [out, heads * head_dim]. bias: [out] or None.

    Returns:
        [batch, length, out].
    """
    codec = codec_of("attention_linear", format, group_size, scale_dtype, query=query, key=key, value=value)
    attended = None
    if codec is not None and needs_grad(query, key, value):
        attended = _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, codec)
    if attended is None or codec is None:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        merged = out.transpose(1, 2).flatten(2)
        return linear(merged, weight, bias, format=format, group_size=group_size, scale_dtype=scale_dtype)
    heads, packed, scales = attended
    x = heads.flatten(2)
    check_projections("attention_linear", x, [weight], [bias])
    return autograd.Projections.apply(
        x, None, packed, scales, 0.0, codec, autograd.autocast_dtype(x), 1, weight, bias
    )[0]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    codec: Codec,
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """`attention.attend` with one codec for all; None where no kernel takes the arguments."""
    query, key, value = _attention.autocast_inputs(query, key, value)
    kernel = _attention.choose_kernel(query, key, value, mask, dropout, is_causal, scale, enable_gqa)
    if kernel is None:
        return None
    call = Call(kernel, dropout, is_causal, scale, 1)
    return _attention.attend(query, key, value, mask, call, Codecs(codec, codec, codec, codec))


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    format: str | None = None,
    group_size: int = DEFAULT_GROUP_SIZE,
    scale_dtype: torch.dtype = DEFAULT_SCALE_DTYPE,
) -> Tensor:
    """`torch.nn.functional.cross_entropy(linear(x, weight, bias).float(), target)`, whose logits never exist whole.

    Keeps x (quantized if `format` is given), `weight`, the targets and one FP32 number a token, and computes the
    logits a second time in backward, in blocks of the vocabulary. Sums differ from PyTorch's in their order.

    Args:
        x: [..., in].
        weight: [vocabulary, in]. bias: [vocabulary] or None.
        target: int64 [...], rows of `weight` or `ignore_index`.
        reduction: "mean" over the targets that are not ignored, "sum", or "none".

    Returns:
        FP32 scalar; [...] for "none".
    """
    op = "linear_cross_entropy"
    check_projections(op, x, [weight], [bias])
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: reduction must be 'mean', 'sum' or 'none'; got {reduction!r}")
    if tuple(target.shape) != tuple(x.shape[:-1]) or target.dtype != torch.int64:
        raise ValueError(
            f"{op}: target must be int64 {tuple(x.shape[:-1])}; got {target.dtype} {tuple(target.shape)}"
        )
    codec = codec_of(op, format, group_size, scale_dtype, x=x)
    dtype = autograd.autocast_dtype(x)
    rows = (x if dtype is None else x.to(dtype)).reshape(-1, x.shape[-1])
    losses = LinearCrossEntropy.apply(rows, weight, bias, target.reshape(-1), ignore_index, codec)
    if reduction == "none":
        return losses.reshape(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


# --- plain PyTorch -------------------------------------------------------------------------------------------


def _plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    hidden = x.to(torch.float32)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return weight * hidden.to(x.dtype)
