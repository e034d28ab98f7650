"""One fragment's state: its parameters seen as one flat FP32 vector, their outer values, and its outer optimizer."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import Work
from ..layout import round_up

OuterOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


def local(tensor: Tensor) -> Tensor:
    """The plain tensor that holds this rank's part of a parameter; of a DTensor, its shard."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


class Fragment:
    """Parameters that are exchanged together.

    Each starts on a group boundary of the flat vector, so that no scale is shared by two of them; the gaps are zero.

    Attributes:
        names, parameters: what it holds.
        numel: elements of the flat vector, gaps included.
        outer: float32 [numel] on the outer device, the last synchronized values.
        optimizer: the outer optimizer, of `outer` alone.
        residual: float32 [numel] with error feedback, what encodings have lost so far; else None.
        value: float32 [numel] while in flight, what this replica encodes (its outer gradient, and the residual).
        mean: float32 [numel] while in flight, where the mean over the replicas is written.
        left: float32 [numel] while in flight with error feedback, the next residual.
        work: the exchange in flight; None if there is none, or its mean was loaded from a checkpoint.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        group_size: int,
        outer_device: torch.device | None,
    ) -> None:
        self.names = list(names)
        self.parameters = list(parameters)
        self._slices = []
        end = 0
        for parameter in self.parameters:
            size = local(parameter).numel()
            self._slices.append(slice(end, end + size))
            end += round_up(size, group_size)
        self.numel = end
        self.device = local(self.parameters[0]).device
        self.outer = torch.zeros(end, dtype=torch.float32, device=outer_device or self.device)
        self.residual: Tensor | None = None
        self.clear()

    def clear(self) -> None:
        """Nothing is in flight."""
        self.value: Tensor | None = None
        self.mean: Tensor | None = None
        self.left: Tensor | None = None
        self.work: Work | None = None

    @property
    def in_flight(self) -> bool:
        return self.mean is not None or self.value is not None

    @property
    def unsent(self) -> bool:
        """A value from a checkpoint waits to be sent again."""
        return self.value is not None and self.mean is None

    def make_optimizer(self, factory: OuterOptimizer) -> None:
        self.outer.requires_grad_(False)
        self.optimizer = factory([self.outer])

    def pack(self, device: torch.device) -> Tensor:
        """The parameters' present values: float32 [numel] on `device`."""
        flat = torch.zeros(self.numel, dtype=torch.float32, device=device)
        for parameter, part in zip(self.parameters, self._slices, strict=True):
            flat[part].copy_(local(parameter).reshape(-1))
        return flat

    def unpack(self, flat: Tensor) -> None:
        """Writes `flat` [numel] into the parameters, rounded to their dtypes."""
        for parameter, part in zip(self.parameters, self._slices, strict=True):
            own = local(parameter)
            own.copy_(flat[part].view(own.shape))
            torch.autograd.graph.increment_version(parameter)

    def backup(self) -> list[Tensor]:
        return [local(parameter).clone() for parameter in self.parameters]

    def restore(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            local(parameter).copy_(value)
            torch.autograd.graph.increment_version(parameter)

    def adopt(self) -> None:
        """The outer values become the parameters' present ones."""
        self.outer.copy_(self.pack(self.outer.device))

    def outer_gradient(self, device: torch.device) -> Tensor:
        """outer - present value: float32 [numel] on `device`."""
        return self.outer.to(device) - self.pack(device)

    def apply(self, mean: Tensor, mixing: float) -> None:
        """Takes an outer step with the mean outer gradient and mixes its result into the parameters.

        theta <- mixing * theta + (1 - mixing) * outer, computed in FP32.
        """
        self.outer.grad = mean.to(self.outer.device)
        self.optimizer.step()
        self.outer.grad = None
        outer = self.outer.detach()
        if mixing:
            present = self.pack(outer.device)
            outer = present.mul_(mixing).add_(outer, alpha=1 - mixing)
        self.unpack(outer)

    # --- saving ---

    def state(self) -> dict[str, Any]:
        """Everything but the parameters; of an exchange in flight, its mean or, where it failed, what was sent."""
        saved: dict[str, Any] = {
            "outer": self.outer.detach().clone(),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
        }
        if self.residual is not None:
            saved["residual"] = self.residual.clone()
        if self.in_flight:
            arrived = self.mean is not None and (self.work is None or self.work.is_success())
            kept = {"mean": self.mean, "left": self.left} if arrived else {"value": self.value}
            saved["flying"] = {name: tensor.clone() for name, tensor in kept.items() if tensor is not None}
        return saved

    def load(self, saved: dict[str, Any], exchange_device: torch.device) -> None:
        """The inverse of `state`; a value that was sent in vain is left in `value`, to be sent again."""
        self.outer.copy_(saved["outer"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.clear()
        if self.residual is not None:
            self.residual.copy_(saved.get("residual", torch.zeros_like(self.residual)))
        flying = {name: tensor.to(exchange_device) for name, tensor in saved.get("flying", {}).items()}
        self.value, self.mean, self.left = (flying.get(name) for name in ("value", "mean", "left"))


def names_digest(fragments: Sequence[Fragment]) -> str:
    """Eight hexadecimal digits that differ where the names, the shapes or the order of parameters do."""
    names = [
        (name, tuple(local(p).shape))
        for part in fragments
        for name, p in zip(part.names, part.parameters, strict=True)
    ]
    sizes = [(len(part.names), part.numel) for part in fragments]
    return f"{zlib.crc32(repr([sizes, names]).encode()):08x}"
