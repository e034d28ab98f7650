"""The modules that stand in for those of transformers' Llama, with the same parameters under the same names.

Conversion changes the class of four kinds of leaf modules and leaves the decoder layer and the attention module, with
its rotary embedding, cache and attention interface, as transformers wrote them:

    norm -> q, k, v     The norm computes the projections of its output itself, in one function that keeps the norm's
    norm -> gate, up    quantized input alone, and returns them as `Projected`. That object takes the way of the
                        hidden states through transformers' code; each projection that is called with it hands out
                        its own part.
    output projection   keeps its input quantized.
    MLP                 keeps gate and up quantized; the down projection's input is recomputed.

Wherever somebody else has a hand in a module (an adapter in its place, a hook, a patched forward), the norm returns a
tensor as it always did and the modules are called one by one: right first, then small.
Without gradients everything takes transformers' own code. The norm and the MLP keep the names of their classes, by
which other tools find them. Imported only where transformers is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from ..nn import functional as agoq
from .policy import TensorFormat


@dataclass(frozen=True)
class Projected:
    """What a norm hands to the module that reads it: the projections of its output, by the projection's name.

    `shape` is that of the norm's output, which attention reads to shape its heads.
    """

    shape: torch.Size
    outputs: dict[str, Tensor]


class Swapped:
    """Mixin of a module whose class was changed; its state lies in attributes that `restore` deletes."""

    original: ClassVar[type[nn.Module]]


class Projection(Swapped, nn.Linear):
    """A linear layer that may be called with what its norm computed ahead.

    Attributes:
        agoq_name: its key in `Projected.outputs`.
    """

    original = nn.Linear
    agoq_name: str

    def forward(self, input: Any) -> Tensor:
        if isinstance(input, Projected):
            return input.outputs[self.agoq_name]
        return super().forward(input)


class OutputLinear(Swapped, nn.Linear):
    """A linear layer that keeps its input quantized.

    Attributes:
        agoq_format: how.
    """

    original = nn.Linear
    agoq_format: TensorFormat

    def forward(self, input: Tensor) -> Tensor:
        return agoq.linear(input, self.weight, self.bias, **self.agoq_format.keywords())


class LlamaRMSNorm(Swapped, modeling_llama.LlamaRMSNorm):
    """An RMSNorm that keeps its input quantized and, where it can, computes the projections of its output.

    Attributes:
        agoq_format: how the input is kept.
        agoq_reader: (module,) that reads the output, in a tuple so that it is no submodule; () for none.
        agoq_names: attributes of that module: the projections of the output.
    """

    original = modeling_llama.LlamaRMSNorm
    agoq_format: TensorFormat
    agoq_reader: tuple[nn.Module, ...]
    agoq_names: tuple[str, ...]

    def forward(self, hidden_states: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(hidden_states)
        eps, keywords = self.variance_epsilon, self.agoq_format.keywords()
        projections = self._projections()
        if not projections:
            return agoq.rms_norm(hidden_states, self.weight, eps, **keywords)
        weights, biases = _parameters(projections)
        outputs = agoq.rms_norm_linear(hidden_states, self.weight, eps, weights, biases, **keywords)
        return Projected(hidden_states.shape, dict(zip(self.agoq_names, outputs, strict=True)))

    def _projections(self) -> list[nn.Linear]:
        """The projections to compute here; none if anything between here and them would notice."""
        for reader in self.agoq_reader:
            projections = [getattr(reader, name) for name in self.agoq_names]
            plain = all(untouched(p, Projection) for p in projections)
            if plain and untouched(self) and not sees_input(reader):
                return projections
        return []


class LlamaMLP(Swapped, modeling_llama.LlamaMLP):
    """down(silu(gate(x)) * up(x)) that keeps gate(x) and up(x) quantized.

    Attributes:
        agoq_format: how gate(x) and up(x) are kept.
        agoq_input_format: how x is kept where it is a tensor, once for both projections; None for plain.
    """

    original = modeling_llama.LlamaMLP
    agoq_format: TensorFormat
    agoq_input_format: TensorFormat | None

    def forward(self, x: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        projections = [self.gate_proj, self.up_proj]
        if self.agoq_input_format and isinstance(x, Tensor) and all(map(is_linear, projections)):
            weights, biases = _parameters(projections)
            gate, up = agoq.multi_linear(x, weights, biases, **self.agoq_input_format.keywords())
        else:
            gate, up = (projection(x) for projection in projections)
        keywords = self.agoq_format.keywords()
        if is_linear(self.down_proj):
            return agoq.swiglu_linear(gate, up, self.down_proj.weight, self.down_proj.bias, **keywords)
        return self.down_proj(agoq.swiglu(gate, up, **keywords))


def _parameters(projections: list[nn.Linear]) -> tuple[list[Tensor], list[Tensor | None]]:
    return [p.weight for p in projections], [p.bias for p in projections]


# --- who may be computed elsewhere ---------------------------------------------------------------------------


def untouched(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether `module` is of exactly one of `classes` (of any, if none are given) and calling it runs nothing else."""
    if classes and type(module) not in classes:
        return False
    if "_is_replica" in module.__dict__:  # a copy by nn.DataParallel, whose reader is on another device
        return False
    return not (_patched(module) or module._forward_hooks or _sees_input(module))


def is_linear(module: nn.Module) -> bool:
    """Whether calling `module` is `F.linear(x, module.weight, module.bias)` and nothing else."""
    return untouched(module, nn.Linear, Projection)


def _patched(module: nn.Module) -> bool:
    """Whether `module` has a forward of its own. Who patches one and takes it back may leave the class's own there."""
    forward = module.__dict__.get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def _sees_input(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def sees_input(reader: nn.Module) -> bool:
    """Whether a hook or a patched forward of `reader` gets to see what it is called with.

    Transformers calls attention by keyword and collects attention weights with hooks that see no keywords.
    """
    by_keyword = isinstance(reader, modeling_llama.LlamaAttention)
    observers = reader._forward_hooks_with_kwargs if by_keyword else reader._forward_hooks
    return _patched(reader) or _sees_input(reader) or bool(observers)
