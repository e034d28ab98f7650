"""nn.TransformerEncoderLayer, pre- and post-norm, with what its parts read kept quantized.

The layer is written as one forward over its own parameters, with this package's functions in the places of PyTorch's:

    norm first    norm1 -> in_proj and norm2 -> linear1 keep the norms' inputs; the sums are the residual stream
    norm last     in_proj and linear1 keep their inputs, norm1 and norm2 theirs
    attention     q, k, v and its output, the output shared with out_proj
    MLP           the input of the activation (GELU, SiLU or ReLU) where no dropout lies behind it, else linear2's input

Where a part has hooks or another class, where attention has an option that this forward does not know, and without
gradients, PyTorch's own forward runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import attention as _attention
from .. import autograd
from ..attention import Call, Codecs
from ..nn import functional as agoq
from .conversion import ConversionReport, full_name, join, swap
from .policy import TensorFormat
from .swapped import Swapped, untouched

_PARTS = ("self_attn", "linear1", "linear2", "norm1", "norm2", "dropout", "dropout1", "dropout2")
_KINDS = ("norm_input", "query", "key", "value", "attention_output", "mlp_input", "gelu_input")
_ACTIVATIONS: dict[Any, str] = {F.gelu: "gelu", F.silu: "silu", F.relu: "relu"}


class EncoderLayer(Swapped, nn.TransformerEncoderLayer):
    """An encoder layer that keeps quantized activations.

    Attributes:
        agoq_formats: how each kind of tensor is kept, in the order of `_KINDS`; None as it is.
        agoq_function: the name of the activation in `autograd_layers.ACTIVATIONS`; None for another.
    """

    original = nn.TransformerEncoderLayer
    agoq_formats: tuple[TensorFormat | None, ...]
    agoq_function: str | None

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        plain = not torch.is_grad_enabled() or src.dim() != 3 or src.is_nested or not self._is_known()
        if plain or (is_causal and src_mask is None):
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        mask, is_causal = self._mask(src, src_mask, src_key_padding_mask, is_causal)
        norm, *_, mlp, _ = self.agoq_formats
        attn, one, two = self.self_attn, self.norm1, self.norm2
        x = src
        if self.norm_first:
            qkv = _norm_linear(x, one, attn.in_proj_weight, attn.in_proj_bias, norm)
            x = x + self.dropout1(self._attend(qkv, mask, is_causal))
            hidden = _norm_linear(x, two, self.linear1.weight, self.linear1.bias, norm)
            return x + self.dropout2(self._activate(hidden))
        qkv = _linear(x, attn.in_proj_weight, attn.in_proj_bias, mlp)
        x = _norm(x + self.dropout1(self._attend(qkv, mask, is_causal)), one, norm)
        hidden = _linear(x, self.linear1.weight, self.linear1.bias, mlp)
        return _norm(x + self.dropout2(self._activate(hidden)), two, norm)

    def _is_known(self) -> bool:
        attn = self.self_attn
        return (
            all(untouched(getattr(self, name)) for name in _PARTS)
            and untouched(attn.out_proj)
            and type(attn) is nn.MultiheadAttention
            and type(self.norm1) is type(self.norm2) is nn.LayerNorm
            and type(self.linear1) is type(self.linear2) is nn.Linear
            and attn._qkv_same_embed_dim
            and attn.bias_k is None
            and not attn.add_zero_attn
        )

    def _mask(
        self, src: Tensor, mask: Tensor | None, padding: Tensor | None, is_causal: bool
    ) -> tuple[Tensor | None, bool]:
        """The two masks as one that is added to [batch, heads, length, length], as nn.MultiheadAttention joins them."""
        if is_causal and padding is None:
            return None, True  # the mask says the same
        batch = src.shape[0 if self.self_attn.batch_first else 1]
        heads = self.self_attn.num_heads
        joined = None
        for each, name in ((mask, "src_mask"), (padding, "src_key_padding_mask")):
            if each is None:
                continue
            if each.dtype == torch.bool:
                each = torch.zeros_like(each, dtype=src.dtype).masked_fill_(each, -torch.inf)
            if name == "src_key_padding_mask":
                each = each[:, None, None, :]
            elif each.dim() == 3:
                each = each.view(batch, heads, *each.shape[1:])
            else:
                each = each[None, None]
            joined = each if joined is None else joined + each
        return joined, False

    def _attend(self, qkv: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Self-attention and its output projection, in the layout of `qkv` [.., .., 3 x width]."""
        attn = self.self_attn
        heads = qkv.unflatten(-1, (3, attn.num_heads, attn.head_dim))
        if not attn.batch_first:
            heads = heads.transpose(0, 1)
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        dropout = attn.dropout if self.training else 0.0
        _, *formats, out_format, _, _ = self.agoq_formats
        kernel = None
        if any(formats) or out_format is not None:
            kernel = _attention.choose_kernel(q, k, v, mask, dropout, is_causal, None, False)
        packed = scales = None
        if kernel is None:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal).transpose(1, 2)
        else:
            codecs = Codecs(*(None if f is None else f.codec for f in (*formats, out_format)))
            call = Call(kernel, dropout, is_causal, None, 1)
            out, packed, scales = _attention.attend(q, k, v, mask, call, codecs)
        merged = out.flatten(2)
        weight, bias = attn.out_proj.weight, attn.out_proj.bias
        if packed is None or scales is None or out_format is None:
            result = _linear(merged, weight, bias, out_format)
        else:
            dtype = autograd.autocast_dtype(merged)
            result = autograd.Projections.apply(
                merged, None, packed, scales, 0.0, out_format.codec, dtype, 1, weight, bias
            )[0]
        return result if attn.batch_first else result.transpose(0, 1)

    def _activate(self, hidden: Tensor) -> Tensor:
        """linear2 of the activation of `hidden`."""
        weight, bias = self.linear2.weight, self.linear2.bias
        *_, mlp, stored = self.agoq_formats
        if stored is None or self.agoq_function is None or (self.training and self.dropout.p > 0):
            return _linear(self.dropout(self.activation(hidden)), weight, bias, mlp)
        return agoq.activation_linear(hidden, weight, bias, self.agoq_function, **stored.keywords())


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, format: TensorFormat | None) -> Tensor:
    return F.linear(x, weight, bias) if format is None else agoq.linear(x, weight, bias, **format.keywords())


def _norm(x: Tensor, norm: nn.LayerNorm, format: TensorFormat | None) -> Tensor:
    return (
        norm(x)
        if format is None
        else agoq.layer_norm(x, norm.weight, norm.bias, norm.eps, **format.keywords())
    )


def _norm_linear(
    x: Tensor, norm: nn.LayerNorm, weight: Tensor, bias: Tensor | None, format: TensorFormat | None
) -> Tensor:
    if format is None:
        return F.linear(norm(x), weight, bias)
    return agoq.layer_norm_linear(x, norm.weight, norm.bias, norm.eps, [weight], [bias], **format.keywords())[
        0
    ]


def convert_encoder_layer(report: ConversionReport, name: str, layer: nn.TransformerEncoderLayer) -> None:
    """Changes the class of an encoder layer, where the policy stores anything of it."""
    if type(layer) is not nn.TransformerEncoderLayer:
        report.skipped[name] = f"must be a torch.nn.TransformerEncoderLayer; it is a {full_name(type(layer))}"
        return
    where = {
        "norm_input": (join(name, "norm1"), layer.norm1),
        "mlp_input": (join(name, "linear1"), layer.linear1),
        "gelu_input": (join(name, "linear2"), layer.linear2),
        "attention_output": (join(name, "self_attn.out_proj"), layer.self_attn.out_proj),
    }
    attention = (join(name, "self_attn"), layer.self_attn)
    formats = tuple(report.stored(kind, *where.get(kind, attention)) for kind in _KINDS)
    if not any(formats):
        return
    function = _ACTIVATIONS.get(layer.activation)
    if isinstance(layer.activation, nn.Module):
        from .blocks import function_of

        function = "relu" if type(layer.activation) is nn.ReLU else function_of(layer.activation)
    if function is None:
        report.skipped[join(name, "activation")] = (
            f"the activation must be GELU, SiLU or ReLU; it is {layer.activation}"
        )
    swap(layer, EncoderLayer, agoq_formats=formats, agoq_function=function)
    report.converted[name] = ", ".join(kind for kind, f in zip(_KINDS, formats, strict=True) if f)
