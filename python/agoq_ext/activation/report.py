"""activation_report: the bytes that each operator of a model keeps for backward, measured.

One forward pass runs under `torch.autograd.graph.saved_tensors_hooks`. Every tensor that autograd saves is looked at as
the storage it keeps alive: a storage counts once, whole, for the operator that saved it first. What is still alive
when the forward has returned is what backward would find; that is counted.

Not counted as activations are storages of parameters and buffers, and tensors made from nothing else, such as the
low-precision weight copies that autocast makes: a dispatch mode watches every operation, and the outputs of one whose
tensor inputs are all parameters, buffers or such copies are marked as copies. Both are reported apart. Everything else
that is kept is counted: masks, rotary tables, log-sum-exp, token ids, labels.

Operators are told by the innermost module whose forward is running, `names.OPERATORS` maps the names that Llama-like
models use. An input that two operators save counts for the first: attention's output is saved by attention itself, and
the output projection, which saves the same storage, then shows nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .names import layer_of, operator_of
from .tracking import ModuleStack


@dataclass(frozen=True)
class SavedTensor:
    """One storage kept for backward.

    Attributes:
        module: name of the module that saved it first; "" for the model itself.
        operator: what that module does.
        shape, dtype: of the tensor that was saved first; it may be a view of a part of the storage.
        nbytes: of the storage.
    """

    module: str
    operator: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass
class ActivationReport:
    """What a model keeps for backward, in bytes.

    Attributes:
        saved: every counted storage, in the order of saving.
        parameter_bytes: kept parameters and buffers, which live anyway; not in any total.
        parameter_copy_bytes: kept tensors made from parameters alone, such as autocast's copies; not in any total.
        unit_bytes: U = batch x sequence x hidden x 2 bytes, one BF16 activation; None where it is not known.
    """

    saved: list[SavedTensor] = field(default_factory=list)
    parameter_bytes: int = 0
    parameter_copy_bytes: int = 0
    unit_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all activations kept."""
        return sum(s.nbytes for s in self.saved)

    @property
    def by_operator(self) -> dict[str, int]:
        """Bytes by operator, in the order in which a forward meets them."""
        return self._sum(lambda s: s.operator)

    @property
    def by_layer(self) -> dict[str, int]:
        """Bytes by layer index, "" for what lies outside the layers."""
        return self._sum(lambda s: layer_of(s.module))

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes by module name."""
        return self._sum(lambda s: s.module)

    def in_units(self, nbytes: int) -> float | None:
        """`nbytes` in units U; None where U is not known."""
        return nbytes / self.unit_bytes if self.unit_bytes else None

    def of_layer(self, index: int) -> ActivationReport:
        """The part that one layer keeps."""
        saved = [s for s in self.saved if layer_of(s.module) == str(index)]
        return ActivationReport(saved, unit_bytes=self.unit_bytes)

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain Python values, ready for JSON."""
        return {
            "total_bytes": self.total_bytes,
            "unit_bytes": self.unit_bytes,
            "by_operator": self.by_operator,
            "by_layer": self.by_layer,
            "by_module": self.by_module,
            "parameter_bytes": self.parameter_bytes,
            "parameter_copy_bytes": self.parameter_copy_bytes,
        }

    def __str__(self) -> str:
        rows = [*self.by_operator.items(), ("total", self.total_bytes)]
        apart = [
            ("parameters, apart", self.parameter_bytes),
            ("their copies, apart", self.parameter_copy_bytes),
        ]
        lines = [f"{'kept for backward':<24}{'bytes':>16}" + (f"{'U':>10}" if self.unit_bytes else "")]
        for name, nbytes in rows + apart:
            units = self.in_units(nbytes)
            lines.append(f"{name:<24}{nbytes:>16,}" + ("" if units is None else f"{units:>10.3f}"))
        return "\n".join(lines)

    def _sum(self, key: Callable[[SavedTensor], str]) -> dict[str, int]:
        sums: dict[str, int] = defaultdict(int)
        for s in self.saved:
            sums[key(s)] += s.nbytes
        return dict(sums)


def activation_report(model: nn.Module, inputs: Any, *, unit_bytes: int | None = None) -> ActivationReport:
    """Measures what one forward of `model` keeps for backward; see the module's docstring for the method.

    The forward runs as it would in training: in the model's mode, under the caller's autocast. No backward runs, no
    gradient and no random state changes.

    Args:
        inputs: what the model is called with: a dict of keyword arguments, a tuple of arguments, or one argument.
        unit_bytes: U; by default tokens x config.hidden_size x 2, where the model has such a config and `inputs`
            hold integer token ids.

    Raises:
        RuntimeError: gradients are disabled, so that nothing would be kept.
    """
    if not torch.is_grad_enabled():
        raise RuntimeError("activation_report: gradients must be enabled; the call is inside torch.no_grad()")
    recorder = _Recorder(model)
    torch.clear_autocast_cache()  # copies made before would pass for activations
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        stack.enter_context(recorder.stack.tracking())
        stack.enter_context(saved_tensors_hooks(recorder.pack, recorder.unpack))
        stack.enter_context(_ParameterCopies(recorder))
        # The graph, and with it all that is kept, lives as long as the outputs do.
        outputs = _call(model, inputs)
    report = recorder.report()
    report.unit_bytes = unit_bytes or _unit_bytes(model, inputs)
    del outputs
    return report


# --- recording -----------------------------------------------------------------------------------------------


class _Recorder:
    """Collects saved storages and tells whose they are."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stack = ModuleStack(model)
        # Weak references: they keep a storage's identity from being reused, not its memory.
        self.parameters = {_storage(t) for t in (*model.parameters(), *model.buffers())}
        self.copies: set[StorageWeakRef] = set()
        self.kept: dict[StorageWeakRef, SavedTensor] = {}

    def pack(self, x: Tensor) -> Tensor:
        storage = _storage(x)
        if storage not in self.kept:
            if storage not in self.parameters:
                self._look_again()
            module = self.stack.name
            operator = operator_of(module, self.stack.module)
            self.kept[storage] = SavedTensor(
                module,
                operator,
                tuple(x.shape),
                str(x.dtype).removeprefix("torch."),
                x.untyped_storage().nbytes(),
            )
        return x.detach()  # an output of the operation that saves it would otherwise keep itself alive

    def _look_again(self) -> None:
        """Adds the parameters that the running module and its siblings hold now: sharding replaces them in forward."""
        running = self.stack.running
        around = running[-2] if len(running) > 1 else self.model
        self.parameters |= {_storage(t) for t in around.parameters()}

    @staticmethod
    def unpack(x: Tensor) -> Tensor:
        return x

    def report(self) -> ActivationReport:
        report = ActivationReport()
        for storage, saved in self.kept.items():
            if storage in self.parameters:
                report.parameter_bytes += saved.nbytes
            elif storage in self.copies:
                report.parameter_copy_bytes += saved.nbytes
            elif not storage.expired():
                report.saved.append(saved)
        return report


class _ParameterCopies(TorchDispatchMode):
    """Marks the outputs of operations whose tensor inputs are all parameters, buffers or marked themselves."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = self.recorder.parameters, self.recorder.copies
        inputs = [_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if inputs and all(any(x in storages for storages in known) for x in inputs):
            fresh = {_storage(x) for x in tree_leaves(out) if isinstance(x, Tensor)}
            self.recorder.copies |= fresh - self.recorder.parameters
        return out


def _storage(x: Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())


# --- inputs --------------------------------------------------------------------------------------------------


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _unit_bytes(model: nn.Module, inputs: Any) -> int | None:
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    if isinstance(inputs, Mapping):
        ids = inputs.get("input_ids")
    else:
        ids = inputs[0] if isinstance(inputs, (tuple, list)) and inputs else inputs
    if not isinstance(hidden, int) or not isinstance(ids, Tensor) or ids.is_floating_point():
        return None
    return ids.numel() * hidden * 2
