"""FSDP2 with quantized communication: gradients reduce-scattered as codes, parameters all-gathered as codes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from . import layout
from .collectives import Codec, all_gather, reduce_scatter
from .collectives.functions import MIN_NUMEL


class _Comm:
    """What both directions share: how values are encoded, and plain memory for buffers."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer as FSDP asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _options(self, group: dist.ProcessGroup, async_op: bool) -> dict[str, Any]:
        codec = self.codec
        return {
            "group": group,
            "format": codec.format,
            "group_size": codec.group_size,
            "rounding": codec.rounding,
            "async_op": async_op,
            "min_numel": MIN_NUMEL,
        }


class QuantizedReduceScatter(_Comm, ReduceScatter):
    """`agoq_ext.reduce_scatter` as FSDP2 calls it: with SUM, AVG or PREMUL_SUM, on world contiguous chunks.

    Each chunk is encoded by itself, so no group crosses two ranks' chunks; sums are FP32, in rank order, rounded once
    to the reduction's dtype.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        name, factor = _reduction(op)
        options = self._options(group, async_op)
        return reduce_scatter(output_tensor, input_tensor, op=name, factor=factor, **options)


class QuantizedAllGather(_Comm, AllGather):
    """`agoq_ext.all_gather` as FSDP2 calls it. All ranks, the owner too, take what was decoded.

    A module whose parameters have several dtypes is gathered as bytes; those pass through, with a warning.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if input_tensor.dtype not in layout.FLOAT_DTYPES:
            warnings.warn(
                "agoq_ext.fsdp: an all-gather of several dtypes travels as bytes and is not quantized; give the "
                "parameters of a module one dtype, or a MixedPrecisionPolicy with param_dtype",
                stacklevel=2,
            )
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        return all_gather(output_tensor, input_tensor, **self._options(group, async_op))


def _reduction(op: Any) -> tuple[str, float]:
    """("avg" or "sum", factor) of a torch.distributed reduction.

    Raises:
        ValueError: another one than SUM, AVG and PREMUL_SUM.
    """
    if op == dist.ReduceOp.AVG:
        return "avg", 1.0
    if op == dist.ReduceOp.SUM:
        return "sum", 1.0
    state = op.__getstate__() if isinstance(op, dist.ReduceOp) else None  # type: ignore[attr-defined]
    if isinstance(state, tuple) and "PREMUL_SUM" in str(state[0]) and isinstance(state[1], float):
        return "sum", state[1]
    raise ValueError(f"QuantizedReduceScatter: op must be SUM, AVG or PREMUL_SUM by a number; got {op}")


def quantize_comms(
    model: nn.Module,
    reduce_scatter: str | None = "int8",
    all_gather: str | None = None,
    *,
    group_size: int = 128,
    rounding: str = "nearest",
) -> int:
    """Makes every FSDP2 module in `model` exchange codes; call it after the last `fully_shard`.

    Gradients are encoded once (AGoQ, arXiv 2605.00539, QuanGrad, with the sum in FP32 and no second encoding);
    parameters, if asked for, before each all-gather from their exact shards (as in ZeRO++, arXiv 2306.10209), so the
    shards that the optimizer steps stay exact. What has fewer than 1024 elements a rank travels unquantized. The
    reduction of HSDP between replicas is FSDP's own all-reduce: give the mesh's replicate dimension the backend "agoq"
    (docs/gradients.md) to quantize it too.

    Args:
        model: contains modules that `torch.distributed.fsdp.fully_shard` was applied to.
        reduce_scatter: a format of `agoq_ext.quantize` for gradients, or None to leave FSDP's own.
        all_gather: the same for parameters.
        group_size: elements that share a scale.
        rounding: "nearest" or "stochastic", of gradients; parameters are rounded to nearest.

    Returns:
        The number of FSDP modules.

    Raises:
        ValueError: an option is not supported, or `model` has no FSDP modules.
    """
    op = "quantize_comms"
    codecs: list[Codec | None] = []
    for argument, format, way in (
        ("reduce_scatter", reduce_scatter, rounding),
        ("all_gather", all_gather, "nearest"),
    ):
        if format is not None:
            layout.check_format(op, format, argument=argument)
        codecs.append(None if format is None else Codec(format, group_size, rounding=way))
    layout.check_group_size(op, group_size)
    layout.check_rounding(op, rounding)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(f"{op}: model must contain modules that fully_shard was applied to; got none")
    gradients, parameters = codecs
    for module in modules:
        if gradients is not None:
            module.set_custom_reduce_scatter(QuantizedReduceScatter(gradients))
        if parameters is not None:
            module.set_custom_all_gather(QuantizedAllGather(parameters))
        if _replicates_over_gloo(module):
            # Gloo has no AVG; FSDP divides by itself when asked to sum.
            module.set_force_sum_reduction_for_comms(True)
    return len(modules)


def _replicates_over_gloo(module: FSDPModule) -> bool:
    for group in module._get_fsdp_state()._fsdp_param_groups:
        mesh_info = group.mesh_info
        replicas = getattr(mesh_info, "replicate_process_group", None)
        if replicas is not None and dist.get_backend(replicas) == "gloo":
            return True
    return False
