"""What a GradientStore accepts."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import layout
from ..collectives import Codec
from .buckets import FORMATS


def check_options(op: str, codec: Codec, bucket_bytes: int, sharded: bool, gather: str | None) -> None:
    """Raises ValueError for options that are not supported."""
    codec.check(op)
    if codec.format not in FORMATS:
        raise ValueError(f"{op}: format must be one of {', '.join(FORMATS)}; got {codec.format!r}")
    if bucket_bytes < 1:
        raise ValueError(f"{op}: bucket_bytes must be positive; got {bucket_bytes}")
    if gather is not None:
        layout.check_format(op, gather, argument="gather")
        if not sharded:
            raise ValueError(
                f"{op}: gather needs sharded=True, whose parameters are gathered; got {gather!r}"
            )


def check_max_norm(op: str, max_norm: float | None) -> None:
    """Raises ValueError unless `max_norm` is None or a positive number."""
    if max_norm is not None and not (max_norm > 0 and math.isfinite(max_norm)):
        raise ValueError(f"{op}: max_norm must be positive and finite, or None; got {max_norm}")


def check_covered(op: str, optimizer: torch.optim.Optimizer, own: set[Tensor], sharded: bool) -> None:
    """Raises ValueError unless the optimizer holds all of `own` and, besides, nothing that is trained."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if unknown := [p for p in held - own if p.requires_grad]:
        what = (
            "pieces of store.local(...)"
            if sharded
            else "parameters that the model had when the store was made"
        )
        shapes = ", ".join(str(tuple(p.shape)) for p in unknown[:3])
        raise ValueError(
            f"{op}: optimizer must step {what} and no others; it holds {len(unknown)} others, of shapes {shapes}"
        )
    if missing := own - held:
        raise ValueError(
            f"{op}: optimizer must hold all {len(own)} parameters of the store; {len(missing)} are missing"
        )


def trainable_parameters(op: str, model: nn.Module, sharded: bool) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that need a gradient, each once.

    Raises:
        TypeError, ValueError: the model cannot be kept in a store, or has no such parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module; got {type(model).__name__}")
    for name, module in model.named_modules():
        kind = type(module).__name__
        if (
            isinstance(module, nn.parallel.DistributedDataParallel)
            or "FSDP" in kind
            or "FullyShardedDataParallel" in kind
        ):
            raise ValueError(
                f"{op}: model must not be wrapped, since the store exchanges gradients itself; got {kind} at "
                f"{name or 'the top'}"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(f"{op}: gradients must be dense; {name or kind} has sparse=True")
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError(f"{op}: model must have parameters that require gradients; got none")
    devices = {p.device for _, p in named}
    if len(devices) > 1:
        raise ValueError(
            f"{op}: parameters must be on one device; got {', '.join(sorted(map(str, devices)))}"
        )
    for name, p in named:
        if isinstance(p, DTensor):
            raise TypeError(f"{op}: parameters must be plain tensors; {name} is a DTensor")
        layout.check_float_dtype(op, p.dtype, argument=f"dtype of {name}")
        if sharded and not p.is_contiguous():
            raise ValueError(
                f"{op}: with sharded=True parameters must be contiguous; {name} has strides {p.stride()}"
            )
    return [(name, p) for name, p in named if p.numel()]
