"""Streaming DiLoCo of several replicas in one process, one parameter at a time: written to be read, and compared to.

Knows the method only: no processes, no flat vectors, no messages.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from agoq_ext import dequantize, quantize


def make_model(seed: int = 7) -> nn.Sequential:
    """Four layers and, as `head`, a parameter outside layers; sizes that are no multiples of a group."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 31), nn.Tanh(), nn.Linear(31, 9), nn.Tanh(), nn.Linear(9, 3))
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    return model


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def backward(model: nn.Module, rank: int, step: int) -> float:
    """A replica's gradients in inner step `step` (1-based); its loss."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 5, generator=generator)
    targets = torch.stack([inputs.sum(1), inputs[:, 0] * inputs[:, 1], inputs[:, 2].sin()], 1)
    model.zero_grad()
    loss = nn.functional.mse_loss(model(inputs) * model.scale, targets)
    loss.backward()
    return loss.item()


def coded(value: Tensor, format: str) -> Tensor:
    if format == "float32":
        return value
    return dequantize(quantize(value.reshape(1, -1), format, 128)).reshape(value.shape)


def train(
    replicas: int,
    steps: int,
    every: int,
    fragments: list[list[str]],
    offsets: list[int],
    tau: int,
    mixing: float,
    format: str,
    warmup: int = 0,
    feedback: bool = False,
    after_step: Callable[[int, list[nn.Sequential], dict[str, Tensor]], None] | None = None,
) -> tuple[list[nn.Sequential], dict[str, Tensor]]:
    """The replicas' models and the outer parameters after `steps` inner steps."""
    models = [make_model() for _ in range(replicas)]
    inners = [make_optimizer(model) for model in models]
    outer = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    momentum: dict[str, Tensor] = {}
    lost = [{name: torch.zeros_like(p) for name, p in outer.items()} for _ in range(replicas)]
    flying: dict[int, dict[str, Tensor]] = {}
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            backward(model, rank, step)
        if step <= warmup:
            for parts in zip(*(model.parameters() for model in models), strict=True):
                mean = sum((p.grad for p in parts[1:]), parts[0].grad.clone()) / replicas
                for p in parts:
                    p.grad = mean.clone()
        for inner in inners:
            inner.step()
        if step == warmup:
            outer = {name: p.detach().clone() for name, p in models[0].named_parameters()}
        local = step - warmup
        for index, offset in enumerate(offsets):
            if local >= every and (local - offset) % every == 0:
                flying[index] = {}
                for name in fragments[index]:
                    total = torch.zeros_like(outer[name])
                    for rank, model in enumerate(models):
                        value = outer[name] - model.get_parameter(name).detach()
                        if feedback:
                            value = value + lost[rank][name]
                        sent = coded(value, format) if replicas > 1 else value
                        lost[rank][name] = value - sent
                        total = total + sent
                    flying[index][name] = total * (1 / replicas)
            if local - tau >= every and (local - tau - offset) % every == 0:
                for name, gradient in flying.pop(index).items():
                    velocity = momentum[name] * 0.9 + gradient if name in momentum else gradient.clone()
                    momentum[name] = velocity
                    outer[name] = outer[name] - 0.4 * (gradient + 0.9 * velocity)
                    for model in models:
                        p = model.get_parameter(name)
                        p.data = mixing * p.data + (1 - mixing) * outer[name]
        if after_step is not None:
            after_step(step, models, outer)
    return models, outer
