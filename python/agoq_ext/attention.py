"""Scaled dot-product attention that keeps q, k, v and its output quantized, the output once for all who need it.

    out = softmax(scale q k^T + mask) v      per head; lse = log sum exp of the scores, FP32

Flash attention keeps q, k, v, out and lse for backward and recomputes the probabilities from q, k and lse. Here q, k, v
and out are kept as codes, lse as it is. The output projection reads the same `out`, so `Attention` returns its codes
and `autograd.Projections` keeps those instead of its own. Backward returns what the kernel's own backward returns when
the decoded tensors stand in the place of the saved ones. k and v are kept with the heads they were given with, before
grouped heads are repeated; a boolean mask is kept as given.

Each kernel of PyTorch's scaled_dot_product_attention is called through its aten forward and backward op: on the CPU
flash, on CUDA flash, memory-efficient and cuDNN. Whatever those do not take (dropout on the CPU, odd head dimensions,
the math kernel) is not taken here either: `choose_kernel` returns None and the caller uses PyTorch's function.
The CUDA kernels' calls are checked against their shapes only; not yet measured on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .autograd import Codec, _refuse_double_backward, autocast_dtype

_aten = torch.ops.aten
# How torch.nn.attention.SDPBackend numbers them.
_FLASH, _EFFICIENT, _CUDNN = 1, 2, 3
# The efficient kernel reads the mask's rows in blocks of this many elements.
_MASK_ALIGNMENT = 16


class Call(NamedTuple):
    """What a kernel is called with besides tensors.

    Attributes:
        kernel: "cpu_flash", "flash", "efficient" or "cudnn".
        dropout, is_causal, scale: as in torch.nn.functional.scaled_dot_product_attention.
        repeat: how often each head of k and v is repeated before the kernel sees it; 1 where the kernel groups heads.
    """

    kernel: str
    dropout: float
    is_causal: bool
    scale: float | None
    repeat: int


class Codecs(NamedTuple):
    """How each tensor is kept; None as it is."""

    query: Codec | None
    key: Codec | None
    value: Codec | None
    out: Codec | None


def choose_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str | None:
    """The kernel that PyTorch would take for these arguments; None where it is none of those called here.

    Args:
        q: [batch, heads, length, head_dim]. k, v: [batch, kv_heads, kv_length, head_dim].
        mask: [batch or 1, heads or 1, length, kv_length] bool or float, or None.
    """
    if q.dim() != 4 or q.numel() == 0 or k.numel() == 0 or (mask is not None and mask.dim() != 4):
        return None
    if mask is not None and mask.requires_grad:
        return None
    on_cpu = q.device.type == "cpu"
    if not on_cpu and (q.device.type != "cuda" or q.shape[-1] % 8 or v.shape[-1] != q.shape[-1]):
        return None
    if torch.compiler.is_compiling():
        return _compiled_choice(q, mask, dropout, on_cpu, enable_gqa)
    choice = torch._fused_sdp_choice(q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)
    if on_cpu:
        return "cpu_flash" if choice == _FLASH else None
    return {_FLASH: "flash", _EFFICIENT: "efficient", _CUDNN: "cudnn"}.get(choice)


def _compiled_choice(
    q: Tensor, mask: Tensor | None, dropout: float, on_cpu: bool, enable_gqa: bool
) -> str | None:
    """What needs no answer from PyTorch's chooser, which a compiler cannot trace."""
    if on_cpu:
        return "cpu_flash" if dropout == 0.0 else None
    if mask is None and q.dtype != torch.float32 and q.shape[-1] <= 256:
        return "flash"
    return None if enable_gqa else "efficient"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    call: Call,
    codecs: Codecs,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention with what `codecs` says kept quantized.

    Args:
        q: [batch, heads, length, head_dim]. k, v: [batch, heads / call.repeat, kv_length, head_dim].

    Returns:
        out [batch, length, heads, head_dim], and the codes and scales of out as rows of heads * head_dim, or None.
    """
    out, packed, scales = Attention.apply(q, k, v, mask, call, codecs)
    return (out, None, None) if codecs.out is None else (out, packed, scales)


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the dtype that autocast computes attention in."""
    dtype = autocast_dtype(q)
    return (q, k, v) if dtype is None else (q.to(dtype), k.to(dtype), v.to(dtype))


class Attention(Function):
    """softmax(scale q k^T + mask) v: keeps q, k, v and out as `Codecs` say, and the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call, codecs: Codecs
    ) -> tuple[Tensor, Tensor, Tensor]:
        bias = _bias(mask, q.dtype)
        out, lse, *state = _FORWARD[call.kernel](q, _repeat(k, call), _repeat(v, call), bias, call)
        tensors = [s for s in state if isinstance(s, Tensor)]
        merged = out.transpose(1, 2)
        packed, scales = q.new_empty(0), q.new_empty(0)
        if codecs.out is not None:
            packed, scales = codecs.out.encode(merged.flatten(2))
        if any(ctx.needs_input_grad[:3]):
            kept: list[Tensor | None] = [mask, lse]
            for x, codec in ((q, codecs.query), (k, codecs.key), (v, codecs.value)):
                kept += (x, None) if codec is None else _encode_heads(x, codec)
            kept += (merged, None) if codecs.out is None else (packed, scales)
            ctx.save_for_backward(*kept, *tensors)
            ctx.call, ctx.codecs, ctx.dtype = call, codecs, q.dtype
            ctx.shapes = (q.shape, k.shape, v.shape, merged.shape)
            ctx.state = [None if isinstance(s, Tensor) else s for s in state]
        ctx.mark_non_differentiable(packed, scales)
        ctx.set_materialize_grads(False)
        return merged, packed, scales

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        _refuse_double_backward("attention")
        if dout is None:
            return (None,) * 6
        call, codecs, shapes = ctx.call, ctx.codecs, ctx.shapes
        mask, lse, *kept = ctx.saved_tensors
        q, k, v = (
            first if codec is None else _decode_heads(first, second, shape, codec, ctx.dtype)
            for first, second, shape, codec in zip(
                kept[0:6:2], kept[1:6:2], shapes[:3], codecs[:3], strict=True
            )
        )
        out = kept[6]
        if codecs.out is not None:
            batch, length, heads, dim = shapes[3]
            merged = codecs.out.decode(kept[6], kept[7], (batch, length, heads * dim), ctx.dtype)
            out = merged.view(batch, length, heads, dim)
        tensors = iter(kept[8:])
        state = [next(tensors) if s is None else s for s in ctx.state]
        grads = _BACKWARD[call.kernel](
            dout.transpose(1, 2),
            q,
            _repeat(k, call),
            _repeat(v, call),
            out.transpose(1, 2),
            lse,
            _bias(mask, ctx.dtype),
            state,
            call,
        )
        dq, dk, dv = grads
        return dq, _sum_repeats(dk, call), _sum_repeats(dv, call), None, None, None


# --- how heads are kept --------------------------------------------------------------------------------------


def _encode_heads(x: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """Codes of [batch, heads, length, dim] as rows [batch * length, heads * dim], in whose order it mostly lies."""
    return codec.encode(x.transpose(1, 2).flatten(2))


def _decode_heads(
    packed: Tensor, scales: Tensor, shape: torch.Size, codec: Codec, dtype: torch.dtype
) -> Tensor:
    batch, heads, length, dim = shape
    rows = codec.decode(packed, scales, (batch, length, heads * dim), dtype)
    return rows.view(batch, length, heads, dim).transpose(1, 2)


def _repeat(x: Tensor, call: Call) -> Tensor:
    """Each head `repeat` times in a row, as transformers does."""
    if call.repeat == 1:
        return x
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, call.repeat, length, dim).reshape(batch, -1, length, dim)


def _sum_repeats(dx: Tensor, call: Call) -> Tensor:
    """The gradient of `_repeat`."""
    if call.repeat == 1:
        return dx
    batch, heads, length, dim = dx.shape
    return dx.view(batch, heads // call.repeat, call.repeat, length, dim).sum(2)


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as what is added to the scores: 0 where a boolean one holds, -inf elsewhere."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))


# --- the kernels ---------------------------------------------------------------------------------------------
# Forward: (out [batch, heads, length, dim], lse, then what backward takes besides). Backward: (dq, dk, dv).


def _cpu_flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, call: Call) -> tuple[Any, ...]:
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, call.dropout, call.is_causal, attn_mask=bias, scale=call.scale
    )


def _cpu_flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    state: Any,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, call.dropout, call.is_causal, attn_mask=bias, scale=call.scale
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, call: Call) -> tuple[Any, ...]:
    out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
        q, k, v, call.dropout, call.is_causal, False, scale=call.scale
    )
    return out, lse, seed, offset


def _flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    state: Any,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = (None, None, q.shape[2], k.shape[2])
    return _aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, *lengths, call.dropout, call.is_causal, *state, scale=call.scale
    )


def _efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, call: Call) -> tuple[Any, ...]:
    return _aten._scaled_dot_product_efficient_attention(
        q, k, v, _expanded(bias, q, k), True, call.dropout, call.is_causal, scale=call.scale
    )


def _efficient_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    state: Any,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    return _aten._scaled_dot_product_efficient_attention_backward(
        dout,
        q,
        k,
        v,
        _expanded(bias, q, k),
        out,
        lse,
        *state,
        call.dropout,
        [True, True, True, False],
        call.is_causal,
        scale=call.scale,
    )[:3]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, call: Call) -> tuple[Any, ...]:
    out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, bias, True, call.dropout, call.is_causal, False, scale=call.scale
    )
    return out, lse, seed, offset


def _cudnn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    state: Any,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = (None, None, q.shape[2], k.shape[2])
    return _aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, *state, bias, *lengths, call.dropout, call.is_causal, scale=call.scale
    )


def _expanded(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask for every head, its rows aligned as the efficient kernel reads them."""
    if bias is None:
        return None
    length = bias.shape[-1]
    if length % _MASK_ALIGNMENT:
        bias = F.pad(bias, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


_FORWARD = {"cpu_flash": _cpu_flash, "flash": _flash, "efficient": _efficient, "cudnn": _cudnn}
_BACKWARD = {
    "cpu_flash": _cpu_flash_backward,
    "flash": _flash_backward,
    "efficient": _efficient_backward,
    "cudnn": _cudnn_backward,
}
