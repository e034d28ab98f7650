"""calibrate: what quantizing each saved tensor does to the gradients; fit: the widest codes where that hurts most.

Each tensor that conversion can store, told by its module and kind, is stored in each candidate format while everything
else stays exact, and the gradient of every parameter is compared with the exact one. Errors of different tensors are
nearly independent, so that their squares add up; `fit` chooses formats for all of them so that the sum is small and
the bytes stay within a budget (a multiple-choice knapsack, solved by dynamic programming over the budget).

A model with n tensors takes 1 + n x formats forward and backward passes a batch. That is minutes for a small model; for
a large one calibrate a shallower copy, and apply what is learned by kind.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ..autograd import Codec
from .convert import compress_activations, restore
from .policy import KINDS, ActivationPolicy, Override, TensorFormat

_MAX_CELLS = 2**16
FORMATS = tuple(TensorFormat(format) for format in ("nf4", "int5", "int6", "int8"))


@dataclass(frozen=True)
class Measurement:
    """One saved tensor in one format.

    Attributes:
        tensor_error: relative L2 error of the tensor, decoded against exact.
        gradient_error: relative L2 error of all gradients together, everything else exact.
        nbytes: of codes and scales, the mean over batches.
    """

    tensor_error: float
    gradient_error: float
    nbytes: int


@dataclass
class Calibration:
    """What `calibrate` measured.

    Attributes:
        measurements: by (module name, kind), the measurement in each format.
    """

    measurements: dict[tuple[str, str], dict[TensorFormat, Measurement]] = field(default_factory=dict)

    def bytes_of(self, policy: ActivationPolicy) -> int:
        """Bytes that the calibrated tensors take under a policy of calibrated formats.

        Raises:
            ValueError: the policy stores one of them in a format that was not measured, or not at all.
        """
        return sum(self._of(policy, tensor).nbytes for tensor in self.measurements)

    def error_of(self, policy: ActivationPolicy) -> float:
        """The relative gradient error that the measurements predict for a policy: the root of the sum of squares."""
        return sum(self._of(policy, t).gradient_error ** 2 for t in self.measurements) ** 0.5

    def fit(self, memory_budget: int, base: ActivationPolicy | None = None) -> ActivationPolicy:
        """The policy with the least predicted gradient error that takes at most `memory_budget` bytes.

        Args:
            memory_budget: bytes of all calibrated tensors of one batch; attention's log-sum-exp is not among them.
            base: what tensors get that were not calibrated, such as another model's; nothing by default.

        Raises:
            ValueError: even the cheapest formats take more.
        """
        formats = [list(measured) for measured in self.measurements.values()]
        least = sum(min(m.nbytes for m in measured.values()) for measured in self.measurements.values())
        if least > memory_budget:
            raise ValueError(
                f"fit: memory_budget must be at least {least}, what the cheapest formats take; got {memory_budget}"
            )
        costs = [[m.nbytes for m in measured.values()] for measured in self.measurements.values()]
        errors = [[m.gradient_error**2 for m in measured.values()] for measured in self.measurements.values()]
        picks = _knapsack(costs, errors, memory_budget)
        chosen = {t: f[i] for t, f, i in zip(self.measurements, formats, picks, strict=True)}
        overrides = tuple(
            Override(stored, kinds=(kind,), name=glob.escape(name)) for (name, kind), stored in chosen.items()
        )
        base = base or ActivationPolicy()
        return replace(base, overrides=(*base.overrides, *overrides))

    def _of(self, policy: ActivationPolicy, tensor: tuple[str, str]) -> Measurement:
        name, kind = tensor
        stored = policy.stored(kind, name)
        if stored not in self.measurements[tensor]:
            raise ValueError(f"calibration: {kind} of {name} must be in a measured format; got {stored}")
        return self.measurements[tensor][stored]

    def __str__(self) -> str:
        lines = [f"{'tensor':<48}" + "".join(f"{f.format:>16}" for f in self._formats())]
        for (name, kind), formats in self.measurements.items():
            cells = (f"{formats[f].gradient_error:>16.5f}" for f in self._formats())
            lines.append(f"{f'{name} {kind}':<48}" + "".join(cells))
        return "\n".join(lines)

    def _formats(self) -> list[TensorFormat]:
        return list(next(iter(self.measurements.values()), {}))


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    formats: Iterable[TensorFormat] = FORMATS,
    **options: Any,
) -> Calibration:
    """Measures each tensor's quantization error and what it does to the gradients; the model is left as it was.

    Args:
        model: one that `compress_activations` takes and has not converted.
        batches: each what `loss` takes.
        loss: scalar of (model, batch); by default `model(**batch).loss`.
        formats: the candidates.
        options: further arguments of `compress_activations`, such as `blocks`.

    Gradients that the parameters hold are kept; random state is the same for every pass.

    Raises:
        ValueError, TypeError: there is no batch, or the model cannot be converted.
    """
    batches, formats = list(batches), list(formats)
    if not batches or not formats:
        raise ValueError("calibrate: batches and formats must hold at least one each; got none")
    loss = loss or (lambda model, batch: model(**batch).loss)
    report = compress_activations(model, ActivationPolicy.uniform(formats[0]), **options)
    restore(model)
    tensors = [(name, kind) for name, kinds in report.converted.items() for kind in kinds.split(", ")]
    tensors = [(name, kind) for name, kind in tensors if kind in KINDS]
    exact = [_gradients(model, batch, loss) for batch in batches]
    scale = sum(float(g.square().sum()) for gradients in exact for g in gradients)
    calibration = Calibration()
    for name, kind in tensors:
        measured = {}
        for stored in formats:
            policy = ActivationPolicy(overrides=(Override(stored, (kind,), glob.escape(name)),))
            compress_activations(model, policy, **options)
            error, sums = 0.0, _Sums()
            try:
                with sums.recording():
                    for batch, expected in zip(batches, exact, strict=True):
                        got = _gradients(model, batch, loss)
                        error += sum(
                            float((g - e).square().sum()) for g, e in zip(got, expected, strict=True)
                        )
            finally:
                restore(model)
            measured[stored] = Measurement(
                tensor_error=(sums.error / sums.power) ** 0.5 if sums.power else 0.0,
                gradient_error=(error / scale) ** 0.5,
                nbytes=sums.nbytes // len(batches),
            )
        # What this policy alone does not store (a kind that only acts with another) has no bytes.
        if any(m.nbytes for m in measured.values()):
            calibration.measurements[name, kind] = measured
    return calibration


def _knapsack(costs: list[list[int]], errors: list[list[float]], budget: int) -> list[int]:
    """One choice for each item with the least sum of errors whose costs sum up to at most `budget`.

    Costs above the cheapest choices are counted in units of their greatest common divisor, or in coarser ones, rounded
    up, where the table would have more than `_MAX_CELLS` columns.
    """
    least = [min(choices) for choices in costs]
    extra = [[c - low for c in choices] for choices, low in zip(costs, least, strict=True)]
    room = budget - sum(least)
    unit = max(math.gcd(*(c for choices in extra for c in choices)), 1)
    unit = unit * -(-room // (unit * _MAX_CELLS)) if room else unit
    cells = room // unit + 1
    best = torch.zeros(cells, dtype=torch.float64)  # the least error that each amount of room allows so far
    picks = []
    for choices, losses in zip(extra, errors, strict=True):
        options = torch.full((len(choices), cells), float("inf"), dtype=torch.float64)
        for option, cost, loss in zip(options, choices, losses, strict=True):
            shift = -(-cost // unit)
            if shift < cells:
                option[shift:] = best[: cells - shift] + loss
        best, pick = options.min(0)
        picks.append(pick)
    chosen, place = [], cells - 1
    for pick, choices in zip(reversed(picks), reversed(extra), strict=True):
        chosen.append(int(pick[place]))
        place -= -(-choices[chosen[-1]] // unit)
    return chosen[::-1]


class _Sums:
    """Sums over everything that is encoded while `recording` is entered."""

    def __init__(self) -> None:
        self.error = self.power = 0.0
        self.nbytes = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        encode = Codec.encode

        def recorded(codec: Codec, x: Tensor) -> tuple[Tensor, Tensor]:
            packed, scales = encode(codec, x)
            back = codec.decode(packed, scales, x.shape, torch.float32)
            self.error += float((back - x).square().sum())
            self.power += float(x.float().square().sum())
            self.nbytes += packed.nbytes + scales.nbytes
            return packed, scales

        with patch.object(Codec, "encode", recorded):
            yield


def _gradients(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]) -> list[Tensor]:
    """The gradients of all parameters that have one; FP32."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        torch.manual_seed(0)
        gradients = torch.autograd.grad(loss(model, batch), parameters, allow_unused=True)
    return [g.float() for g in gradients if g is not None]
