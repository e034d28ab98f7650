"""How gradients reach the other ranks and the optimizer: DDP with a hook that counts its bytes, or a GradientStore."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import ddp
from ..collectives import bytes_sent
from ..gradients import GradientStore

GROUP_SIZE = 128
_PLAIN_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class GradientExchange:
    """Averages gradients over the default group in the way that `--gradients` names.

    Attributes:
        module: what to call forward on; its backward exchanges gradients, bucket by bucket.
        held_bytes: bytes in which a rank holds gradients between backward and step, DDP's buckets left out.
    """

    def __init__(self, model: nn.Module, gradients: str) -> None:
        self.module = DistributedDataParallel(model)
        if gradients in _PLAIN_DTYPES:
            state = ddp.PlainAllReduceState(dtype=_PLAIN_DTYPES[gradients])
            self.module.register_comm_hook(state, ddp.plain_allreduce_hook)
        else:
            ddp.register(self.module, format=gradients, group_size=GROUP_SIZE)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.held_bytes = sum(p.numel() * p.element_size() for p in self._parameters)
        self._counted = bytes_sent()

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        """The context of one micro-step's forward and backward; the last one of a step exchanges gradients."""
        return nullcontext() if last else self.module.no_sync()

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Forgets the gradients of a backward pass."""
        optimizer.zero_grad(set_to_none=True)

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> float:
        """Clips the gradients, steps, and clears them; returns their norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def take_count(self) -> int:
        """Bytes that this rank has sent for gradients since the last call."""
        before, self._counted = self._counted, bytes_sent()
        return self._counted - before


class StoredGradients:
    """Stands where `GradientExchange` does: gradients accumulate in 8 bits and are exchanged as they are."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self._store = GradientStore(model, group_size=GROUP_SIZE)
        self.held_bytes = self._store.nbytes
        self._counted = bytes_sent()

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        """As GradientExchange's."""
        return nullcontext() if last else self._store.no_sync()

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Forgets the gradients of a backward pass."""
        self._store.clear()

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> float:
        """Clips, steps bucket by bucket, and clears; returns the norm before clipping. No step if it is not finite."""
        return self._store.step(optimizer, max_norm=max_norm).norm

    def take_count(self) -> int:
        """As GradientExchange's."""
        before, self._counted = self._counted, bytes_sent()
        return self._counted - before
