"""ConversionReport, and the steps that every conversion is made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .policy import ActivationPolicy, TensorFormat


@dataclass
class ConversionReport:
    """What `compress_activations` changed.

    Attributes:
        policy: the policy that was applied.
        converted: kind of saved tensor ("norm_input", ...) by name of the module that now stores it quantized; for
            attention all its kinds, as "query, key, value".
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

    def stored(self, kind: str, name: str, module: nn.Module) -> TensorFormat | None:
        """What the policy says of the module's tensor of this kind."""
        return self.policy.stored(kind, name, type(module).__name__)


def join(name: str, child: str) -> str:
    """The name of a child of the module called `name`."""
    return f"{name}.{child}" if name else child


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def is_exactly(report: ConversionReport, name: str, module: nn.Module, cls: type) -> bool:
    """Whether `module` is exactly a `cls`; otherwise the report says that it is not."""
    if type(module) is not cls:
        report.skipped[name] = f"must be a {full_name(cls)}; it is a {full_name(type(module))}"
        return False
    return True


def swap(module: nn.Module, cls: type[nn.Module], **state: Any) -> None:
    """Changes the class of `module`. Its state is set around nn.Module, which would register modules."""
    module.__class__ = cls
    vars(module).update(state)
