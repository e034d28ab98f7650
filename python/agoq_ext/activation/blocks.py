"""BlockMap: how the modules of a block read each other, for models that are not in Llama's form, and their stand-ins.

A block is a module class whose forward calls its norms, linear layers and activation modules in the usual way. The map
says which linear layers alone read a norm's output, and which linear layer alone reads an activation's. From that the
same parts follow as for Llama: a norm computes the projections of its output itself and hands out `Projected`, an
activation hands out its input as `Activated`, and each linear layer takes what it is given. The rest of the block's
code has to pass these on untouched; of a norm's output it may ask the shape.

GPT-2 of transformers has its map here. Who has a hand in one of these modules gets tensors as before.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import autograd
from ..nn import functional as agoq
from .policy import KINDS, TensorFormat
from .swapped import Activated, Attended, Projected, Swapped, patched, sees_arguments, untouched


@dataclass(frozen=True)
class BlockMap:
    """How a block's modules read each other; names are relative to the block, such as "mlp.up".

    Attributes:
        norms: by LayerNorm or nn.RMSNorm, the linear layers that read its output and nobody else does; () where others
            do, the residual stream say.
        activations: by activation module (GELU or SiLU), the linear layer that alone reads its output.
        linears: by linear layer, the kind of `ActivationPolicy` that its input is, for those that read neither.
        attention: (module, output projection inside it) of an attention that calls transformers' interface.
    """

    norms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    activations: Mapping[str, str] = field(default_factory=dict)
    linears: Mapping[str, str] = field(default_factory=dict)
    attention: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        for kind in self.linears.values():
            if kind not in KINDS:
                raise ValueError(f"BlockMap: linears must name kinds of {', '.join(KINDS)}; got {kind!r}")


GPT2 = {
    "GPT2Block": BlockMap(
        norms={"ln_1": ("attn.c_attn",), "ln_2": ("mlp.c_fc",)},
        activations={"mlp.act": "mlp.c_proj"},
        linears={"attn.c_proj": "attention_output"},
        attention=("attn", "c_proj"),
    ),
    "GPT2Model": BlockMap(norms={"ln_f": ()}),
}


def known_blocks() -> dict[type[nn.Module], BlockMap]:
    """The maps of models whose code is loaded."""
    modeling = sys.modules.get("transformers.models.gpt2.modeling_gpt2")
    return {} if modeling is None else {getattr(modeling, name): m for name, m in GPT2.items()}


# --- stand-ins -----------------------------------------------------------------------------------------------


class Reader(Swapped):
    """A linear layer that takes a tensor, or what a norm, an activation or attention hands to it.

    Attributes:
        agoq_name: its key in `Projected.outputs`.
        agoq_format: how its input is kept; None as it is.
    """

    agoq_name: str
    agoq_format: TensorFormat | None
    takes_attended = True

    def forward(self, input: Any) -> Tensor:
        this: Any = self
        if isinstance(input, Projected):
            return input.outputs[self.agoq_name]
        if isinstance(input, Activated):
            keywords = input.format.keywords()
            return agoq.activation_linear(input.x, matrix(this), this.bias, input.function, **keywords)
        if self.agoq_format is None or not torch.is_grad_enabled():
            return super().forward(input)  # type: ignore[misc]
        if not isinstance(input, Attended):
            return agoq.linear(input, matrix(this), this.bias, **self.agoq_format.keywords())
        x, dtype = input.out, autograd.autocast_dtype(input.out)
        codec = self.agoq_format.codec
        return autograd.Projections.apply(
            x, None, input.packed, input.scales, 0.0, codec, dtype, 1, matrix(this), this.bias
        )[0]


class Linear(Reader, nn.Linear):
    """`Reader` of nn.Linear."""

    original = nn.Linear


class Norm(Swapped):
    """A norm that keeps its input quantized and, where it can, computes the projections of its output.

    Attributes:
        agoq_format: how the input is kept.
        agoq_readers: (parent, name) of each projection; () for none.
        agoq_path: the modules between the block and the projections.
        agoq_names: their keys in `Projected.outputs`.
    """

    agoq_format: TensorFormat
    agoq_readers: tuple[tuple[nn.Module, str], ...]
    agoq_path: tuple[nn.Module, ...]
    agoq_names: tuple[str, ...]

    def forward(self, input: Tensor) -> Any:
        this: Any = self
        if not torch.is_grad_enabled() or not self._is_exact(input):
            return super().forward(input)  # type: ignore[misc]
        readers: list[Any] = [getattr(parent, name) for parent, name in self.agoq_readers]
        if not readers or not _is_open(this, self.agoq_path, readers):
            return self._norm(input)
        outputs = self._projections(input, [matrix(r) for r in readers], [r.bias for r in readers])
        return Projected(input.shape, dict(zip(self.agoq_names, outputs, strict=True)))

    def _is_exact(self, input: Tensor) -> bool:
        """Whether this package's function gives the bits of the module's own."""
        return True

    def _norm(self, input: Tensor) -> Tensor:
        raise NotImplementedError

    def _projections(
        self, input: Tensor, weights: list[Tensor], biases: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        raise NotImplementedError


class LayerNorm(Norm, nn.LayerNorm):
    """`Norm` of nn.LayerNorm."""

    original = nn.LayerNorm

    def _norm(self, input: Tensor) -> Tensor:
        return agoq.layer_norm(input, self.weight, self.bias, self.eps, **self.agoq_format.keywords())

    def _projections(
        self, input: Tensor, weights: list[Tensor], biases: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        keywords = self.agoq_format.keywords()
        return agoq.layer_norm_linear(input, self.weight, self.bias, self.eps, weights, biases, **keywords)


class RMSNorm(Norm, nn.RMSNorm):
    """`Norm` of nn.RMSNorm, for FP32 inputs: PyTorch rounds narrower ones elsewhere than Llama's norm does."""

    original = nn.RMSNorm

    def _is_exact(self, input: Tensor) -> bool:
        return input.dtype == torch.float32 and self.weight is not None and self.weight.dtype == torch.float32

    def _epsilon(self, input: Tensor) -> float:
        return torch.finfo(input.dtype).eps if self.eps is None else self.eps

    def _norm(self, input: Tensor) -> Tensor:
        return agoq.rms_norm(input, self.weight, self._epsilon(input), **self.agoq_format.keywords())

    def _projections(
        self, input: Tensor, weights: list[Tensor], biases: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        keywords = self.agoq_format.keywords()
        return agoq.rms_norm_linear(input, self.weight, self._epsilon(input), weights, biases, **keywords)


class Activation(Swapped):
    """An activation module that hands its input to the linear layer behind it.

    Attributes:
        agoq_format: how the input is kept. agoq_function: its name in `autograd_layers.ACTIVATIONS`.
        agoq_readers: ((parent, name),) of the linear layer. agoq_path: the modules between it and the block.
    """

    agoq_format: TensorFormat
    agoq_function: str
    agoq_readers: tuple[tuple[nn.Module, str], ...]
    agoq_path: tuple[nn.Module, ...]

    def forward(self, input: Tensor) -> Any:
        this: Any = self
        readers: list[Any] = [getattr(parent, name) for parent, name in self.agoq_readers]
        if not torch.is_grad_enabled() or not _is_open(this, self.agoq_path, readers):
            return super().forward(input)  # type: ignore[misc]
        return Activated(input, self.agoq_function, self.agoq_format)


def _is_open(module: nn.Module, path: tuple[nn.Module, ...], readers: list[nn.Module]) -> bool:
    """Whether nobody would notice that no tensor goes from `module` to `readers`.

    A parent that both lie in sees no more than it did; one that holds the readers alone is called with it.
    """
    return (
        untouched(module)
        and all(isinstance(r, Reader) and untouched(r) for r in readers)
        and not any(patched(p) or sees_arguments(p) for p in path)
    )


def matrix(module: Any) -> Tensor:
    """The weight [out, in] of a linear layer; GPT-2's Conv1D has it transposed."""
    return module.weight if isinstance(module, nn.Linear) else module.weight.t()


def function_of(module: nn.Module) -> str | None:
    """The name in `autograd_layers.ACTIVATIONS` of what an activation module computes; None for another."""
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    if type(module) is nn.SiLU:
        return "silu"
    known = sys.modules.get("transformers.activations")
    if known is None:
        return None
    if type(module) is known.NewGELUActivation:
        return "gelu_new"
    if type(module) is known.GELUActivation and module.act is nn.functional.gelu:
        return "gelu"
    return "silu" if type(module) is getattr(known, "SiLUActivation", None) else None


def stand_in(original: type[nn.Module]) -> Any:
    """The class that stands in for a linear layer, norm, activation or GPT-2's attention; None for another."""
    place = f"{original.__module__}.{original.__qualname__}"
    if original is nn.Linear:
        return Linear
    if original is nn.LayerNorm:
        return LayerNorm
    if original is nn.RMSNorm:
        return RMSNorm
    return next((getattr(sys.modules[__name__], n) for n, p in _ORIGINALS.items() if p == place), None)


_ORIGINALS = {
    "GELU": "torch.nn.modules.activation.GELU",
    "SiLU": "torch.nn.modules.activation.SiLU",
    "NewGELUActivation": "transformers.activations.NewGELUActivation",
    "GELUActivation": "transformers.activations.GELUActivation",
    "SiLUActivation": "transformers.activations.SiLUActivation",
    "Conv1D": "transformers.pytorch_utils.Conv1D",
    "GPT2Attention": "transformers.models.gpt2.modeling_gpt2.GPT2Attention",
}


def __getattr__(name: str) -> Any:
    """Makes the stand-in called `name` the first time that it is asked for, as an attribute that pickle finds."""
    if name not in _ORIGINALS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _ORIGINALS[name].rpartition(".")
    original = getattr(importlib.import_module(module), attribute)
    mixin: type = Activation
    if name == "Conv1D":
        mixin = Reader
    elif name == "GPT2Attention":
        from .decoder import Attention

        mixin = Attention
    body = {"original": original, "__module__": __name__, "__doc__": mixin.__doc__}
    globals()[name] = type(name, (mixin, original), body)
    return globals()[name]
