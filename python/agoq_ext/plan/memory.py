"""The memory of a whole training step, on one device or a pipeline.

What autograd keeps is exact (`operators`). The rest follows from the number of parameters. Not counted are what the
allocator wastes, temporaries of single operators, and autocast's weight copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ..activation.policy import ActivationPolicy
from ..errors import UserError
from ..head import block_rows
from ..pipeline import FORMULAS, stage_bits, stored_microbatches
from .operators import layer_bytes, outside_bytes
from .shapes import ModelShape

# Optimizer states of the parameters' own size.
OPTIMIZERS = {"adamw": 2, "sgd": 1, "none": 0}
_BF16, _FP32 = 2, 4


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one training step.

    Attributes:
        layer: by operator, of one layer; the second, or the only one.
        activations: by operator, of the whole model.
        weights, gradients, optimizer: of the parameters.
        logits: in BF16 and their FP32 copy; the log-softmax that is kept is in `activations`, under "loss". With the
            chunked loss what exists of them at a time.
        unit_bytes: U = batch x seq x hidden x 2.
    """

    layer: dict[str, int]
    activations: dict[str, int]
    weights: int
    gradients: int
    optimizer: int
    logits: int
    unit_bytes: int

    @property
    def activation_bytes(self) -> int:
        return sum(self.activations.values())

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.logits + self.activation_bytes


def plan_memory(
    shape: ModelShape,
    batch: int,
    seq: int,
    policy: ActivationPolicy,
    precision: str = "bf16",
    optimizer: str = "adamw",
    chunked_loss: bool = False,
) -> MemoryPlan:
    """What one device keeps that trains the whole model.

    Args:
        batch, seq: sequences of one step, and tokens of each.
        precision: "bf16" for a BF16 model, "autocast" for FP32 parameters under BF16 autocast.
        optimizer: "adamw", "sgd" (with momentum) or "none".
        chunked_loss: as in `compress_activations`.
    """
    activations: Counter[str] = Counter()
    for index in range(shape.layers):
        activations.update(layer_bytes(shape, batch, seq, policy, index, precision))
    activations.update(outside_bytes(shape, batch, seq, policy, precision, chunked_loss))
    weights = shape.parameters * _parameter_bytes(precision)
    return MemoryPlan(
        layer=layer_bytes(shape, batch, seq, policy, min(1, shape.layers - 1), precision),
        activations=dict(activations),
        weights=weights,
        gradients=weights,
        optimizer=OPTIMIZERS[optimizer] * weights,
        logits=_logits(batch * seq, shape, chunked_loss),
        unit_bytes=batch * seq * shape.hidden * _BF16,
    )


def largest_batch(fits: Callable[[int], bool]) -> int:
    """The largest batch for which `fits` holds, 0 if it holds for none; what fits must fit for every smaller one."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# --- pipelines -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PipelinePlan:
    """One rank of a pipeline.

    Attributes:
        stored: micro-batches of one chunk that it stores at once. bits: the least width of its codes; 0 without codes.
        activations: bytes of all of them, with what the embedding or the head on it keeps.
        weights: bytes of its parameters; the gradients take as much.
        optimizer: bytes. logits: bytes, on the last rank.
    """

    stored: int
    bits: int
    activations: int
    weights: int
    optimizer: int
    logits: int

    @property
    def total(self) -> int:
        return 2 * self.weights + self.optimizer + self.logits + self.activations


def read_pipeline(text: str) -> tuple[str, int, int, int]:
    """(schedule, stages, chunks, micro-batches) of "schedule:stages[:chunks]:microbatches".

    Raises:
        UserError: it has another form.
    """
    name, *numbers = text.split(":")
    if len(numbers) not in (2, 3) or not all(n.isdigit() and int(n) > 0 for n in numbers):
        raise UserError(
            "plan: --pipeline must be SCHEDULE:STAGES[:CHUNKS]:MICROBATCHES with a schedule of "
            f"{', '.join(FORMULAS)} or torch.distributed.pipelining; got {text!r}"
        )
    values = [int(n) for n in numbers]
    return name, values[0], values[1] if len(values) == 3 else 1, values[-1]


def plan_pipeline(
    shape: ModelShape,
    batch: int,
    seq: int,
    policy: ActivationPolicy,
    pipeline: tuple[str, int, int, int],
    precision: str = "bf16",
    optimizer: str = "adamw",
    rounding: str = "down",
    chunked_loss: bool = False,
) -> list[PipelinePlan]:
    """What each rank of a pipeline keeps, with the widths that `pipeline.compress_stages` would choose.

    The layers are cut evenly; the first rank also holds the embedding, the last one norm and head. The head's part
    is held for one micro-batch, or all of them in GPipe: its backward follows its forward.

    Args:
        batch: sequences of one micro-batch.

    Raises:
        UserError: the layers cannot be cut evenly, or the schedule does not take these numbers.
    """
    schedule, stages, chunks, microbatches = pipeline
    if shape.layers % (stages * chunks):
        raise UserError(
            f"plan: --pipeline must cut {shape.layers} layers evenly; got {stages} stages of {chunks} chunks"
        )
    try:
        stored = stored_microbatches(schedule, stages, chunks, microbatches)
    except ValueError as error:
        raise UserError(f"plan: --pipeline: {error}") from error
    stores = policy != ActivationPolicy()
    bits = stage_bits(stored, base_bits=policy.min_bits, rounding=rounding)
    per_chunk = shape.layers // (stages * chunks)
    size = _parameter_bytes(precision)
    plans = []
    for rank in range(stages):
        widened = policy.widened(bits[rank])
        # Layer indices count within a chunk, as they do for a stage that is converted by itself.
        chunk = sum(
            sum(layer_bytes(shape, batch, seq, widened, i, precision).values()) for i in range(per_chunk)
        )
        outside = outside_bytes(shape, batch, seq, widened, precision, chunked_loss)
        activations = stored[rank] * (chunk + outside["rotary tables"])
        parameters = chunks * per_chunk * shape.layer_parameters
        logits = 0
        if rank == 0:
            activations += stored[rank] * outside["embedding"]
            parameters += shape.embedding_parameters
        if rank == stages - 1:
            heads = microbatches if schedule.lower() == "gpipe" else 1
            activations += heads * sum(outside.get(part, 0) for part in ("norm", "head", "loss"))
            parameters += shape.embedding_parameters + shape.hidden
            logits = _logits(batch * seq, shape, chunked_loss)
        weights = parameters * size
        plans.append(
            PipelinePlan(
                stored[rank],
                bits[rank] if stores else 0,
                activations,
                weights,
                OPTIMIZERS[optimizer] * weights,
                logits,
            )
        )
    return plans


def _logits(tokens: int, shape: ModelShape, chunked_loss: bool) -> int:
    """The logits in BF16 and FP32, or of one block of the vocabulary the FP32 logits and their gradient."""
    if not chunked_loss:
        return tokens * shape.vocabulary * (_BF16 + _FP32)
    return 2 * tokens * block_rows(tokens, shape.vocabulary) * _FP32


def _parameter_bytes(precision: str) -> int:
    return _BF16 if precision == "bf16" else _FP32
