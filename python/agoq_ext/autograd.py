"""autograd.Function classes whose saved inputs are quantized and whose cheap intermediates are recomputed.

The forward values are those of plain PyTorch on the unquantized input, bit for bit; only backward reads the
decoded copy (AGoQ, arXiv 2605.00539, layer-aware activation quantization). For a saved input x, codes q = Q(x)
and x' = D(q), backward returns what exact autograd returns when x' stands where x stood:

    linear        y = x w^T + b            dx = dy w            dw = dy^T x'
    rms_norm      n = g * (x * r(x)), r(x) = (mean(x^2) + eps)^-1/2, and dx, dg with x' and r(x')
    projections   y_i = n w_i^T + b_i      dn = sum_i dy_i w_i  dw_i = dy_i^T n(x'), then as rms_norm
    swiglu        h = silu(u) * v          du, dv with u', v'
    swiglu_linear y = h w^T + b            dh = dy w            dw = dy^T h(u', v'), then as swiglu

The functions take what `nn.functional` checked and do nothing but compute: each is built from registered ops, keeps
tensors through `save_for_backward` alone and only those that a needed gradient reads. `dtype` is the dtype
that autocast gives to the matrix products, None without autocast. Weights are saved as given, not as their
autocast copies, and are cast again in backward: same values, and no second copy of them lives until then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from . import ops


class Codec(NamedTuple):
    """How a saved tensor is stored: a format, its group size and the dtype of its scales (docs/formats.md)."""

    format: str
    group_size: int
    scale_dtype: torch.dtype

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(packed uint8 [rows, row_bytes], scales [rows, groups(, 2)]) of `x` [..., cols]."""
        return ops.quantize(x, self.format, self.group_size, self.scale_dtype)

    def decode(self, packed: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The values as `dtype`, of `shape` = [..., cols]."""
        out = ops.dequantize(packed, scales, shape[-1], self.format, self.group_size, dtype)
        return out.reshape(shape)


Pair = tuple[Tensor | None, Tensor | None]
NOTHING: Pair = (None, None)


# --- shared parts --------------------------------------------------------------------------------------------


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """x w^T + b with w and b cast as autocast would; x is cast already."""
    return F.linear(x, _cast(weight, dtype), None if bias is None else _cast(bias, dtype))


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives to matrix products on x's device; None where it is off."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta: autocast knows no such device
        return None
    return torch.get_autocast_dtype(device)


def _without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Dtypes here are explicit: a backward called inside an autocast region must not be cast a second time."""
    if autocast_dtype(x) is None:
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def _refuse_double_backward(op: str) -> None:
    """Raises RuntimeError when backward itself is being recorded: its derivative would miss the saved tensors."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{op}: double backward is not supported, because the saved input is quantized; "
            "call backward without create_graph=True"
        )


def _rows(x: Tensor) -> Tensor:
    """[..., cols] as [rows, cols]."""
    return x.reshape(-1, x.shape[-1])


def _weight_grad(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x: [out, in] from dy [..., out] and x [..., in]."""
    return _rows(dy).t() @ _rows(x)


def _input_grad(dy: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
    """dy w, of `shape` = [..., in]."""
    return (_rows(dy) @ weight).reshape(shape)


def _bias_grad(dy: Tensor) -> Tensor:
    return _rows(dy).sum(0)


def _rms(x: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x * rstd as `dtype` [..., cols], rstd FP32 [..., 1]) of FP32 x; the order of roundings is LlamaRMSNorm's."""
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (x * rstd).to(dtype), rstd


def _rms_input_grad(dn: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of weight * (x * rstd).to(dtype) with respect to FP32 x, in FP32.

    With h = dn * weight: h * rstd + (-1/2 sum(h x) rstd^3 / cols) * 2 x, in the order autograd takes.
    """
    h = (dn * weight).to(dtype).float()
    drstd = (h * x).sum(-1, keepdim=True)
    dvariance = -0.5 * drstd * rstd.pow(3)
    return h * rstd + dvariance / x.shape[-1] * (2 * x)


def _rms_weight_grad(dn: Tensor, normed: Tensor) -> Tensor:
    """Sum of dn * normed over all but the last dimension."""
    product = dn * normed
    return product.sum(tuple(range(product.dim() - 1))) if product.dim() > 1 else product


def _swiglu_grads(
    dh: Tensor, gate: Tensor, up: Tensor | None, act: Tensor | None, need: Sequence[bool]
) -> Pair:
    """(du, dv) of silu(u) * v; `up` may be absent where du is not needed, `act` = silu(u) where dv is not."""
    dgate = dup = None
    if need[1]:
        assert act is not None
        dup = dh * act
    if need[0]:
        assert up is not None
        dgate = torch.ops.aten.silu_backward((dh * up).to(gate.dtype), gate)
    return dgate, dup


# --- functions -----------------------------------------------------------------------------------------------


class RMSNorm(Function):
    """g * (x * rstd): keeps packed x, and g where dx is needed; rstd and the normalized x are recomputed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, codec: Codec) -> Tensor:
        need_x, need_weight = ctx.needs_input_grad[:2]
        packed, scales = codec.encode(x) if need_x or need_weight else NOTHING
        ctx.save_for_backward(packed, scales, weight if need_x else None)
        ctx.eps, ctx.codec, ctx.shape, ctx.dtypes = eps, codec, x.shape, (x.dtype, weight.dtype)
        with _without_autocast(x):
            return weight * _rms(x.float(), eps, x.dtype)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward("rms_norm")
        packed, scales, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        x_dtype, weight_dtype = ctx.dtypes
        dx = dweight = None
        with _without_autocast(dy):
            if need_x or need_weight:
                x = ctx.codec.decode(packed, scales, ctx.shape, torch.float32)
                normed, rstd = _rms(x, ctx.eps, x_dtype)
                if need_weight:
                    dweight = _rms_weight_grad(dy, normed).to(weight_dtype)
                if need_x:
                    dx = _rms_input_grad(dy, x, rstd, weight, x_dtype).to(x_dtype)
        return dx, dweight, None, None


class Projections(Function):
    """Linear layers that read one input, or its RMS norm: keeps packed x once, and the weights that dx needs.

    Inputs: x [..., in]; norm_weight [in] or None; then `count` weights [out_i, in] and `count` biases [out_i] or
    None. `ready` holds x's codes and scales where somebody has them already, else Nones. Outputs: `count` tensors
    [..., out_i]. Without a norm the stored x is the one the products read, in
    `dtype`; with a norm it is the norm's input in its own dtype, and the norm's output is recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        ready_packed: Tensor | None,
        ready_scales: Tensor | None,
        eps: float,
        codec: Codec,
        dtype: torch.dtype | None,
        count: int,
        *params: Any,
    ) -> tuple[Tensor, ...]:
        need_x, need_norm = ctx.needs_input_grad[:2]
        needs = ctx.needs_input_grad[8:]
        need_weights = any(needs[:count])
        weights, biases = params[:count], params[count:]
        with _without_autocast(x):
            if norm_weight is None:
                source = normed = _cast(x, dtype)
            else:
                source = x
                normed = _cast(norm_weight * _rms(x.float(), eps, x.dtype)[0], dtype)
            # dx of a plain linear reads no x; dx of a norm reads it, and dg reads x and dn.
            need_source = need_weights or (norm_weight is not None and (need_x or need_norm))
            packed, scales = ready_packed, ready_scales
            if not need_source:
                packed, scales = NOTHING
            elif packed is None:
                packed, scales = codec.encode(source)
            need_dn = need_x or need_norm
            keep_norm = norm_weight if need_x or need_weights else None
            ctx.save_for_backward(packed, scales, keep_norm, *(w if need_dn else None for w in weights))
            ctx.eps, ctx.codec, ctx.count, ctx.shape = eps, codec, count, x.shape
            ctx.has_norm = norm_weight is not None
            ctx.dtypes = (x.dtype, None if norm_weight is None else norm_weight.dtype, normed.dtype)
            ctx.param_dtypes = tuple(None if p is None else p.dtype for p in params)
            return tuple(_linear(normed, w, b, dtype) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward("rms_norm_linear" if ctx.has_norm else "linear")
        packed, scales, norm_weight, *weights = ctx.saved_tensors
        count, codec, shape = ctx.count, ctx.codec, ctx.shape
        need_x, need_norm = ctx.needs_input_grad[:2]
        needs = ctx.needs_input_grad[8:]
        need_weights = any(needs[:count])
        x_dtype, norm_dtype, compute_dtype = ctx.dtypes
        dx = dnorm = x = rstd = normed = product = None
        grads: list[Tensor | None] = [None] * (2 * count)
        with _without_autocast(dys[0]):
            if packed is not None and not ctx.has_norm:
                product = codec.decode(packed, scales, shape, compute_dtype)
            elif packed is not None:
                x = codec.decode(packed, scales, shape, torch.float32)
                normed, rstd = _rms(x, ctx.eps, x_dtype)
                if need_weights:
                    product = (norm_weight * normed).to(compute_dtype)
            for i, dy in enumerate(dys):
                if needs[i]:
                    assert product is not None
                    grads[i] = _weight_grad(dy, product).to(ctx.param_dtypes[i])
                if needs[count + i]:
                    grads[count + i] = _bias_grad(dy).to(ctx.param_dtypes[count + i])
            del product
            if need_x or need_norm:
                # Under autocast the norm's output keeps its own dtype, and that is what autograd sums in,
                # the last product first.
                dn_dtype = torch.promote_types(x_dtype, norm_dtype) if ctx.has_norm else x_dtype
                dn = None
                for dy, weight in zip(reversed(dys), reversed(weights), strict=True):
                    part = _input_grad(dy, weight.to(dy.dtype), shape).to(dn_dtype)
                    dn = part if dn is None else dn + part
                assert dn is not None
                if not ctx.has_norm:
                    dx = dn
                else:
                    assert x is not None and rstd is not None and normed is not None
                    if need_norm:
                        dnorm = _rms_weight_grad(dn, normed).to(norm_dtype)
                    if need_x:
                        dx = _rms_input_grad(dn, x, rstd, norm_weight, x_dtype).to(x_dtype)
        return dx, dnorm, None, None, None, None, None, None, *grads


class SwiGLU(Function):
    """silu(gate) * up: keeps packed gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, codec: Codec) -> Tensor:
        need_gate, need_up = ctx.needs_input_grad[:2]
        kept_gate = codec.encode(gate) if need_gate or need_up else NOTHING
        kept_up = codec.encode(up) if need_gate else NOTHING
        ctx.save_for_backward(*kept_gate, *kept_up)
        ctx.codec, ctx.shape, ctx.dtypes = codec, gate.shape, (gate.dtype, up.dtype)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward("swiglu")
        gate_packed, gate_scales, up_packed, up_scales = ctx.saved_tensors
        need_gate, need_up = ctx.needs_input_grad[:2]
        if gate_packed is None:
            return None, None, None
        gate_dtype, up_dtype = ctx.dtypes
        gate = ctx.codec.decode(gate_packed, gate_scales, ctx.shape, gate_dtype)
        up = ctx.codec.decode(up_packed, up_scales, ctx.shape, up_dtype) if need_gate else None
        act = F.silu(gate) if need_up else None
        dgate, dup = _swiglu_grads(dh, gate, up, act, (need_gate, need_up))
        return dgate, None if dup is None else dup.to(up_dtype), None


class SwiGLULinear(Function):
    """A linear layer of silu(gate) * up: keeps packed gate and up, and w where they need gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        codec: Codec,
        dtype: torch.dtype | None,
    ) -> Tensor:
        need_gate, need_up, need_weight = ctx.needs_input_grad[:3]
        kept_gate = codec.encode(gate) if need_gate or need_up or need_weight else NOTHING
        kept_up = codec.encode(up) if need_gate or need_weight else NOTHING
        ctx.save_for_backward(*kept_gate, *kept_up, weight if need_gate or need_up else None)
        ctx.codec, ctx.shape, ctx.dtypes = codec, gate.shape, (gate.dtype, up.dtype)
        ctx.param_dtypes = (weight.dtype, None if bias is None else bias.dtype)
        with _without_autocast(gate):
            product = F.silu(gate) * up
            return _linear(_cast(product, dtype), weight, bias, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward("swiglu_linear")
        gate_packed, gate_scales, up_packed, up_scales, weight = ctx.saved_tensors
        need_gate, need_up, need_weight, need_bias = ctx.needs_input_grad[:4]
        gate_dtype, up_dtype = ctx.dtypes
        dgate = dup = dweight = dbias = None
        with _without_autocast(dy):
            if need_bias:
                dbias = _bias_grad(dy).to(ctx.param_dtypes[1])
            if gate_packed is not None:
                gate = ctx.codec.decode(gate_packed, gate_scales, ctx.shape, gate_dtype)
                up = (
                    None if up_packed is None else ctx.codec.decode(up_packed, up_scales, ctx.shape, up_dtype)
                )
                act = F.silu(gate) if need_up or need_weight else None
                if need_weight:
                    assert act is not None and up is not None
                    dweight = _weight_grad(dy, (act * up).to(dy.dtype)).to(ctx.param_dtypes[0])
                if need_gate or need_up:
                    product_dtype = torch.promote_types(gate_dtype, up_dtype)
                    dh = _input_grad(dy, weight.to(dy.dtype), ctx.shape).to(product_dtype)
                    dgate, dup = _swiglu_grads(dh, gate, up, act, (need_gate, need_up))
        return dgate, None if dup is None else dup.to(up_dtype), dweight, dbias, None, None
