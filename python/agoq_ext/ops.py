"""The registered ops as typed Python functions, and their fakes for torch.compile.

Each function checks its arguments, so that wrong input is a ValueError or TypeError naming the argument, the
requirement and the value, and calls `torch.ops.agoq.*`. `reference.py` is the readable twin of every op.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _native, layout

_native.load()
_agoq = torch.ops.agoq


# --- checks --------------------------------------------------------------------------------------------------


def _check_input(op: str, x: Tensor, argument: str = "x") -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {argument} must be a torch.Tensor; got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"{op}: {argument} must be a dense (strided) tensor; got layout {x.layout}")
    layout.check_float_dtype(op, x.dtype, argument=f"{argument}'s dtype")


def _check_codec(op: str, format: str, group_size: int, rounding: str = "nearest") -> None:
    layout.check_format(op, format)
    layout.check_group_size(op, group_size)
    layout.check_rounding(op, rounding)


def _check_shape(op: str, argument: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{op}: {argument} must have shape {tuple(shape)}; got {tuple(tensor.shape)}")


def _check_packed(
    op: str, packed: Tensor, scales: Tensor, cols: int, format: str, group_size: int, *, shards: bool = False
) -> None:
    """packed and scales must be what `quantize` makes of a [rows, cols] tensor (W of them stacked if `shards`)."""
    if packed.dtype != torch.uint8:
        raise TypeError(f"{op}: packed must be uint8; got {packed.dtype}")
    layout.check_scale_dtype(op, scales.dtype)
    dims = 3 if shards else 2
    if packed.dim() != dims:
        raise ValueError(f"{op}: packed must have {dims} dimensions; got shape {tuple(packed.shape)}")
    if cols < 0:
        raise ValueError(f"{op}: cols must not be negative; got {cols}")
    rows = packed.shape[-2]
    lead = tuple(packed.shape[:-2])
    _check_shape(op, "packed", packed, lead + layout.packed_shape(rows, cols, format))
    _check_shape(op, "scales", scales, lead + layout.scales_shape(rows, cols, format, group_size))
    _check_device(op, "scales", scales, packed.device)


def _check_shards(op: str, packed: Tensor, scales: Tensor, cols: int, format: str, group_size: int) -> None:
    _check_packed(op, packed, scales, cols, format, group_size, shards=True)
    if packed.shape[0] < 1:
        raise ValueError(f"{op}: packed must hold at least one shard; got shape {tuple(packed.shape)}")


def _check_device(op: str, argument: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{op}: {argument} must be on packed's device {device}; got {tensor.device}")


def _check_out(op: str, out: Tensor) -> None:
    _check_input(op, out, "out")
    if not out.is_contiguous():
        raise ValueError(
            f"{op}: out must be contiguous; got strides {out.stride()} for shape {tuple(out.shape)}"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{op}: out must not require gradients, except under torch.no_grad(); got one that does"
        )


def _check_offset(op: str, element_offset: int) -> None:
    if element_offset < 0:
        raise ValueError(f"{op}: element_offset must not be negative; got {element_offset}")


def seed_tensor(op: str, rounding: str, seed: int | Tensor | None, device: torch.device) -> Tensor | None:
    """The int64 [1] seed of a stochastic call on `device`; None for nearest rounding.

    None draws one from torch's generator for the device, so two calls differ and `torch.manual_seed` reproduces.
    """
    if rounding == "nearest":
        return None
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(
                f"{op}: seed must be an int or an int64 tensor of one element; got {seed.dtype} {tuple(seed.shape)}"
            )
        if seed.device != device:
            raise ValueError(f"{op}: seed must be on the device of the data, {device}; got {seed.device}")
        return seed.reshape(1)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"{op}: seed must fit in 64 bits; got {seed}")
    return torch.tensor([seed - 2**64 if seed >= 2**63 else seed], dtype=torch.int64, device=device)


# --- ops -----------------------------------------------------------------------------------------------------


def quantize(
    x: Tensor,
    format: str = "int4",
    group_size: int = 128,
    scale_dtype: torch.dtype = torch.bfloat16,
    rounding: str = "nearest",
    seed: int | Tensor | None = None,
    element_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of `x`.

    Args:
        x: [..., cols], float32, float16 or bfloat16, any strides; seen as [rows, cols].
        element_offset: index of the first element for stochastic rounding, so that a buffer quantized in pieces
            draws the same randoms as one quantized whole.

    Returns:
        packed: uint8 [rows, row_bytes]; scales: scale_dtype [rows, groups], [rows, groups, 2] for uint4.
    """
    _check_input("quantize", x)
    _check_codec("quantize", format, group_size, rounding)
    layout.check_scale_dtype("quantize", scale_dtype)
    _check_offset("quantize", element_offset)
    seed = seed_tensor("quantize", rounding, seed, x.device)
    return _agoq.quantize(x.detach(), format, group_size, scale_dtype, rounding, seed, element_offset)


def quantize_out(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    format: str,
    group_size: int,
    rounding: str = "nearest",
    seed: int | Tensor | None = None,
    element_offset: int = 0,
) -> None:
    """`quantize` into given buffers: packed uint8 [rows, row_bytes] and scales, contiguous (wire messages)."""
    _check_input("quantize_out", x)
    _check_codec("quantize_out", format, group_size, rounding)
    rows, cols = layout.as_rows(x.shape)
    _check_packed("quantize_out", packed, scales, cols, format, group_size)
    _check_shape("quantize_out", "packed", packed, layout.packed_shape(rows, cols, format))
    _check_device("quantize_out", "x", x, packed.device)
    _check_offset("quantize_out", element_offset)
    seed = seed_tensor("quantize_out", rounding, seed, x.device)
    _agoq.quantize_out(x.detach(), format, group_size, rounding, seed, element_offset, packed, scales)


def dequantize(
    packed: Tensor,
    scales: Tensor,
    cols: int,
    format: str,
    group_size: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Values of the codes: `dtype` [rows, cols], saturated to the largest finite value of `dtype`."""
    _check_codec("dequantize", format, group_size)
    _check_packed("dequantize", packed, scales, cols, format, group_size)
    layout.check_float_dtype("dequantize", dtype, argument="dtype")
    return _agoq.dequantize(packed, scales, cols, format, group_size, dtype)


def dequantize_out(packed: Tensor, scales: Tensor, out: Tensor, format: str, group_size: int) -> None:
    """`dequantize` into `out` [rows, cols], contiguous, float32, float16 or bfloat16."""
    _check_codec("dequantize_out", format, group_size)
    _check_out("dequantize_out", out)
    rows, cols = layout.as_rows(out.shape)
    _check_packed("dequantize_out", packed, scales, cols, format, group_size)
    _check_shape("dequantize_out", "packed", packed, layout.packed_shape(rows, cols, format))
    _check_device("dequantize_out", "out", out, packed.device)
    _agoq.dequantize_out(packed, scales, format, group_size, out)


def accumulate_(
    packed: Tensor,
    scales: Tensor,
    x: Tensor,
    factor: float,
    format: str,
    group_size: int,
    rounding: str = "nearest",
    seed: int | Tensor | None = None,
    element_offset: int = 0,
) -> None:
    """packed, scales <- quantize(dequantize(packed, scales) + factor * x), in one pass, in FP32, in place.

    The storage step of 8-bit gradients (AGoQ section on QuanGrad: decode, add in high precision, encode).

    Args:
        packed, scales: of a [rows, cols] tensor, contiguous.
        x: [..., cols] with as many elements, float32, float16 or bfloat16.
    """
    _check_codec("accumulate_", format, group_size, rounding)
    _check_input("accumulate_", x)
    rows, cols = layout.as_rows(x.shape)
    _check_packed("accumulate_", packed, scales, cols, format, group_size)
    _check_shape("accumulate_", "packed", packed, layout.packed_shape(rows, cols, format))
    _check_device("accumulate_", "x", x, packed.device)
    _check_offset("accumulate_", element_offset)
    seed = seed_tensor("accumulate_", rounding, seed, x.device)
    _agoq.accumulate_(packed, scales, x.detach(), factor, format, group_size, rounding, seed, element_offset)


def reduce(
    packed: Tensor,
    scales: Tensor,
    cols: int,
    format: str,
    group_size: int,
    factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """factor * (the sum of W shards, in FP32, in order of the first dimension).

    Args:
        packed: uint8 [W, rows, row_bytes]; the first dimension may have any stride (a receive buffer of messages).
        scales: [W, rows, groups(, 2)], likewise.

    Returns:
        `dtype` [rows, cols]. An overflow is Inf: sums are not saturated.
    """
    _check_codec("reduce", format, group_size)
    _check_shards("reduce", packed, scales, cols, format, group_size)
    layout.check_float_dtype("reduce", dtype, argument="dtype")
    return _agoq.reduce(packed, scales, cols, format, group_size, factor, dtype)


def reduce_out(
    packed: Tensor, scales: Tensor, out: Tensor, format: str, group_size: int, factor: float = 1.0
) -> None:
    """`reduce` into `out` [rows, cols], contiguous, float32, float16 or bfloat16."""
    _check_codec("reduce_out", format, group_size)
    _check_out("reduce_out", out)
    rows, cols = layout.as_rows(out.shape)
    _check_shards("reduce_out", packed, scales, cols, format, group_size)
    _check_shape("reduce_out", "packed", packed, (packed.shape[0], *layout.packed_shape(rows, cols, format)))
    _check_device("reduce_out", "out", out, packed.device)
    _agoq.reduce_out(packed, scales, format, group_size, factor, out)


def reduce_quantize_out(
    packed: Tensor,
    scales: Tensor,
    cols: int,
    format: str,
    group_size: int,
    factor: float,
    out_packed: Tensor,
    out_scales: Tensor,
    rounding: str = "nearest",
    seed: int | Tensor | None = None,
    element_offset: int = 0,
) -> None:
    """`reduce`, then `quantize` of the FP32 result into given buffers, in one pass and in the same format."""
    op = "reduce_quantize_out"
    _check_codec(op, format, group_size, rounding)
    _check_shards(op, packed, scales, cols, format, group_size)
    _check_packed(op, out_packed, out_scales, cols, format, group_size)
    _check_shape(op, "out_packed", out_packed, tuple(packed.shape[1:]))
    _check_device(op, "out_packed", out_packed, packed.device)
    _check_offset(op, element_offset)
    seed = seed_tensor(op, rounding, seed, packed.device)
    _agoq.reduce_quantize_out(
        packed,
        scales,
        cols,
        format,
        group_size,
        factor,
        rounding,
        seed,
        element_offset,
        out_packed,
        out_scales,
    )


def norm(packed: Tensor, scales: Tensor, cols: int, format: str, group_size: int) -> tuple[Tensor, Tensor]:
    """(sum of squares of the values: float64 [], whether any of them is not finite: bool []).

    Deterministic: the order of the FP64 additions is fixed (docs/formats.md), whatever the device or the threads.
    """
    _check_codec("norm", format, group_size)
    _check_packed("norm", packed, scales, cols, format, group_size)
    return _agoq.norm(packed, scales, cols, format, group_size)


def cpu_isa() -> str:
    """The instruction set that the CPU kernels use on this machine: 'avx512', 'avx2' or 'baseline'."""
    return _agoq.cpu_isa()


# --- fakes ---------------------------------------------------------------------------------------------------


@torch.library.register_fake("agoq::quantize")
def _quantize_fake(x, format, group_size, scale_dtype, rounding, seed, element_offset):
    rows, cols = math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1
    packed = x.new_empty(layout.packed_shape(rows, cols, format), dtype=torch.uint8)
    scales = x.new_empty(layout.scales_shape(rows, cols, format, group_size), dtype=scale_dtype)
    return packed, scales


@torch.library.register_fake("agoq::dequantize")
def _dequantize_fake(packed, scales, cols, format, group_size, dtype):
    return packed.new_empty((packed.shape[0], cols), dtype=dtype)


@torch.library.register_fake("agoq::reduce")
def _reduce_fake(packed, scales, cols, format, group_size, factor, dtype):
    return packed.new_empty((packed.shape[1], cols), dtype=dtype)


@torch.library.register_fake("agoq::norm")
def _norm_fake(packed, scales, cols, format, group_size):
    return packed.new_empty((), dtype=torch.float64), packed.new_empty((), dtype=torch.bool)


def _no_result_fake(*args):
    return None


# --- ops that write into their arguments ---------------------------------------------------------------------

_library = torch.library.Library("agoq", "IMPL")


def _register_mutation(name: str) -> None:
    """The op's fake, and that it raises the version counters of what it writes.

    Without the latter autograd would not notice that a tensor saved for backward has changed since.
    """
    torch.library.register_fake(f"agoq::{name}", _no_result_fake)
    op = getattr(_agoq, name).default
    arguments = op._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]

    def raise_versions(keyset: torch._C.DispatchKeySet, *args: object) -> None:
        for i in written:
            torch.autograd.graph.increment_version(args[i])  # type: ignore[arg-type]
        with torch._C._AutoDispatchBelowADInplaceOrView():
            op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    _library.impl(name, raise_versions, "ADInplaceOrView", with_keyset=True)


for _name in ("quantize_out", "dequantize_out", "accumulate_", "reduce_out", "reduce_quantize_out"):
    _register_mutation(_name)
