"""compress_saved_tensors: activations stored quantized for any model, without conversion, by saved-tensor hooks.

Autograd hands every tensor that it saves to `pack`. An activation is told from everything else by its history: it
requires a gradient and was computed, and not from one parameter alone. So these are never compressed, whatever their
type and shape: parameters and buffers, views and transposes of them, the low-precision copies that autocast makes, the
unsharded parameters of FSDP2 (all leaves, or a chain of casts and views that ends in one), masks, rotary tables,
log-sum-exp and random state (they require no gradient). Nor are integers, tensor subclasses, small tensors, statistics
of rows, and the outputs of softmax and exp, whose derivative reads them as probabilities.

A storage is compressed once, as one row in the order in which it lies in memory, however many views of it are saved;
a view that does not cover its storage is compressed by itself. A ReLU's output also keeps one bit an element, for its
backward asks which are positive. Forward does not change. Backward decodes on each use.

Unlike conversion the hooks keep every tensor that plain PyTorch keeps, only smaller: a norm's output and the product of
gate and up are stored although they could be recomputed. Under torch.compile the compiled graph's own saved
intermediates have no history, and stay as they are: compile a converted model instead.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .. import layout, ops
from .names import operator_of
from .policy import ActivationPolicy, TensorFormat, resolve_policy
from .tracking import ModuleStack

MIN_ELEMENTS = 1024  # below, the codes and Python's objects weigh more than they save

# What a running module's saved tensors are, by operator; anything else counts as an MLP's input.
_KINDS = {
    "norm": "norm_input",
    "qkv": "norm_input",
    "attention": "query",
    "output projection": "attention_output",
    "mlp": "gate_up",
    "down projection": "gate_up",
}
_OTHER_KIND = "mlp_input"
# Nodes that only look at, cast or reorder a tensor, by the names that autograd gives them.
_VIEWING = frozenset(
    f"{name}Backward{i}"
    for name in (
        *(
            "Alias",
            "AsStrided",
            "Clone",
            "Expand",
            "Permute",
            "Select",
            "Slice",
            "Split",
            "Squeeze",
            "T",
            "ToCopy",
        ),
        *("Transpose", "Unsqueeze", "UnsafeView", "Unsafe_View", "View", "ReshapeAlias", "Chunk", "Unbind"),
    )
    for i in range(3)
)
_RELU = "ReluBackward0"
_PROBABILITIES = frozenset({"LogSoftmaxBackward0", "SoftmaxBackward0", "ExpBackward0"})


@dataclass
class SavedTensorsReport:
    """What `compress_saved_tensors` has done so far; every storage counts once each time that it is stored.

    Attributes:
        original_bytes: of the storages that were compressed. stored_bytes: of their codes and scales.
        tensors: how many saved tensors read them. storages: how many they are.
        left: saved tensors that were left alone, by reason.
    """

    original_bytes: int = 0
    stored_bytes: int = 0
    tensors: int = 0
    storages: int = 0
    left: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        share = self.stored_bytes / self.original_bytes if self.original_bytes else 0.0
        lines = [
            f"compressed: {self.storages} storages of {self.tensors} saved tensors, "
            f"{self.original_bytes:,} to {self.stored_bytes:,} bytes ({share:.3f})"
        ]
        lines += [f"left alone: {count} ({reason})" for reason, count in sorted(self.left.items())]
        return "\n".join(lines)


class compress_saved_tensors:
    """Context manager: what autograd saves inside is stored quantized; see the module's docstring for what is not.

    Enter it around the forward; backward may run outside. Nested saved-tensor hooks take their own tensors; a region
    under non-reentrant activation checkpointing keeps its inputs alone, and those quantized, so that backward
    recomputes from the decoded ones. A backward with create_graph=True raises RuntimeError.

    Args:
        policy: a name or an ActivationPolicy. Without `model` every tensor is stored as its `mlp_input`.
        model: tells by the running module which kind a tensor is, and lets the policy's overrides match names; what
            norms and q, k, v projections save is norm_input, then query, attention_output, gate_up and mlp_input.
        min_elements: smaller tensors are left alone.

    Attributes:
        report: a SavedTensorsReport.
    """

    def __init__(
        self,
        policy: str | ActivationPolicy = "agoq",
        model: nn.Module | None = None,
        *,
        min_elements: int = MIN_ELEMENTS,
    ) -> None:
        self.policy = resolve_policy("compress_saved_tensors", policy)
        self.min_elements = min_elements
        self.report = SavedTensorsReport()
        self._stack = None if model is None else ModuleStack(model)
        self._entries: weakref.WeakValueDictionary[Any, _Entry] = weakref.WeakValueDictionary()
        self._contexts: list[ExitStack] = []

    def __enter__(self) -> compress_saved_tensors:
        context = ExitStack()
        if self._stack is not None and not self._contexts:
            context.enter_context(self._stack.tracking())
        context.enter_context(saved_tensors_hooks(self._pack, _unpack))
        self._contexts.append(context)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._contexts.pop().close()

    def _pack(self, x: Tensor) -> Any:
        reason = _why_not(x, self.min_elements)
        stored = None if reason else self._format()
        if stored is None:
            self.report.left[reason or "the policy"] += 1
            # An output would keep itself alive through its own node; a leaf has none.
            return x if x.is_leaf else x.detach()
        self.report.tensors += 1
        storage = x.untyped_storage()
        elements = storage.nbytes() // x.element_size()
        whole = _covers(x, elements)
        place = () if whole else (x.storage_offset(), x.shape, x.stride())
        key = (StorageWeakRef(storage), x._version, x.dtype, stored, *place)
        entry = self._entries.get(key)
        if entry is None:
            flat = x.detach().as_strided((elements,), (1,), 0) if whole else x.detach().reshape(-1)
            relu = x.grad_fn is not None and x.grad_fn.name() == _RELU
            entry = _Entry(flat, stored, positive=relu)
            self._entries[key] = entry
            self.report.storages += 1
            self.report.original_bytes += flat.nbytes
            self.report.stored_bytes += entry.nbytes
        return _Saved(entry, x.shape, x.stride() if whole else None)

    def _format(self) -> TensorFormat | None:
        if self._stack is None:
            return getattr(self.policy, _OTHER_KIND)
        module = self._stack.module
        kind = _KINDS.get(operator_of(self._stack.name, module), _OTHER_KIND)
        return self.policy.stored(kind, self._stack.name, "" if module is None else type(module).__name__)


class _Entry:
    """The codes of one storage, alive as long as a saved tensor reads them; for a ReLU's output its positive bits."""

    __slots__ = ("__weakref__", "bits", "dtype", "elements", "packed", "scales", "stored")

    def __init__(self, flat: Tensor, stored: TensorFormat, positive: bool) -> None:
        self.stored, self.dtype, self.elements = stored, flat.dtype, flat.numel()
        self.packed, self.scales = ops.quantize(
            flat, stored.format, stored.group_size, stored.torch_scale_dtype
        )
        self.bits = _pack_bits(flat > 0) if positive else None

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes + (0 if self.bits is None else self.bits.nbytes)

    def decode(self) -> Tensor:
        """[elements]."""
        stored = self.stored
        out = ops.dequantize(
            self.packed, self.scales, self.elements, stored.format, stored.group_size, self.dtype
        )
        out = out.reshape(-1)
        if self.bits is not None:
            positive = _unpack_bits(self.bits, self.elements)
            # What was rounded to zero gets the smallest value that counts as positive; NaN stays.
            out = torch.where(positive & (out == 0), torch.finfo(out.dtype).tiny, out)
        return out


@dataclass(frozen=True)
class _Saved:
    """One saved tensor: an entry of its own, or with its strides a view of the whole storage that the entry is."""

    entry: _Entry
    shape: torch.Size
    strides: tuple[int, ...] | None


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _Saved):
        return saved
    if torch.is_grad_enabled():
        raise RuntimeError(
            "compress_saved_tensors: double backward is not supported, because saved tensors are quantized; "
            "call backward without create_graph=True"
        )
    flat = saved.entry.decode()
    return flat.reshape(saved.shape) if saved.strides is None else flat.as_strided(saved.shape, saved.strides)


def _pack_bits(bits: Tensor) -> Tensor:
    """Eight booleans a byte, the first in the lowest bit."""
    padded = nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (padded * _weights(bits)).sum(1, dtype=torch.uint8)


def _unpack_bits(packed: Tensor, elements: int) -> Tensor:
    return (packed[:, None] & _weights(packed)).bool().view(-1)[:elements]


def _weights(like: Tensor) -> Tensor:
    return 2 ** torch.arange(8, dtype=torch.uint8, device=like.device)


def _covers(x: Tensor, elements: int) -> bool:
    """Whether x shows every element of its storage once."""
    if x.numel() != elements or x.storage_offset() != 0:
        return False
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _why_not(x: Tensor, min_elements: int) -> str:
    """Why x is not compressed; "" if it is."""
    if x.dtype not in layout.FLOAT_DTYPES:
        return "not a float"
    if isinstance(x, nn.Parameter):
        return "a parameter"
    if type(x) is not Tensor or x.layout != torch.strided:
        return "a subclass or a sparse tensor"
    if not x.requires_grad:
        return "requires no gradient"
    if x.numel() < min_elements or x.dim() == 0 or x.shape[-1] == 1:  # one number a row: a statistic
        return "small"
    node: Any = x.grad_fn
    if node is not None and node.name() in _PROBABILITIES:
        return "probabilities"
    while node is not None and node.name() in _VIEWING:
        node = node.next_functions[0][0]
    variable = getattr(node, "variable", None)
    return "made from a parameter" if isinstance(variable, nn.Parameter) else ""
