"""`agoq train --diloco`: replicas that exchange outer gradients instead of gradients, one process each."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..diloco import Fragments, StreamingDiLoCo
from ..diloco.streaming import Saved
from .config import TrainConfig
from .world import World

_KEY = "rank{}"


class ReplicaExchange:
    """Stands where `GradientExchange` stands in the trainer's loop; every rank is a replica.

    Attributes:
        module: what to call forward on; its backward exchanges nothing.
        diloco: the synchronization of the replicas.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
        self.module = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.held_bytes = sum(p.numel() * p.element_size() for p in self._parameters)

        def outer_optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=config.outer_lr, momentum=0.9, nesterov=True)

        self.diloco = StreamingDiLoCo(
            model,
            optimizer,
            outer_optimizer,
            sync_every=config.diloco,
            fragments=config.fragments or Fragments(),
            overlap=config.overlap,
            warmup_steps=config.warmup,
            format=config.format,
        )
        self._counted = 0

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Forgets the gradients of a backward pass."""
        optimizer.zero_grad(set_to_none=True)

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> float:
        """Clips the gradients (their mean, during the warm-up), steps, and synchronizes what is due."""
        self.diloco.average_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.diloco.step()
        return norm.item()

    def take_count(self) -> int:
        """Bytes that this rank has sent since the last call, the start-up broadcast left out."""
        total = self.diloco.bytes_sent + self.diloco.warmup_bytes
        before, self._counted = self._counted, total
        return total - before

    # --- checkpoints ---

    def state(self, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Any]:
        """What this replica alone knows. A collective call."""
        saved = self.diloco.state_dict()[_KEY.format(rank)]
        return {
            "model": self.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "diloco": saved.content,
        }

    def restore(self, state: dict[str, Any], optimizer: torch.optim.Optimizer, rank: int) -> None:
        """The inverse of `state`."""
        self.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        self.diloco.load_state_dict({_KEY.format(rank): Saved(state["diloco"])})
        self._counted = self.diloco.bytes_sent + self.diloco.warmup_bytes

    def report(self, world: World, train_seconds: float) -> dict[str, Any]:
        """What the replicas exchanged, all together where it is bytes. A collective call."""
        diloco = self.diloco
        values = [diloco.start_up_bytes, diloco.warmup_bytes, diloco.bytes_sent, diloco.peak_bandwidth()]
        rows = world.gather([*values, diloco.blocked_seconds])
        blocked = rows[:, 4].mean().item()
        return {
            "replicas": diloco.replicas,
            "sync_every": diloco.schedule.sync_every,
            "fragments": len(diloco.fragments),
            "start_up_bytes": int(rows[:, 0].sum()),
            "warmup_bytes": int(rows[:, 1].sum()),
            "outer_gradient_bytes": int(rows[:, 2].sum()),
            "peak_bytes_per_second_of_a_replica": rows[:, 3].max().item(),
            "blocked_seconds": blocked,
            "utilization": 1 - blocked / train_seconds if train_seconds else None,
        }
