"""Pipeline stages that hold fewer micro-batches store them in wider codes (AGoQ, arXiv 2605.00539, DBCA-PP).

In a pipeline the first stage keeps the most micro-batches in flight, so its activations decide how much memory every
device must have. A stage that keeps N_r of them where the first keeps N_0 may use codes of 4 N_0 / N_r bits in the
same memory. Stages are counted from 0, p of them with v chunks each, for m micro-batches:

    GPipe              N_r = m
    1F1B               N_r = min(p - r, m)
    interleaved 1F1B   N_r = min(2 (p - r - 1) + (v - 1) p + 1, v m), in micro-batches of one chunk

Any schedule of `torch.distributed.pipelining` is counted by walking through its actions. A micro-batch counts from its
forward to the backward that frees it: the full one, or the one of the weights where the schedule splits the two.

The paper rounds the width to the nearest code, which lets a stage take up to 9/44 more than the first one; the default
here rounds down. The supported widths are 4, 5, 6 and 8 bits, and codes of 5 and 6 bits take no more than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .activation import ActivationPolicy, ConversionReport, activation_report, compress_activations, restore
from .activation.policy import resolve_policy

WIDTHS = (4, 5, 6, 8)
ROUNDINGS = ("down", "nearest")
FORMULAS = ("gpipe", "1f1b", "interleaved_1f1b")

# The actions of torch's schedules that create and free stored activations, by the letter they are printed with.
_FORWARD, _FREEING = "F", ("B", "W")


# --- how many micro-batches ----------------------------------------------------------------------------------


def stored_microbatches(
    schedule: Any, stages: int | None = None, chunks: int = 1, microbatches: int | None = None
) -> list[int]:
    """The most micro-batches that each stage keeps for backward at once, first stage first.

    With several chunks a stage's micro-batch is that of one chunk, 1 / chunks of the stage's layers.

    Args:
        schedule: "gpipe", "1f1b" or "interleaved_1f1b", for the formulas of this module; the name of a schedule of
            torch.distributed.pipelining ("ZBVZeroBubble", ...) or its class, whose actions are counted; or a
            schedule object, which brings the other arguments with it.
        stages: ranks of the pipeline. chunks: stages of the model on each rank. microbatches: of one step.

    Raises:
        ValueError: an argument does not fit the schedule.
    """
    op = "stored_microbatches"
    if not isinstance(schedule, (str, type)):
        return [peak_in_flight(actions) for actions in actions_of(schedule)]
    if stages is None or microbatches is None:
        raise ValueError(f"{op}: stages and microbatches must be given with the name of a schedule; got None")
    for name, value in (("stages", stages), ("chunks", chunks), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{op}: {name} must be at least 1; got {value}")
    if schedule not in FORMULAS:
        counted = _torch_schedule(op, schedule, stages, chunks, microbatches)
        return [peak_in_flight(actions) for actions in actions_of(counted)]
    if schedule != "interleaved_1f1b" and chunks != 1:
        raise ValueError(f"{op}: chunks must be 1 for {schedule}; got {chunks}")
    if schedule == "gpipe":
        return [microbatches] * stages
    if schedule == "1f1b":
        return [min(stages - r, microbatches) for r in range(stages)]
    ahead = (chunks - 1) * stages + 1
    return [min(2 * (stages - r - 1) + ahead, chunks * microbatches) for r in range(stages)]


def actions_of(schedule: Any) -> list[list[tuple[int, str]]]:
    """The computations of a schedule of torch.distributed.pipelining, (model stage, "F", "B", "I" or "W"), by rank.

    Raises:
        TypeError: the object is no such schedule, or does not tell its order.
    """
    order = getattr(schedule, "pipeline_order", None)
    if not order:
        raise TypeError(
            "pipeline: schedule must be one of torch.distributed.pipelining that tells its order; "
            f"got {type(schedule).__name__}"
        )
    return [list(_computations(order[rank])) for rank in sorted(order)]


def peak_in_flight(actions: Iterable[tuple[int, str]], cost: Mapping[int, int] | None = None) -> int:
    """The most that is stored at once on a rank: micro-batches, or the sum of `cost` by model stage."""
    live = peak = 0
    for stage, kind in actions:
        amount = 1 if cost is None else cost[stage]
        if kind == _FORWARD:
            live += amount
            peak = max(peak, live)
        elif kind in _FREEING:
            live -= amount
    return peak


def _computations(actions: Iterable[Any]) -> Iterator[tuple[int, str]]:
    for action in actions:
        if action is None:
            continue
        if getattr(action, "sub_actions", None):  # a forward overlapped with a backward
            yield from _computations(action.sub_actions)
        else:
            yield action.stage_index, action.computation_type.value


def _torch_schedule(op: str, schedule: str | type, stages: int, chunks: int, microbatches: int) -> Any:
    """A schedule object over stages that hold no model: good for its order alone."""
    from torch.distributed.pipelining import schedules

    cls: Any = schedule
    if isinstance(schedule, str):
        try:
            cls = schedules.get_schedule_class(schedule)
        except ValueError as error:
            raise ValueError(
                f"{op}: schedule must be one of {', '.join(FORMULAS)} or of torch.distributed.pipelining; {error}"
            ) from None

    def stage(index: int) -> SimpleNamespace:
        return SimpleNamespace(
            num_stages=stages * chunks,
            group_size=stages,
            group_rank=0,
            stage_index=index,
            is_first=index == 0,
            is_last=index == stages * chunks - 1,
            has_backward=True,
            submod=nn.Identity(),
            stage_index_to_group_rank={},
        )

    if issubclass(cls, schedules.PipelineScheduleSingle):
        if chunks != 1:
            raise ValueError(f"{op}: chunks must be 1 for {cls.__name__}; got {chunks}")
        return cls(stage(0), microbatches)
    return cls([stage(i * stages) for i in range(chunks)], microbatches)


# --- how many bits -------------------------------------------------------------------------------------------


def stage_bits(stored: Sequence[int], *, base_bits: int = 4, rounding: str = "down") -> list[int]:
    """The width of the codes of each stage, from the micro-batches that each stores.

    Args:
        stored: what `stored_microbatches` returns; the largest is the stage that has `base_bits`.
        base_bits: 4, 5, 6 or 8.
        rounding: "down" to a supported width, so that no stage needs more than the fullest one; or "nearest", as the
            paper reports it (4, 5, 6, 8 for 11, 9, 7, 5 micro-batches), where a stage may.

    Raises:
        ValueError: an argument is none of these.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"stage_bits: rounding must be 'down' or 'nearest'; got {rounding!r}")
    if base_bits not in WIDTHS:
        raise ValueError(f"stage_bits: base_bits must be one of 4, 5, 6, 8; got {base_bits!r}")
    if not stored or min(stored) < 1:
        raise ValueError(f"stage_bits: stored must hold at least one micro-batch a stage; got {list(stored)}")
    fullest = max(stored)
    widths = [w for w in WIDTHS if w >= base_bits]
    if rounding == "down":
        # In integers: w / base_bits <= fullest / n.
        return [max(w for w in widths if w * n <= base_bits * fullest) for n in stored]
    return [min(widths, key=lambda w: (abs(w - base_bits * fullest / n), w)) for n in stored]


def fitting_bits(
    actions: Iterable[tuple[int, str]], cost: Mapping[int, Mapping[int, int]], free_bytes: int
) -> int:
    """The widest code with which a rank's activations fit into `free_bytes`; the narrowest if none does.

    Args:
        actions: of one rank, from `actions_of`.
        cost: by width, bytes that one micro-batch keeps by model stage.
    """
    actions = list(actions)
    fitting = [w for w in sorted(cost) if peak_in_flight(actions, cost[w]) <= free_bytes]
    return fitting[-1] if fitting else min(cost)


def free_memory(device: torch.device | str | int | None = None) -> int:
    """Bytes that this process can still allocate: free on the CUDA device and cached by PyTorch, or free in RAM."""
    device = torch.device("cpu" if device is None else device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("free_memory: /proc/meminfo must tell MemAvailable; it does not")


# --- a pipeline's stages -------------------------------------------------------------------------------------


@dataclass
class StageReport:
    """What `compress_stages` did on this rank.

    Attributes:
        rank: in the pipeline. bits: this rank's width.
        stored: micro-batches that each rank stores at once.
        peak_bytes: of activations at that width, where a width was fitted to memory; else None.
        free_bytes: what they had to fit into; None where widths follow from `stored`.
        conversions: one report for each model stage of this rank.
    """

    rank: int
    bits: int
    stored: list[int]
    peak_bytes: int | None = None
    free_bytes: int | None = None
    conversions: list[ConversionReport] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """False if even the narrowest code exceeds the memory."""
        return self.peak_bytes is None or self.free_bytes is None or self.peak_bytes <= self.free_bytes


def compress_stages(
    schedule: Any,
    policy: str | ActivationPolicy = "agoq",
    *,
    rounding: str = "down",
    inputs: Sequence[Any] | None = None,
    free_bytes: int | None = None,
) -> StageReport:
    """Converts the model stages that a pipeline schedule holds on this rank, in codes as wide as its place allows.

    Every rank calls it with its own schedule object; nothing is exchanged. Without `inputs` the width is
    `stage_bits` of the schedule's counted micro-batches, from the fewest bits that the policy has. A format with
    fewer bits than the width is replaced by the integer code that has them, any other stays: each format grows by
    N_0 / N_r at most, so that no stage needs more than the fullest one.

    Args:
        schedule: of torch.distributed.pipelining, before its first step.
        policy: what the fullest stage stores, see `compress_activations`.
        rounding: see `stage_bits`.
        inputs: one micro-batch's arguments for each model stage of this rank (a tuple, a dict or one argument).
            With them the bytes of each width are measured, and the widest that fits into the memory is taken.
        free_bytes: that memory; by default what `free_memory` finds on the stage's device at the call.

    Raises:
        ValueError, TypeError: an argument is none of these, or a stage cannot be converted.
    """
    policy = resolve_policy("compress_stages", policy)
    actions = actions_of(schedule)
    stored = [peak_in_flight(a) for a in actions]
    model_stages = list(getattr(schedule, "_stages", None) or [schedule._stage])
    rank = model_stages[0].group_rank
    report = StageReport(rank, 0, stored)
    if inputs is None:
        if free_bytes is not None:
            raise ValueError("compress_stages: inputs must be given with free_bytes; got None")
        report.bits = stage_bits(stored, base_bits=policy.min_bits, rounding=rounding)[rank]
    else:
        if len(inputs) != len(model_stages):
            raise ValueError(
                f"compress_stages: inputs must hold one entry for each of {len(model_stages)} model stages; "
                f"got {len(inputs)}"
            )
        device = next((p.device for s in model_stages for p in s.submod.parameters()), None)
        report.free_bytes = free_memory(device) if free_bytes is None else free_bytes
        cost: dict[int, Counter[int]] = {w: Counter() for w in WIDTHS}
        for stage, given in zip(model_stages, inputs, strict=True):
            for width in WIDTHS:
                compress_activations(stage.submod, policy.widened(width))
                try:
                    cost[width][stage.stage_index] = activation_report(stage.submod, given).total_bytes
                finally:
                    restore(stage.submod)
        report.bits = fitting_bits(actions[rank], cost, report.free_bytes)
        report.peak_bytes = peak_in_flight(actions[rank], cost[report.bits])
    for stage in model_stages:
        report.conversions.append(compress_activations(stage.submod, policy.widened(report.bits)))
    return report
