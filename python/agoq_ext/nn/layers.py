"""layer_norm, layer_norm_linear and activation_linear: the functions of models that are not in Llama's form.

Their keywords `format`, `group_size` and `scale_dtype` are those of `functional`, which gathers them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import autograd
from ..autograd_layers import ACTIVATIONS, ActivationLinear, LayerNormProjections
from .checks import check_norm, check_projections, codec_of, needs_grad

DEFAULT_FORMAT = "nf4"
DEFAULT_GROUP_SIZE = 64
DEFAULT_SCALE_DTYPE = torch.bfloat16


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    format: str | None = DEFAULT_FORMAT,
    group_size: int = DEFAULT_GROUP_SIZE,
    scale_dtype: torch.dtype = DEFAULT_SCALE_DTYPE,
) -> Tensor:
    """`torch.nn.functional.layer_norm` over the last dimension; keeps packed x, its statistics are recomputed.

    Args:
        x: [..., cols]. weight, bias: [cols] or None.

    Returns:
        [..., cols].
    """
    _check_affine("layer_norm", x, weight, bias)
    codec = codec_of("layer_norm", format, group_size, scale_dtype, x=x)
    if codec is None or not needs_grad(x, weight, bias):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return LayerNormProjections.apply(x, weight, bias, eps, codec, None, 0)[0]


def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    format: str | None = DEFAULT_FORMAT,
    group_size: int = DEFAULT_GROUP_SIZE,
    scale_dtype: torch.dtype = DEFAULT_SCALE_DTYPE,
) -> tuple[Tensor, ...]:
    """Several `linear` of one `layer_norm`; keeps packed x alone and recomputes the norm's output.

    Args:
        x: [..., in]. norm_weight, norm_bias: [in] or None.
        weights: each [out_i, in]. biases: None, or for each weight [out_i] or None.

    Returns:
        For each weight [..., out_i].
    """
    op = "layer_norm_linear"
    _check_affine(op, x, norm_weight, norm_bias)
    biases = check_projections(op, x, weights, biases)
    codec = codec_of(op, format, group_size, scale_dtype, x=x)
    if codec is None or not needs_grad(x, norm_weight, norm_bias, *weights, *biases):
        normed = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps)
        return tuple(F.linear(normed, w, b) for w, b in zip(weights, biases, strict=True))
    dtype = autograd.autocast_dtype(x)
    return LayerNormProjections.apply(
        x, norm_weight, norm_bias, eps, codec, dtype, len(weights), *weights, *biases
    )


def activation_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "gelu",
    *,
    format: str | None = DEFAULT_FORMAT,
    group_size: int = DEFAULT_GROUP_SIZE,
    scale_dtype: torch.dtype = DEFAULT_SCALE_DTYPE,
) -> Tensor:
    """`linear` of an activation function; keeps packed x alone and recomputes the function.

    Args:
        x: [..., in]. weight: [out, in]. bias: [out] or None.
        activation: "gelu", "gelu_tanh", "gelu_new" (the same as transformers writes it out), "silu" or "relu" (whose
            gradient follows the sign of the decoded x: zero where x was rounded to zero).

    Returns:
        [..., out].
    """
    op = "activation_linear"
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    check_projections(op, x, [weight], [bias])
    codec = codec_of(op, format, group_size, scale_dtype, x=x)
    if codec is None or not needs_grad(x, weight, bias):
        return F.linear(ACTIVATIONS[activation][0](x), weight, bias)
    return ActivationLinear.apply(x, weight, bias, activation, codec, autograd.autocast_dtype(x))


def _check_affine(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    for argument, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            check_norm(op, x, parameter, argument)
