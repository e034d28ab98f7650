"""compress_activations and restore: a Llama model of transformers converted in place, and back."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .policy import ActivationPolicy, resolve_policy

_MODELING = "transformers.models.llama.modeling_llama"


@dataclass
class ConversionReport:
    """What `compress_activations` changed.

    Attributes:
        policy: the policy that was applied.
        converted: kind of saved tensor ("norm_input", ...) by name of the module that now stores it quantized.
        skipped: reason by name of a module that keeps what it kept before, although the policy names its kind.
    """

    policy: ActivationPolicy
    converted: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = Counter(self.converted.values())
        kinds = ", ".join(f"{n} x {kind}" for kind, n in counts.items())
        lines = [f"stored quantized: {kinds or 'nothing'}"]
        lines += [f"as before: {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def compress_activations(model: nn.Module, policy: str | ActivationPolicy = "paper") -> ConversionReport:
    """Makes a Llama model keep quantized activations for backward (AGoQ, arXiv 2605.00539), in place.

    Forward values, parameters, their names and `state_dict` stay as they are; `generate` and code under
    `torch.no_grad()` run as before. Attention stays in the model's precision. docs/activations.md says what is kept.

    Args:
        model: LlamaForCausalLM, LlamaModel, or a module that contains one.
        policy: "paper", "agoq", "off" or an ActivationPolicy.

    Raises:
        TypeError: `model` holds no Llama decoder layers of transformers.
        ValueError: the policy is unknown, or the model is converted already.
    """
    policy = resolve_policy("compress_activations", policy)
    modeling = sys.modules.get(_MODELING)  # a model that exists has imported it
    layers = {} if modeling is None else _named(model, modeling.LlamaDecoderLayer)
    if modeling is None or not layers:
        raise TypeError(
            "compress_activations: model must be a LlamaForCausalLM or LlamaModel of transformers, or contain one; "
            f"got {type(model).__name__}"
        )
    if _swapped(model):
        raise ValueError(
            "compress_activations: model must not be converted already; call restore(model) first"
        )
    report = ConversionReport(policy)
    for name, layer in layers.items():
        attention, mlp = layer.self_attn, layer.mlp
        _convert_norm(report, _join(name, "input_layernorm"), layer.input_layernorm, attention, _QKV)
        _convert_output(report, _join(name, "self_attn.o_proj"), attention.o_proj)
        second = _join(name, "post_attention_layernorm")
        _convert_norm(report, second, layer.post_attention_layernorm, mlp, _GATE_UP)
        _convert_mlp(report, _join(name, "mlp"), mlp)
    for name, body in _named(model, modeling.LlamaModel).items():
        _convert_norm(report, _join(name, "norm"), body.norm)
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
        module.__class__ = module.original
        for attribute in [a for a in vars(module) if a.startswith("agoq_")]:
            delattr(module, attribute)


# --- one kind each -------------------------------------------------------------------------------------------

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")


def _convert_norm(
    report: ConversionReport,
    name: str,
    norm: nn.Module,
    reader: nn.Module | None = None,
    names: tuple[str, ...] = (),
) -> None:
    """Stores the norm's input quantized; with a reader, also lets the norm compute the reader's projections."""
    from . import llama

    stored = report.policy.norm_input
    if stored is None or not _is(report, name, norm, llama.LlamaRMSNorm.original):
        return
    others = {n: type(getattr(reader, n)) for n in names if type(getattr(reader, n)) is not nn.Linear}
    if others:
        found = ", ".join(f"{n} is a {_full_name(cls)}" for n, cls in others.items())
        report.skipped[name] = f"its output is kept as well, because {found}"
        reader, names = None, ()
    for n in names:
        _swap(getattr(reader, n), llama.Projection, agoq_name=n)
    _swap(
        norm,
        llama.LlamaRMSNorm,
        agoq_format=stored,
        agoq_reader=() if reader is None else (reader,),
        agoq_names=names,
    )
    report.converted[name] = "norm_input"


def _convert_output(report: ConversionReport, name: str, projection: nn.Module) -> None:
    from . import llama

    stored = report.policy.attention_output
    if stored is not None and _is(report, name, projection, nn.Linear):
        _swap(projection, llama.OutputLinear, agoq_format=stored)
        report.converted[name] = "attention_output"


def _convert_mlp(report: ConversionReport, name: str, mlp: nn.Module) -> None:
    from transformers.activations import ACT2CLS

    from . import llama

    stored = report.policy.gate_up
    if stored is None or not _is(report, name, mlp, llama.LlamaMLP.original):
        return
    act_fn: Any = mlp.act_fn
    if not isinstance(act_fn, (nn.SiLU, _class(ACT2CLS["silu"]))):
        report.skipped[name] = f"the activation must be SiLU; it is {type(act_fn).__name__}"
        return
    _swap(mlp, llama.LlamaMLP, agoq_format=stored, agoq_input_format=report.policy.mlp_input)
    report.converted[name] = "gate_up"


# --- helpers -------------------------------------------------------------------------------------------------


def _class(entry: Any) -> type:
    """The class of an entry of transformers' ACT2CLS, which holds classes or (class, arguments)."""
    return entry[0] if isinstance(entry, tuple) else entry


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _named(model: nn.Module, cls: type) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, cls)}


def _swapped(model: nn.Module) -> dict[str, Any]:
    """The converted modules by name; empty, without importing transformers, if nothing was ever converted."""
    llama = sys.modules.get(f"{__package__}.llama")
    return {} if llama is None else _named(model, llama.Swapped)


def _is(report: ConversionReport, name: str, module: nn.Module, cls: type) -> bool:
    """Whether `module` is exactly a `cls`; otherwise the report says that it is not."""
    if type(module) is not cls:
        report.skipped[name] = f"must be a {_full_name(cls)}; it is a {_full_name(type(module))}"
        return False
    return True


def _swap(module: nn.Module, cls: type[nn.Module], **state: Any) -> None:
    """Changes the class of `module`. Its state is set around nn.Module, which would register modules."""
    module.__class__ = cls
    vars(module).update(state)
