"""Communication hooks for DistributedDataParallel: quantized, and unquantized with the same count of bytes."""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with types, not with strings.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import ops
from .collectives import Codec, ErrorFeedback, add_bytes_sent, all_reduce, mix_seed, plain_all_reduce_bytes


class _State:
    """What both states share: a process group, which does not travel when the state is pickled."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}


class QuantizedAllReduceState(_State):
    """State of `quantized_allreduce_hook`.

    Pickles without its process group: a loaded state uses the default group until `process_group` is set.

    Attributes:
        process_group: the group to average over; None is the default one.
        codec: how gradients are encoded on the wire.
        seed: for stochastic rounding, with `calls` mixed in, so that no two buckets share their noise.
        calls: buckets that this state has exchanged.
        backwards: backward passes whose buckets it has exchanged.
        feedback: by bucket, what its encodings have lost; None without error feedback. It begins with the second
            backward pass, since DDP cuts the buckets anew after the first.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        format: str = "int8",
        group_size: int = 128,
        scale_dtype: torch.dtype = torch.bfloat16,
        rounding: str = "nearest",
        seed: int | None = None,
        error_feedback: bool = False,
    ) -> None:
        """The options are `agoq_ext.all_reduce`'s, except that `seed` is an int; None: torch.initial_seed().

        `error_feedback` keeps what encodings lose and adds it to the next gradients, for 4 (1 + 1/W) bytes a parameter.

        Raises:
            ValueError: an option is not supported.
        """
        super().__init__(process_group)
        self.codec = Codec(format, group_size, scale_dtype, rounding)
        self.codec.check("QuantizedAllReduceState")
        self.seed = torch.initial_seed() if seed is None else seed
        ops.seed_tensor(
            "QuantizedAllReduceState", "stochastic", self.seed, torch.device("cpu")
        )  # checks its range
        self.calls = self.backwards = 0
        self.feedback: dict[int, ErrorFeedback] | None = {} if error_feedback else None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold for training to go on with the same bits; a DCP `Stateful`."""
        state: dict[str, Any] = {"calls": self.calls, "backwards": self.backwards}
        for index, feedback in (self.feedback or {}).items():
            state[f"feedback{index}"] = feedback.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, on the rank that it was made on."""
        self.calls, self.backwards = state["calls"], state["backwards"]
        if self.feedback is not None:
            self.feedback.clear()
            for name, saved in state.items():
                if name.startswith("feedback"):
                    feedback = self.feedback[int(name.removeprefix("feedback"))] = ErrorFeedback()
                    feedback.load_state_dict(saved)


def quantized_allreduce_hook(
    state: QuantizedAllReduceState, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Averages a bucket of gradients with `agoq_ext.all_reduce`, in place, while backward goes on.

    Register it with `model.register_comm_hook(state, quantized_allreduce_hook)`, or with `register`.
    """
    buffer, codec = bucket.buffer(), state.codec
    seed = ops.seed_tensor("quantized_allreduce_hook", codec.rounding, state.seed, buffer.device)
    if seed is not None:
        seed = mix_seed(seed, state.calls)
    state.calls += 1
    feedback = None
    if state.feedback is not None and state.backwards:
        feedback = state.feedback.setdefault(bucket.index(), ErrorFeedback())
    state.backwards += bucket.is_last()
    work = all_reduce(
        buffer,
        "avg",
        state.process_group,
        codec.format,
        codec.group_size,
        codec.scale_dtype,
        codec.rounding,
        seed,
        async_op=True,
        feedback=feedback,
    )
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


class PlainAllReduceState(_State):
    """State of `plain_allreduce_hook`; pickles like `QuantizedAllReduceState`.

    Attributes:
        process_group: the group to average over; None is the default one.
        dtype: what travels, e.g. torch.bfloat16; None is the bucket's own dtype.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(process_group)
        self.dtype = dtype


def plain_allreduce_hook(state: PlainAllReduceState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Averages a bucket with torch.distributed.all_reduce, and counts its bytes: the baseline of a comparison.

    Divides first and sums in the dtype that travels, as torch's allreduce_hook and bf16_compress_hook do. What it
    adds to `collectives.bytes_sent` is `collectives.plain_all_reduce_bytes`, a convention.
    """
    buffer = bucket.buffer()
    group = dist.group.WORLD if state.process_group is None else state.process_group
    assert group is not None
    payload = buffer if state.dtype is None else buffer.to(state.dtype)
    payload.div_(group.size())
    add_bytes_sent(plain_all_reduce_bytes(payload.nbytes, group.size()), group)

    def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        value = future.value()[0]
        if value is not buffer and value.data_ptr() != buffer.data_ptr():
            buffer.copy_(value)
        return buffer

    work = dist.all_reduce(payload, group=group, async_op=True)
    return work.get_future().then(finish)


def register(model: torch.nn.parallel.DistributedDataParallel, **options: Any) -> QuantizedAllReduceState:
    """Makes a DistributedDataParallel model average its gradients in a quantized format.

    Args:
        model: without a communication hook so far.
        options: format, group_size, scale_dtype, rounding, seed, error_feedback of `QuantizedAllReduceState`.

    Returns:
        The state, over the model's own process group.
    """
    state = QuantizedAllReduceState(model.process_group, **options)
    model.register_comm_hook(state, quantized_allreduce_hook)
    return state
