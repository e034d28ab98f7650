"""How gradients reach the other ranks and the optimizer: DDP with a hook that counts what it sends."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import ddp
from ..collectives import bytes_sent

GROUP_SIZE = 128
_PLAIN_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class GradientExchange:
    """Averages gradients over the default group in the way that `--gradients` names.

    Attributes:
        module: what to call forward on; its backward exchanges gradients, bucket by bucket.
    """

    def __init__(self, model: nn.Module, gradients: str) -> None:
        self.module = DistributedDataParallel(model)
        if gradients in _PLAIN_DTYPES:
            state = ddp.PlainAllReduceState(dtype=_PLAIN_DTYPES[gradients])
            self.module.register_comm_hook(state, ddp.plain_allreduce_hook)
        else:
            ddp.register(self.module, format=gradients, group_size=GROUP_SIZE)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._counted = bytes_sent()

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        """The context of one micro-step's forward and backward; the last one of a step exchanges gradients."""
        return nullcontext() if last else self.module.no_sync()

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
