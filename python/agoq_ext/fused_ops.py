"""The ops that fuse a norm or an activation with quantization of its input, and their fakes.

For each of rms_norm, layer_norm, swiglu and gelu:

    *_quantize    the output and the packed input, in one pass over the input
    *_dequantize  the output again, from the packed input
    *_backward    the gradients, from the packed input; for swiglu and gelu the output too, where asked for

Inputs are [..., cols], float32, float16 or bfloat16, any strides; results are [rows, cols]. Packed results are those of
`ops.quantize` with rounding to nearest. All results are deterministic. `reference_fused.py` gives every formula.
Wrong input raises ValueError or TypeError. Results that were not asked for are None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import layout
from .ops import _agoq, _check_codec, _check_input, _check_packed, _check_shape

# --- checks --------------------------------------------------------------------------------------------------


def _check_encode(op: str, format: str, group_size: int, scale_dtype: torch.dtype) -> None:
    _check_codec(op, format, group_size)
    layout.check_scale_dtype(op, scale_dtype)


# What backward calls reads neither layout nor strides: torch.compile bans them there.
def _check_float(op: str, argument: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {argument} must be a torch.Tensor; got {type(x).__name__}")
    layout.check_float_dtype(op, x.dtype, argument=f"{argument}'s dtype")


def _check_vector(op: str, argument: str, vector: Tensor | None, cols: int, device: torch.device) -> None:
    if vector is None:
        return
    _check_float(op, argument, vector)
    _check_shape(op, argument, vector, (cols,))
    if vector.device != device:
        raise ValueError(f"{op}: {argument} must be on {device}; got {vector.device}")


def _check_saved(
    op: str, packed: Tensor, scales: Tensor, cols: int, format: str, group_size: int, dtype: torch.dtype
) -> None:
    _check_codec(op, format, group_size)
    _check_packed(op, packed, scales, cols, format, group_size)
    layout.check_float_dtype(op, dtype, argument="dtype")


def _check_upstream(op: str, argument: str, dy: Tensor, packed: Tensor) -> int:
    """The columns of an upstream gradient that has as many rows as packed."""
    _check_float(op, argument, dy)
    rows, cols = layout.as_rows(dy.shape)
    if packed.dim() == 2 and packed.shape[0] != rows:
        raise ValueError(f"{op}: {argument} must have packed's {packed.shape[0]} rows; got {rows}")
    if dy.device != packed.device:
        raise ValueError(f"{op}: {argument} must be on packed's device {packed.device}; got {dy.device}")
    return cols


def _check_approximate(op: str, approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"{op}: approximate must be one of none, tanh; got {approximate!r}")


# --- RMS norm ------------------------------------------------------------------------------------------------


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    format: str,
    group_size: int,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, packed x, scales) with y = weight * round(x / sqrt(mean(x^2) + eps)), as LlamaRMSNorm computes it.

    FP32 inside; the normalized x is rounded to x's dtype before the weight [cols] multiplies. y has the dtype that
    x and weight promote to.
    """
    op = "rms_norm_quantize"
    _check_input(op, x)
    _check_vector(op, "weight", weight, layout.as_rows(x.shape)[1], x.device)
    _check_encode(op, format, group_size, scale_dtype)
    return _agoq.rms_norm_quantize(x.detach(), weight.detach(), eps, format, group_size, scale_dtype)


def rms_norm_dequantize(
    packed: Tensor,
    scales: Tensor,
    cols: int,
    weight: Tensor,
    eps: float,
    format: str,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """y of `rms_norm_quantize` from the packed x, whose dtype was `dtype`."""
    op = "rms_norm_dequantize"
    _check_saved(op, packed, scales, cols, format, group_size, dtype)
    _check_vector(op, "weight", weight, cols, packed.device)
    return _agoq.rms_norm_dequantize(packed, scales, cols, weight.detach(), eps, format, group_size, dtype)


def rms_norm_backward(
    dy: Tensor,
    packed: Tensor,
    scales: Tensor,
    weight: Tensor | None,
    eps: float,
    format: str,
    group_size: int,
    dtype: torch.dtype,
    need_dweight: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """(dx in `dtype`, dweight float32 [cols]) for dy [..., cols]; without a weight there is no dx.

    Rows are summed into dweight in a fixed order, whatever the threads.
    """
    op = "rms_norm_backward"
    cols = _check_upstream(op, "dy", dy, packed)
    _check_saved(op, packed, scales, cols, format, group_size, dtype)
    _check_vector(op, "weight", weight, cols, packed.device)
    weight = None if weight is None else weight.detach()
    dx, dweight = _agoq.rms_norm_backward(
        dy.detach(), packed, scales, weight, eps, format, group_size, dtype, need_dweight
    )
    return None if weight is None else dx, dweight if need_dweight else None


# --- LayerNorm -----------------------------------------------------------------------------------------------


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    format: str,
    group_size: int,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, packed x, scales) with y = (x - mean) / sqrt(variance + eps) * weight + bias, rounded once to x's dtype."""
    op = "layer_norm_quantize"
    _check_input(op, x)
    cols = layout.as_rows(x.shape)[1]
    _check_vector(op, "weight", weight, cols, x.device)
    _check_vector(op, "bias", bias, cols, x.device)
    _check_encode(op, format, group_size, scale_dtype)
    weight, bias = (None if p is None else p.detach() for p in (weight, bias))
    return _agoq.layer_norm_quantize(x.detach(), weight, bias, eps, format, group_size, scale_dtype)


def layer_norm_dequantize(
    packed: Tensor,
    scales: Tensor,
    cols: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    format: str,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """y of `layer_norm_quantize` from the packed x, whose dtype was `dtype`."""
    op = "layer_norm_dequantize"
    _check_saved(op, packed, scales, cols, format, group_size, dtype)
    _check_vector(op, "weight", weight, cols, packed.device)
    _check_vector(op, "bias", bias, cols, packed.device)
    weight, bias = (None if p is None else p.detach() for p in (weight, bias))
    return _agoq.layer_norm_dequantize(packed, scales, cols, weight, bias, eps, format, group_size, dtype)


def layer_norm_backward(
    dy: Tensor,
    packed: Tensor,
    scales: Tensor,
    weight: Tensor | None,
    eps: float,
    format: str,
    group_size: int,
    dtype: torch.dtype,
    need_dx: bool = True,
    need_dweight: bool = True,
    need_dbias: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx in `dtype`, dweight float32 [cols], dbias float32 [cols]) for dy [..., cols]."""
    op = "layer_norm_backward"
    cols = _check_upstream(op, "dy", dy, packed)
    _check_saved(op, packed, scales, cols, format, group_size, dtype)
    _check_vector(op, "weight", weight, cols, packed.device)
    weight = None if weight is None else weight.detach()
    needs = (need_dx, need_dweight, need_dbias)
    grads = _agoq.layer_norm_backward(
        dy.detach(), packed, scales, weight, eps, format, group_size, dtype, *needs
    )
    dx, dweight, dbias = (g if need else None for g, need in zip(grads, needs, strict=True))
    return dx, dweight, dbias


# --- SwiGLU --------------------------------------------------------------------------------------------------


def swiglu_quantize(
    gate: Tensor,
    up: Tensor,
    format: str,
    group_size: int,
    scale_dtype: torch.dtype = torch.bfloat16,
    keep_up: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(h, packed gate, its scales, packed up, its scales) with h = silu(gate) * up; up's None unless it is kept.

    silu in FP32, rounded to gate's dtype; h has the dtype that gate and up promote to.
    """
    op = "swiglu_quantize"
    _check_input(op, gate, "gate")
    _check_input(op, up, "up")
    _check_shape(op, "up", up, tuple(gate.shape))
    if up.device != gate.device:
        raise ValueError(f"{op}: up must be on gate's device {gate.device}; got {up.device}")
    _check_encode(op, format, group_size, scale_dtype)
    h, *kept = _agoq.swiglu_quantize(gate.detach(), up.detach(), format, group_size, scale_dtype, keep_up)
    return (h, *kept) if keep_up else (h, *kept[:2], None, None)


def swiglu_dequantize(
    gate_packed: Tensor,
    gate_scales: Tensor,
    up_packed: Tensor,
    up_scales: Tensor,
    cols: int,
    format: str,
    group_size: int,
    gate_dtype: torch.dtype,
    up_dtype: torch.dtype,
) -> Tensor:
    """h of `swiglu_quantize` from packed gate and up."""
    op = "swiglu_dequantize"
    _check_saved(op, gate_packed, gate_scales, cols, format, group_size, gate_dtype)
    _check_saved(op, up_packed, up_scales, cols, format, group_size, up_dtype)
    _check_shape(op, "up_packed", up_packed, tuple(gate_packed.shape))
    return _agoq.swiglu_dequantize(
        gate_packed, gate_scales, up_packed, up_scales, cols, format, group_size, gate_dtype, up_dtype
    )


def swiglu_backward(
    dh: Tensor,
    gate_packed: Tensor,
    gate_scales: Tensor,
    up_packed: Tensor | None,
    up_scales: Tensor | None,
    format: str,
    group_size: int,
    gate_dtype: torch.dtype,
    up_dtype: torch.dtype,
    need_dgate: bool = True,
    need_dup: bool = True,
    need_h: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dgate in `gate_dtype`, dup in `up_dtype`, h) for dh [..., cols]; only dup can do without up."""
    op = "swiglu_backward"
    cols = _check_upstream(op, "dh", dh, gate_packed)
    _check_saved(op, gate_packed, gate_scales, cols, format, group_size, gate_dtype)
    layout.check_float_dtype(op, up_dtype, argument="up_dtype")
    if up_packed is None or up_scales is None:
        if need_dgate or need_h or up_packed is not up_scales:
            raise ValueError(
                f"{op}: up_packed and up_scales must be given unless only dup is needed; got None"
            )
    else:
        _check_saved(op, up_packed, up_scales, cols, format, group_size, up_dtype)
        _check_shape(op, "up_packed", up_packed, tuple(gate_packed.shape))
    needs = (need_dgate, need_dup, need_h)
    results = _agoq.swiglu_backward(
        dh.detach(),
        gate_packed,
        gate_scales,
        up_packed,
        up_scales,
        format,
        group_size,
        gate_dtype,
        up_dtype,
        *needs,
    )
    dgate, dup, h = (r if need else None for r, need in zip(results, needs, strict=True))
    return dgate, dup, h


# --- GELU ----------------------------------------------------------------------------------------------------


def gelu_quantize(
    x: Tensor, approximate: str, format: str, group_size: int, scale_dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, packed x, scales) with y = gelu(x), FP32 rounded once to x's dtype; approximate: "none" (erf) or "tanh"."""
    op = "gelu_quantize"
    _check_input(op, x)
    _check_approximate(op, approximate)
    _check_encode(op, format, group_size, scale_dtype)
    return _agoq.gelu_quantize(x.detach(), approximate, format, group_size, scale_dtype)


def gelu_dequantize(
    packed: Tensor,
    scales: Tensor,
    cols: int,
    approximate: str,
    format: str,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """y of `gelu_quantize` from the packed x, whose dtype was `dtype`."""
    op = "gelu_dequantize"
    _check_approximate(op, approximate)
    _check_saved(op, packed, scales, cols, format, group_size, dtype)
    return _agoq.gelu_dequantize(packed, scales, cols, approximate, format, group_size, dtype)


def gelu_backward(
    dy: Tensor,
    packed: Tensor,
    scales: Tensor,
    approximate: str,
    format: str,
    group_size: int,
    dtype: torch.dtype,
    need_y: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(dx in `dtype`, y) for dy [..., cols]."""
    op = "gelu_backward"
    _check_approximate(op, approximate)
    cols = _check_upstream(op, "dy", dy, packed)
    _check_saved(op, packed, scales, cols, format, group_size, dtype)
    dx, y = _agoq.gelu_backward(dy.detach(), packed, scales, approximate, format, group_size, dtype, need_y)
    return dx, y if need_y else None


# --- fakes ---------------------------------------------------------------------------------------------------


def _promoted(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return torch.promote_types(a, b)


def _packed_fake(x, format, group_size, scale_dtype, kept=True):
    if not kept:
        return x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=scale_dtype)
    rows, cols = layout.as_rows(x.shape)
    packed = x.new_empty(layout.packed_shape(rows, cols, format), dtype=torch.uint8)
    return packed, x.new_empty(layout.scales_shape(rows, cols, format, group_size), dtype=scale_dtype)


def _dense_fake(like, rows, cols, dtype, wanted=True):
    return like.new_empty((rows, cols) if wanted else 0, dtype=dtype)


def _vector_fake(like, cols, wanted):
    return like.new_empty(cols if wanted else 0, dtype=torch.float32)


@torch.library.register_fake("agoq::rms_norm_quantize")
def _rms_norm_quantize_fake(x, weight, eps, format, group_size, scale_dtype):
    y = _dense_fake(x, *layout.as_rows(x.shape), _promoted(x.dtype, weight.dtype))
    return y, *_packed_fake(x, format, group_size, scale_dtype)


@torch.library.register_fake("agoq::rms_norm_dequantize")
def _rms_norm_dequantize_fake(packed, scales, cols, weight, eps, format, group_size, dtype):
    return _dense_fake(packed, packed.shape[0], cols, _promoted(dtype, weight.dtype))


@torch.library.register_fake("agoq::rms_norm_backward")
def _rms_norm_backward_fake(dy, packed, scales, weight, eps, format, group_size, dtype, need_dweight):
    rows, cols = layout.as_rows(dy.shape)
    return _dense_fake(dy, rows, cols, dtype, weight is not None), _vector_fake(dy, cols, need_dweight)


@torch.library.register_fake("agoq::layer_norm_quantize")
def _layer_norm_quantize_fake(x, weight, bias, eps, format, group_size, scale_dtype):
    y = _dense_fake(x, *layout.as_rows(x.shape), x.dtype)
    return y, *_packed_fake(x, format, group_size, scale_dtype)


@torch.library.register_fake("agoq::layer_norm_dequantize")
def _layer_norm_dequantize_fake(packed, scales, cols, weight, bias, eps, format, group_size, dtype):
    return _dense_fake(packed, packed.shape[0], cols, dtype)


@torch.library.register_fake("agoq::layer_norm_backward")
def _layer_norm_backward_fake(
    dy, packed, scales, weight, eps, format, group_size, dtype, need_dx, need_dweight, need_dbias
):
    rows, cols = layout.as_rows(dy.shape)
    dx = _dense_fake(dy, rows, cols, dtype, need_dx)
    return dx, _vector_fake(dy, cols, need_dweight), _vector_fake(dy, cols, need_dbias)


@torch.library.register_fake("agoq::swiglu_quantize")
def _swiglu_quantize_fake(gate, up, format, group_size, scale_dtype, keep_up):
    h = _dense_fake(gate, *layout.as_rows(gate.shape), _promoted(gate.dtype, up.dtype))
    kept = _packed_fake(gate, format, group_size, scale_dtype)
    return h, *kept, *_packed_fake(up, format, group_size, scale_dtype, keep_up)


@torch.library.register_fake("agoq::swiglu_dequantize")
def _swiglu_dequantize_fake(
    gate_packed, gate_scales, up_packed, up_scales, cols, format, group_size, gate_dtype, up_dtype
):
    return _dense_fake(gate_packed, gate_packed.shape[0], cols, _promoted(gate_dtype, up_dtype))


@torch.library.register_fake("agoq::swiglu_backward")
def _swiglu_backward_fake(
    dh, gate_packed, gate_scales, up_packed, up_scales, format, group_size, gate_dtype, up_dtype, *needs
):
    shape = layout.as_rows(dh.shape)
    dtypes = (gate_dtype, up_dtype, _promoted(gate_dtype, up_dtype))
    return tuple(_dense_fake(dh, *shape, dtype, need) for dtype, need in zip(dtypes, needs, strict=True))


@torch.library.register_fake("agoq::gelu_quantize")
def _gelu_quantize_fake(x, approximate, format, group_size, scale_dtype):
    return _dense_fake(x, *layout.as_rows(x.shape), x.dtype), *_packed_fake(
        x, format, group_size, scale_dtype
    )


@torch.library.register_fake("agoq::gelu_dequantize")
def _gelu_dequantize_fake(packed, scales, cols, approximate, format, group_size, dtype):
    return _dense_fake(packed, packed.shape[0], cols, dtype)


@torch.library.register_fake("agoq::gelu_backward")
def _gelu_backward_fake(dy, packed, scales, approximate, format, group_size, dtype, need_y):
    shape = layout.as_rows(dy.shape)
    return _dense_fake(dy, *shape, dtype), _dense_fake(dy, *shape, dtype, need_y)
