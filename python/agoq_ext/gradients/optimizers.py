"""Steps an optimizer on some of its parameters at a time, as one logical step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

# Class names of optimizers whose step is not a function of each parameter alone: counters, line searches, statistics
# over a whole group.
GROUP_WIDE = {
    "LBFGS": "its line search needs all gradients at once",
    "SparseAdam": "it needs sparse gradients",
    "FusedAdam": "its step counter belongs to the group",
    "FusedLAMB": "it takes a norm over all gradients",
    "FusedNovoGrad": "its step counter belongs to the group",
    "FusedMixedPrecisionLamb": "it takes a norm over all gradients",
    "AdamWScheduleFree": "its averaging weight belongs to the group",
    "AdamWScheduleFreePaper": "its averaging weight belongs to the group",
    "RAdamScheduleFree": "its averaging weight belongs to the group",
    "SGDScheduleFree": "its averaging weight belongs to the group",
    "Prodigy": "its step size is estimated over the group",
    "DAdaptAdam": "its step size is estimated over the group",
    "DAdaptAdaGrad": "its step size is estimated over the group",
    "DAdaptSGD": "its step size is estimated over the group",
    "DAdaptLion": "its step size is estimated over the group",
}
# Those that take statistics over a whole parameter, which a shard does not have.
PARAMETER_WIDE = {
    "Adafactor": "it keeps statistics of rows and columns",
    "Muon": "it orthogonalizes whole matrices",
    "LAMB": "it takes norms of whole parameters",
    "Lamb": "it takes norms of whole parameters",
    "LARS": "it takes norms of whole parameters",
    "Shampoo": "it keeps statistics of whole matrices",
    "SOAP": "it keeps statistics of whole matrices",
}


def check_optimizer(op: str, optimizer: torch.optim.Optimizer, sharded: bool) -> None:
    """Raises TypeError for something else than an optimizer, ValueError, with its name, for one that cannot be used."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{op}: optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
    for cls in type(optimizer).__mro__:
        if reason := GROUP_WIDE.get(cls.__name__):
            raise ValueError(
                f"{op}: optimizer must step each parameter by itself, bucket by bucket; got {cls.__name__}: {reason}"
            )
        if sharded and (reason := PARAMETER_WIDE.get(cls.__name__)):
            raise ValueError(
                f"{op}: optimizer must work element by element on shards; got {cls.__name__}: {reason}"
            )


def step_in_parts(op: str, optimizer: torch.optim.Optimizer, parts: Sequence[Callable[[], object]]) -> None:
    """One logical step: for each part, which sets the gradients of some parameters, a step of those alone.

    Gradients are dropped after each part. Step hooks, the optimizer's and the global ones, run once, around all parts.
    """
    for hook in itertools.chain(
        torch_optimizer._global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()
    ):
        hook(optimizer, (), {})
    raw = type(optimizer).step
    if getattr(
        raw, "hooked", False
    ):  # what torch.optim.Optimizer wraps around `step`: hooks and a profiler range
        raw = raw.__wrapped__  # type: ignore[attr-defined]
    before = _settings(optimizer)
    for index, part in enumerate(parts):
        part()
        with torch.profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
            raw(optimizer)  # type: ignore[call-arg]
        optimizer.zero_grad(set_to_none=True)
        if index == 0 and len(parts) > 1 and _settings(optimizer) != before:
            raise RuntimeError(
                f"{op}: {type(optimizer).__name__} changes settings of its groups at each step, so it cannot be "
                "stepped bucket by bucket; the first bucket has been stepped"
            )
    for hook in itertools.chain(
        optimizer._optimizer_step_post_hooks.values(), torch_optimizer._global_optimizer_post_hooks.values()
    ):
        hook(optimizer, (), {})
    optimizer._opt_called = True  # type: ignore[attr-defined]  # what learning-rate schedulers look at


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The plain numbers among each group's settings."""
    return [
        {k: v for k, v in group.items() if isinstance(v, int | float | str | bool)}
        for group in optimizer.param_groups
    ]
