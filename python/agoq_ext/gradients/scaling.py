"""torch.amp.GradScaler beside a store: it finds no `.grad`, so the store tells it what it would have found."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState


def check_scaler(op: str, scaler: Any) -> None:
    """Raises TypeError unless `scaler` is a GradScaler."""
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"{op}: scaler must be a torch.amp.GradScaler; got {type(scaler).__name__}")


def inverse_scale(scaler: torch.amp.GradScaler) -> float:
    """What gradients are multiplied by to unscale them."""
    return 1.0 / scaler.get_scale() if scaler.is_enabled() else 1.0


def record(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, finite: bool, device: torch.device
) -> None:
    """Tells the scaler whether the gradients were finite, as its own `step` would have, for its next `update`."""
    if not scaler.is_enabled():
        return
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {device: torch.tensor(0.0 if finite else 1.0, device=device)}
    state["stage"] = OptState.STEPPED
