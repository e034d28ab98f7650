"""What all converted modules share: a class that was changed, and the question who else has a hand in a module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import autograd
from ..nn import functional as agoq
from .policy import TensorFormat


class Swapped:
    """Mixin of a module whose class was changed; its state lies in attributes that `restore` deletes.

    It comes before the original class, whose name the new class keeps: other tools find modules by it.
    """

    original: ClassVar[type[nn.Module]]


# --- what converted modules hand to each other instead of a tensor -----------------------------------------------


@dataclass(frozen=True)
class Projected:
    """What a norm hands to the module that reads it: the projections of its output, by the projection's name.

    `shape` is that of the norm's output, which attention reads to shape its heads.
    """

    shape: torch.Size
    outputs: dict[str, Tensor]


@dataclass(frozen=True)
class Attended:
    """What attention hands to its output projection: its output, and the codes of it that attention keeps.

    On its way transformers' code reshapes it to [..., heads * head_dim], the shape that it has already.
    """

    out: Tensor
    packed: Tensor
    scales: Tensor

    def reshape(self, *shape: int) -> Attended:
        return Attended(self.out.reshape(*shape), self.packed, self.scales)

    @property
    def shape(self) -> torch.Size:
        return self.out.shape

    def contiguous(self) -> Attended:
        return self


@dataclass(frozen=True)
class Activated:
    """What an activation hands to the linear layer behind it: its input, and how that is kept."""

    x: Tensor
    function: str
    format: TensorFormat


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
    """A linear layer that keeps its input quantized, or what attention has kept of it already.

    Attributes:
        agoq_format: how.
    """

    original = nn.Linear
    agoq_format: TensorFormat
    takes_attended = True

    def forward(self, input: Any) -> Tensor:
        if not isinstance(input, Attended):
            return agoq.linear(input, self.weight, self.bias, **self.agoq_format.keywords())
        x, dtype = input.out, autograd.autocast_dtype(input.out)
        return autograd.Projections.apply(
            x, None, input.packed, input.scales, 0.0, self.agoq_format.codec, dtype, 1, self.weight, self.bias
        )[0]


# --- who may be computed elsewhere ---------------------------------------------------------------------------


def untouched(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether `module` is of exactly one of `classes` (of any, if none are given) and calling it runs nothing else."""
    if classes and type(module) not in classes:
        return False
    if "_is_replica" in module.__dict__:  # a copy by nn.DataParallel, whose reader is on another device
        return False
    return not (patched(module) or sees_arguments(module))


def is_linear(module: nn.Module) -> bool:
    """Whether calling `module` is `F.linear(x, module.weight, module.bias)` and nothing else."""
    return untouched(module, nn.Linear, Projection)


def patched(module: nn.Module) -> bool:
    """Whether `module` has a forward of its own. Who patches one and takes it back may leave the class's own there."""
    forward = module.__dict__.get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def sees_arguments(module: nn.Module) -> bool:
    """Whether a hook of `module` gets to see what it is called with."""
    return bool(_is_hooked(module) or module._forward_hooks)


def sees_input(reader: nn.Module) -> bool:
    """Whether a hook or a patched forward of `reader` gets to see what it is called with.

    Transformers calls attention by keyword and collects attention weights with hooks that see no keywords.
    """
    by_keyword = type(reader).__name__.endswith("Attention")
    observers = reader._forward_hooks_with_kwargs if by_keyword else reader._forward_hooks
    return patched(reader) or _is_hooked(reader) or bool(observers)


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)
