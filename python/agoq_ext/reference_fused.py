"""The fused norms and activations in plain PyTorch: what `fused_ops.py` computes, readably.

Packed results have the bits of `reference.quantize`. The others differ from the native ops by the order in which sums
are added and by the last places of exp, erf and tanh; tests/test_fused_ops.py states by how much. Wherever a formula
rounds to a narrower dtype, so do the native ops.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import layout, reference

Packing = tuple[Tensor, Tensor]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(layout.as_rows(x.shape))


def _encode(x: Tensor, format: str, group_size: int, scale_dtype: torch.dtype) -> Packing:
    return reference.quantize(x, format, group_size, scale_dtype, "nearest", None)


# --- RMS norm ------------------------------------------------------------------------------------------------


def _rms(x: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x * rstd rounded to `dtype`, rstd) of FP32 x [rows, cols]: LlamaRMSNorm's order of roundings."""
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (x * rstd).to(dtype), rstd


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, format: str, group_size: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(weight * round(x * rstd), packed x, scales)."""
    y = weight * _rms(_rows(x).float(), eps, x.dtype)[0]
    return y, *_encode(x, format, group_size, scale_dtype)


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
    """The norm's output from packed x, an x of `dtype`."""
    x = reference.dequantize(packed, scales, cols, format, group_size, torch.float32)
    return weight * _rms(x, eps, dtype)[0]


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
    """(dx in `dtype`, None without a weight; dweight in FP32, None if not needed).

    With h = round(dy * weight): dx = h * rstd + (-1/2 sum(h x) rstd^3 / cols) * 2 x.
    """
    dy = _rows(dy)
    x = reference.dequantize(packed, scales, dy.shape[1], format, group_size, torch.float32)
    normed, rstd = _rms(x, eps, dtype)
    dx = dweight = None
    if need_dweight:
        dweight = (dy * normed).float().sum(0)
    if weight is not None:
        h = (dy * weight).to(dtype).float()
        dvariance = -0.5 * (h * x).sum(-1, keepdim=True) * rstd.pow(3)
        dx = (h * rstd + dvariance / x.shape[-1] * (2 * x)).to(dtype)
    return dx, dweight


# --- LayerNorm -----------------------------------------------------------------------------------------------


def _layer(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """((x - mean) * rstd, rstd) of FP32 x [rows, cols]."""
    centered = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps)
    return centered * rstd, rstd


def _affine(normed: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = normed if weight is None else normed * weight.float()
    return y if bias is None else y + bias.float()


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    format: str,
    group_size: int,
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(LayerNorm of x: FP32 inside, rounded once to x's dtype; packed x; scales)."""
    y = _affine(_layer(_rows(x).float(), eps)[0], weight, bias).to(x.dtype)
    return y, *_encode(x, format, group_size, scale_dtype)


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
    """The norm's output from packed x, an x of `dtype`."""
    x = reference.dequantize(packed, scales, cols, format, group_size, torch.float32)
    return _affine(_layer(x, eps)[0], weight, bias).to(dtype)


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
    """(dx in `dtype`, dweight and dbias in FP32; None for what is not needed).

    With h = dy * weight and n the normalized x: dx = rstd (h - mean(h) - n mean(h n)).
    """
    dy = _rows(dy).float()
    x = reference.dequantize(packed, scales, dy.shape[1], format, group_size, torch.float32)
    normed, rstd = _layer(x, eps)
    dx = None
    if need_dx:
        h = _affine(dy, weight, None)
        dx = rstd * (h - h.mean(-1, keepdim=True) - normed * (h * normed).mean(-1, keepdim=True))
        dx = dx.to(dtype)
    return dx, (dy * normed).sum(0) if need_dweight else None, dy.sum(0) if need_dbias else None


# --- SwiGLU --------------------------------------------------------------------------------------------------


def swiglu_quantize(
    gate: Tensor, up: Tensor, format: str, group_size: int, scale_dtype: torch.dtype, keep_up: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(silu(gate) * up, packed gate, its scales, packed up, its scales); up's None if it is not kept."""
    gate, up = _rows(gate), _rows(up)
    kept_up = _encode(up, format, group_size, scale_dtype) if keep_up else (None, None)
    return F.silu(gate) * up, *_encode(gate, format, group_size, scale_dtype), *kept_up


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
    """The product from packed gate and up."""
    gate = reference.dequantize(gate_packed, gate_scales, cols, format, group_size, gate_dtype)
    return F.silu(gate) * reference.dequantize(up_packed, up_scales, cols, format, group_size, up_dtype)


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
    """(dgate, dup, h = the product), None for what is not needed; only dup can do without up."""
    dh = _rows(dh)
    cols = dh.shape[1]
    gate = reference.dequantize(gate_packed, gate_scales, cols, format, group_size, gate_dtype)
    act = F.silu(gate)
    dgate = h = None
    if up_packed is not None and up_scales is not None:
        up = reference.dequantize(up_packed, up_scales, cols, format, group_size, up_dtype)
        h = act * up if need_h else None
        dgate = torch.ops.aten.silu_backward((dh * up).to(gate_dtype), gate) if need_dgate else None
    return dgate, (dh * act).to(up_dtype) if need_dup else None, h


# --- GELU ----------------------------------------------------------------------------------------------------


def gelu(x: Tensor, approximate: str) -> Tensor:
    """x Phi(x), computed in FP64, in x's dtype. (What F.gelu makes of infinities differs between processors.)"""
    v = x.double()
    if approximate == "tanh":
        right = torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v.pow(3)))
    else:
        right = torch.erf(v * math.sqrt(0.5))
    return (0.5 * v * (1 + right)).to(x.dtype)


def gelu_quantize(
    x: Tensor, approximate: str, format: str, group_size: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(gelu(x), packed x, scales)."""
    return gelu(_rows(x), approximate), *_encode(x, format, group_size, scale_dtype)


def gelu_dequantize(
    packed: Tensor,
    scales: Tensor,
    cols: int,
    approximate: str,
    format: str,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """gelu(x) from packed x, an x of `dtype`."""
    x = reference.dequantize(packed, scales, cols, format, group_size, dtype)
    return gelu(x, approximate)


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
    """(dx in `dtype`, y = gelu(x) or None)."""
    dy = _rows(dy)
    x = reference.dequantize(packed, scales, dy.shape[1], format, group_size, dtype)
    dx = torch.ops.aten.gelu_backward(dy.float(), x.float(), approximate=approximate).to(dtype)
    return dx, gelu(x, approximate) if need_y else None
