"""compress_activations and restore: a model of transformers converted in place, and back."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from .blocks import BlockMap, known_blocks
from .conversion import ConversionReport, full_name, is_exactly, join, swap
from .convert_blocks import convert_attention, convert_block
from .encoder import convert_encoder_layer
from .policy import ActivationPolicy, resolve_policy

_SUPPORTED = (
    "Llama, Mistral, Qwen2, Qwen3 or GPT-2 model of transformers or a torch.nn.TransformerEncoderLayer"
)


def compress_activations(
    model: nn.Module,
    policy: str | ActivationPolicy = "agoq",
    *,
    blocks: Mapping[type[nn.Module], BlockMap] | None = None,
    chunked_loss: bool = False,
) -> ConversionReport:
    """Makes a model keep quantized activations for backward (AGoQ, arXiv 2605.00539), in place.

    Forward values, parameters, their names and `state_dict` stay as they are; `generate` and code under
    `torch.no_grad()` run as before. docs/activations.md says what is kept.

    Args:
        model: a Llama, Mistral, Qwen2, Qwen3 or GPT-2 model of transformers, nn.TransformerEncoderLayer, or a module
            that contains one.
        policy: "agoq", "paper", "lean", "off" or an ActivationPolicy.
        blocks: for other models, how the modules of each block class read each other.
        chunked_loss: in training a causal LM that is called with labels computes its loss in blocks of the vocabulary
            and returns logits=None, for the logits never exist (`nn.functional.linear_cross_entropy`). The loss
            differs in the order of its sums.

    Raises:
        TypeError: `model` holds no blocks of those.
        ValueError: the policy is unknown, or the model is converted already.
    """
    policy = resolve_policy("compress_activations", policy)
    families = _families()
    maps = {**known_blocks(), **(blocks or {})}
    known = (*(f.layer for f in families), *maps, nn.TransformerEncoderLayer)
    if not any(_named(model, cls) for cls in known):
        raise TypeError(
            f"compress_activations: model must be a {_SUPPORTED}, or contain one, or `blocks` must map its "
            f"blocks; got {type(model).__name__}"
        )
    if _swapped(model):
        raise ValueError(
            "compress_activations: model must not be converted already; call restore(model) first"
        )
    report = ConversionReport(policy)
    for family in families:
        for name, layer in _named(model, family.layer).items():
            attention, mlp = layer.self_attn, layer.mlp
            first, second = join(name, "input_layernorm"), join(name, "post_attention_layernorm")
            _convert_norm(report, family, first, layer.input_layernorm, attention, _QKV)
            _convert_attention(report, family, join(name, "self_attn"), attention)
            _convert_output(report, join(name, "self_attn.o_proj"), attention.o_proj)
            _convert_norm(report, family, second, layer.post_attention_layernorm, mlp, _GATE_UP)
            _convert_mlp(report, family, join(name, "mlp"), mlp)
        for name, body in _named(model, family.body).items():
            _convert_norm(report, family, join(name, "norm"), body.norm)
        for name, causal in _named(model, family.causal).items() if chunked_loss else ():
            if is_exactly(report, name, causal, family.causal):
                swap(causal, _decoder().stand_in(family.causal))
                report.converted[name] = "chunked_loss"
    for cls, block_map in maps.items():
        for name, block in _named(model, cls).items():
            convert_block(report, name, block, block_map)
    for name, encoder_layer in _named(model, nn.TransformerEncoderLayer).items():
        if not isinstance(encoder_layer, tuple(maps)):
            convert_encoder_layer(report, name, encoder_layer)
    return report


def restore(model: nn.Module) -> None:
    """Undoes `compress_activations`; a model that is not converted stays as it is.

    Raises:
        ValueError: a converted module was wrapped in another class since.
    """
    swapped = _swapped(model)
    for name, module in swapped.items():
        if "original" not in vars(type(module)):
            raise ValueError(
                f"restore: {name} must not be wrapped after the conversion; got {type(module).__name__}"
            )
    for module in swapped.values():
        before = vars(module).get("agoq_implementation")
        if before is not None and module.config._attn_implementation == _decoder().ATTENTION:
            module.config._attn_implementation = before
        module.__class__ = module.original
        for attribute in [a for a in vars(module) if a.startswith("agoq_")]:
            delattr(module, attribute)


# --- one kind each -------------------------------------------------------------------------------------------

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")


def _convert_norm(
    report: ConversionReport,
    family: Any,
    name: str,
    norm: nn.Module,
    reader: nn.Module | None = None,
    names: tuple[str, ...] = (),
) -> None:
    """Stores the norm's input quantized; with a reader, also lets the norm compute the reader's projections."""
    from .swapped import Projection

    stored = report.stored("norm_input", name, norm)
    if stored is None or not is_exactly(report, name, norm, family.norm):
        return
    others = {n: type(getattr(reader, n)) for n in names if type(getattr(reader, n)) is not nn.Linear}
    if others:
        found = ", ".join(f"{n} is a {full_name(cls)}" for n, cls in others.items())
        report.skipped[name] = f"its output is kept as well, because {found}"
        reader, names = None, ()
    for n in names:
        swap(getattr(reader, n), Projection, agoq_name=n)
    swap(
        norm,
        _decoder().stand_in(family.norm),
        agoq_format=stored,
        agoq_reader=() if reader is None else (reader,),
        agoq_names=names,
    )
    report.converted[name] = "norm_input"


def _convert_attention(report: ConversionReport, family: Any, name: str, attention: Any) -> None:
    """Stores q, k and v quantized, and the output where its projection stores it too."""
    if not is_exactly(report, name, attention, family.attention):
        return
    stand_in = _decoder().stand_in(family.attention)
    if not convert_attention(report, name, attention, stand_in, "o_proj"):
        return
    # Qwen3 norms the heads of q and k.
    for part in ("q_norm", "k_norm"):
        if isinstance(getattr(attention, part, None), family.norm):
            _convert_norm(report, family, f"{name}.{part}", getattr(attention, part))


def _convert_output(report: ConversionReport, name: str, projection: nn.Module) -> None:
    from .swapped import OutputLinear

    stored = report.stored("attention_output", name, projection)
    if stored is not None and is_exactly(report, name, projection, nn.Linear):
        swap(projection, OutputLinear, agoq_format=stored)
        report.converted[name] = "attention_output"


def _convert_mlp(report: ConversionReport, family: Any, name: str, mlp: nn.Module) -> None:
    from transformers.activations import ACT2CLS

    stored = report.stored("gate_up", name, mlp)
    if stored is None or not is_exactly(report, name, mlp, family.mlp):
        return
    act_fn: Any = mlp.act_fn
    if not isinstance(act_fn, (nn.SiLU, _class(ACT2CLS["silu"]))):
        report.skipped[name] = f"the activation must be SiLU; it is {type(act_fn).__name__}"
        return
    input_format = report.stored("mlp_input", name, mlp)
    swap(mlp, _decoder().stand_in(family.mlp), agoq_format=stored, agoq_input_format=input_format)
    report.converted[name] = "gate_up"


# --- helpers -------------------------------------------------------------------------------------------------


def _decoder() -> Any:
    """The module `decoder`, which needs transformers."""
    from . import decoder

    return decoder


def _families() -> list[Any]:
    """The families whose code is loaded; none, without importing transformers, where it is not loaded."""
    loaded = any(name.startswith("transformers.models.") for name in sys.modules)
    return _decoder().families() if loaded else []


def _class(entry: Any) -> type:
    """The class of an entry of transformers' ACT2CLS, which holds classes or (class, arguments)."""
    return entry[0] if isinstance(entry, tuple) else entry


def _named(model: nn.Module, cls: type) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, cls)}


def _swapped(model: nn.Module) -> dict[str, Any]:
    """The converted modules by name."""
    swapped = sys.modules.get(f"{__package__}.swapped")
    return {} if swapped is None else _named(model, swapped.Swapped)
