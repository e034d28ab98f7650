"""The argument checks of `functional`: a ValueError or TypeError names the op, the argument, what it must be and is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import layout
from ..autograd import Codec


def codec_of(
    op: str, format: str | None, group_size: int, scale_dtype: torch.dtype, **inputs: Tensor
) -> Codec | None:
    """The checked codec; None for `format=None`."""
    if format is None:
        return None
    layout.check_format(op, format)
    layout.check_group_size(op, group_size)
    layout.check_scale_dtype(op, scale_dtype)
    for name, x in inputs.items():
        layout.check_float_dtype(op, x.dtype, argument=f"{name}'s dtype")
    return Codec(format, group_size, scale_dtype)


def check_tensor(op: str, argument: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {argument} must be a torch.Tensor; got {type(x).__name__}")
    if isinstance(x, DTensor):
        raise TypeError(
            f"{op}: {argument} must be a plain tensor; got a DTensor with placements {x.placements}. Parameters that "
            "tensor parallelism has sharded are not supported: restore(model), or use compress_saved_tensors"
        )
    if x.dim() == 0:
        raise ValueError(f"{op}: {argument} must have at least one dimension; got a scalar")


def check_norm(op: str, x: Tensor, weight: Tensor, argument: str = "weight") -> None:
    check_tensor(op, "x", x)
    check_tensor(op, argument, weight)
    if tuple(weight.shape) != tuple(x.shape[-1:]):
        raise ValueError(f"{op}: {argument} must have shape {tuple(x.shape[-1:])}; got {tuple(weight.shape)}")


def check_gate_up(op: str, gate: Tensor, up: Tensor) -> None:
    check_tensor(op, "gate", gate)
    check_tensor(op, "up", up)
    if gate.shape != up.shape:
        raise ValueError(f"{op}: up must have gate's shape {tuple(gate.shape)}; got {tuple(up.shape)}")


def check_projections(
    op: str, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None
) -> list[Tensor | None]:
    """The biases as a list, one for each weight."""
    check_tensor(op, "x", x)
    if len(weights) == 0:
        raise ValueError(f"{op}: weights must hold at least one weight; got none")
    biases = [None] * len(weights) if biases is None else list(biases)
    if len(biases) != len(weights):
        raise ValueError(
            f"{op}: biases must hold one entry for each of {len(weights)} weights; got {len(biases)}"
        )
    for weight, bias in zip(weights, biases, strict=True):
        check_tensor(op, "weight", weight)
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(f"{op}: weight must have shape [out, {x.shape[-1]}]; got {tuple(weight.shape)}")
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise ValueError(f"{op}: bias must have shape ({weight.shape[0]},); got {tuple(bias.shape)}")
    return biases


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd records and any of them requires a gradient."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
