"""The modules that stand in for those of transformers' decoders in Llama's form, with the same parameters and names.

Llama, Mistral, Qwen2 and Qwen3 call the same parts by the same names. Conversion changes the class of leaf modules and
of attention, and leaves the decoder layer and the code of attention, with its rotary embedding, cache and attention
interface, as transformers wrote them:

    norm -> q, k, v     The norm computes the projections of its output itself, in one function that keeps the norm's
    norm -> gate, up    quantized input alone, and returns them as `Projected`. That object takes the way of the
                        hidden states through transformers' code; each projection that is called with it hands out
                        its own part.
    attention           is marked with its formats; `attention_interface`, registered with transformers as "agoq",
                        computes it and returns `Attended`.
    output projection   keeps its input quantized, or the codes that attention has.
    MLP                 keeps gate and up quantized; the down projection's input is recomputed.
    causal LM           with a chunked loss, computes loss and head together, block by block of the vocabulary.

Wherever somebody else has a hand in a module (an adapter in its place, a hook, a patched forward), it gets a tensor as
it always did and the modules are called one by one: right first, then small. Without gradients everything takes
transformers' own code. Imported only where transformers is loaded.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations import sdpa_attention
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from .. import attention as _attention
from ..attention import Call, Codecs
from ..nn import functional as agoq
from .policy import TensorFormat
from .swapped import (
    Attended,
    Projected,
    Projection,
    Swapped,
    is_linear,
    sees_input,
    untouched,
)

ATTENTION = "agoq"  # the name of `attention_interface` among transformers' attention implementations
PREFIXES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


class Norm(Swapped):
    """An RMSNorm that keeps its input quantized and, where it can, computes the projections of its output.

    Attributes:
        agoq_format: how the input is kept.
        agoq_reader: (module,) that reads the output, in a tuple so that it is no submodule; () for none.
        agoq_names: attributes of that module: the projections of the output.
    """

    agoq_format: TensorFormat
    agoq_reader: tuple[nn.Module, ...]
    agoq_names: tuple[str, ...]

    def forward(self, hidden_states: Tensor) -> Any:
        this: Any = self
        if not torch.is_grad_enabled():
            return super().forward(hidden_states)  # type: ignore[misc]
        eps, keywords = this.variance_epsilon, self.agoq_format.keywords()
        projections = self._projections()
        if not projections:
            return agoq.rms_norm(hidden_states, this.weight, eps, **keywords)
        weights, biases = _parameters(projections)
        outputs = agoq.rms_norm_linear(hidden_states, this.weight, eps, weights, biases, **keywords)
        return Projected(hidden_states.shape, dict(zip(self.agoq_names, outputs, strict=True)))

    def _projections(self) -> list[Any]:
        """The projections to compute here; none if anything between here and them would notice."""
        this: Any = self
        for reader in self.agoq_reader:
            projections = [getattr(reader, name) for name in self.agoq_names]
            plain = all(untouched(p, Projection) for p in projections)
            if plain and untouched(this) and not sees_input(reader):
                return projections
        return []


class MLP(Swapped):
    """down(silu(gate(x)) * up(x)) that keeps gate(x) and up(x) quantized.

    Attributes:
        agoq_format: how gate(x) and up(x) are kept.
        agoq_input_format: how x is kept where it is a tensor, once for both projections; None for plain.
    """

    agoq_format: TensorFormat
    agoq_input_format: TensorFormat | None

    def forward(self, x: Any) -> Tensor:
        this: Any = self
        if not torch.is_grad_enabled():
            return super().forward(x)  # type: ignore[misc]
        projections = [this.gate_proj, this.up_proj]
        if self.agoq_input_format and isinstance(x, Tensor) and all(map(is_linear, projections)):
            weights, biases = _parameters(projections)
            gate, up = agoq.multi_linear(x, weights, biases, **self.agoq_input_format.keywords())
        else:
            gate, up = (projection(x) for projection in projections)
        keywords = self.agoq_format.keywords()
        down = this.down_proj
        if is_linear(down):
            return agoq.swiglu_linear(gate, up, down.weight, down.bias, **keywords)
        return down(agoq.swiglu(gate, up, **keywords))


class Attention(Swapped):
    """Attention whose q, k, v and output are kept quantized; the code is transformers'.

    Attributes:
        agoq_formats: how query, key, value and the output are kept; None as they are.
        agoq_output: attribute of the output projection.
    """

    agoq_formats: tuple[TensorFormat | None, TensorFormat | None, TensorFormat | None, TensorFormat | None]
    agoq_output: str


class CausalLM(Swapped):
    """A causal language model whose loss is computed without the logits, in training and with labels."""

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        this: Any = self
        if not self._is_chunked(labels, args, kwargs):
            return super().forward(*args, labels=labels, **kwargs)  # type: ignore[misc]
        items, target = (kwargs.pop(name, None) for name in ("num_items_in_batch", "shift_labels"))
        outputs = this.model(*args, **kwargs)
        if target is None:
            assert labels is not None
            target = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        hidden, head = outputs.last_hidden_state, this.lm_head
        target = target.to(hidden.device).reshape(hidden.shape[:-1])
        loss = agoq.linear_cross_entropy(
            hidden, head.weight, target, head.bias, reduction="mean" if items is None else "sum"
        )
        if items is not None:
            loss = loss / (items.to(loss.device) if isinstance(items, Tensor) else items)
        rest = {k: v for k, v in outputs.items() if k != "last_hidden_state"}
        return CausalLMOutputWithPast(loss=loss, **rest)

    def _is_chunked(self, labels: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the loss is wanted and nothing that needs the logits, or sees the head, stands in the way."""
        this: Any = self
        logits_kept = kwargs.get("logits_to_keep", 0)
        return (
            labels is not None
            and this.training
            and torch.is_grad_enabled()
            and len(args) < 5  # labels, too, may be given by position
            and isinstance(logits_kept, int)
            and logits_kept == 0
            and kwargs.get("return_dict") in (None, True)
            and kwargs.get("ignore_index", -100) == -100
            and this.loss_function is ForCausalLMLoss
            and is_linear(this.lm_head)
        )


def _parameters(projections: list[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    return [p.weight for p in projections], [p.bias for p in projections]


# --- attention's interface -----------------------------------------------------------------------------------


def attention_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """transformers' "sdpa" attention, which keeps what `module.agoq_formats` says quantized.

    Returns:
        [batch, length, heads, head_dim], or `Attended` where the output projection takes that; and None.
    """
    got = None
    formats = getattr(module, "agoq_formats", None)
    if formats is not None and torch.is_grad_enabled() and not _unusual(kwargs):
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        got = _attend(module, formats, query, key, value, attention_mask, dropout, scaling, causal)
    if got is not None:
        return got, None
    out, _ = sdpa_attention.sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
    )
    return out, None


def _attend(
    module: Any,
    formats: tuple[TensorFormat | None, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
) -> Any:
    """What `attention_interface` returns; None where transformers' own function has to do it."""
    if not (query.requires_grad or key.requires_grad or value.requires_grad):
        return None
    length = query.shape[2]
    is_causal = causal and mask is None
    if length == 1 or (is_causal and key.shape[2] != length):
        return None
    groups = getattr(module, "num_key_value_groups", 1)
    grouped = groups > 1 and sdpa_attention.use_gqa_in_sdpa(mask, key, value)
    repeat = 1 if grouped else groups
    query, key, value = _attention.autocast_inputs(query, key, value)
    k, v = key, value
    if repeat > 1:  # the choice looks at shapes alone
        k, v = (x[:, :1].expand(-1, query.shape[1], -1, -1) for x in (key, value))
    kernel = _attention.choose_kernel(query, k, v, mask, dropout, is_causal, scaling, grouped)
    if kernel is None:
        return None
    codecs = Codecs(*(None if f is None else f.codec for f in formats))
    call = Call(kernel, dropout, is_causal, scaling, repeat)
    out, packed, scales = _attention.attend(query, key, value, mask, call, codecs)
    projection = getattr(module, module.agoq_output)
    if packed is None or scales is None or not untouched(projection):
        return out
    if not getattr(type(projection), "takes_attended", False):
        return out
    return Attended(out, packed, scales) if projection.agoq_format == formats[3] else out


def _unusual(kwargs: dict[str, Any]) -> bool:
    """Whether attention has inputs that the kernels called here do not know."""
    given = (kwargs.get(name) for name in ("position_bias", "softcap", "output_attentions", "s_aux"))
    return any(value is not None and value is not False for value in given)


AttentionInterface.register(ATTENTION, attention_interface)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


# --- classes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """The classes of one family of decoders.

    Attributes:
        layer, body: the decoder layer, and the model that ends in a norm.
        norm, mlp, attention, causal: what conversion replaces.
    """

    layer: type[nn.Module]
    body: type[nn.Module]
    norm: type[nn.Module]
    mlp: type[nn.Module]
    attention: type[nn.Module]
    causal: type[nn.Module]


def families() -> list[Family]:
    """Those whose code is loaded; a model that exists has loaded its own."""
    found = []
    for name, prefix in PREFIXES.items():
        modeling = sys.modules.get(f"transformers.models.{name}.modeling_{name}")
        if modeling is not None:
            parts = ("DecoderLayer", "Model", "RMSNorm", "MLP", "Attention", "ForCausalLM")
            found.append(Family(*(getattr(modeling, prefix + part) for part in parts)))
    return found


_MIXINS = {"RMSNorm": Norm, "MLP": MLP, "Attention": Attention, "ForCausalLM": CausalLM}


def stand_in(original: type[nn.Module]) -> Any:
    """The class that stands in for a family's norm, MLP or attention: an attribute of this module, for pickle."""
    return getattr(sys.modules[__name__], original.__name__)


def __getattr__(name: str) -> Any:
    """Makes the stand-in called `name`, e.g. "MistralRMSNorm", the first time that it is asked for."""
    for family, prefix in PREFIXES.items():
        for suffix, mixin in _MIXINS.items():
            if name == prefix + suffix:
                modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
                original = getattr(modeling, name)
                body = {"original": original, "__module__": __name__, "__doc__": mixin.__doc__}
                globals()[name] = type(name, (mixin, original), body)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
