"""Streaming DiLoCo around an inner training loop: outer gradients, their exchange in the background, outer steps.

After arXiv 2501.18512, algorithm 2. docs/diloco.md is the guide.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import collectives
from ..collectives import Codec
from ..collectives.channel import Channel, channel_of, resolve_group
from ..collectives.transport import Transport, exchanges_on_device
from . import schedule as schedules
from .exchange import GATHER_UP_TO, mean_over_replicas
from .fragment import Fragment, OuterOptimizer, local, names_digest
from .schedule import Fragments, Schedule
from .transfers import Transfer, peak_bandwidth

NAME = "StreamingDiLoCo"
_MAX_TRANSFERS = 100_000


def default_outer_optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum 0.9 and learning rate 0.4, the paper's at all scales."""
    return torch.optim.SGD(parameters, lr=0.4, momentum=0.9, nesterov=True)


@dataclass
class Saved:
    """A replica's state inside a checkpoint: one opaque object, since what is in flight differs from step to step."""

    content: dict[str, Any]


class StreamingDiLoCo:
    """Replicas that train apart and synchronize one fragment of the model at a time, rarely and in the background.

    Call `step()` after every step of the inner optimizer, or train inside `with diloco:`, which does so by a hook.
    Construction is a collective of the group: options are compared, and the first replica's parameters and buffers
    become everyone's.

    After a failure (a replica died) `step` raises, the parameters and the optimizer are as the inner step left them,
    and `state_dict` still works; that checkpoint is `interrupted`, and a run that loads it calls `step` first.

    Args:
        model: may itself be DDP's or FSDP2's over other groups; this rank's own part of a DTensor is exchanged with
            the ranks of `group`, which must hold the same part.
        inner_optimizer: its gradients are averaged during the warm-up. Not otherwise touched.
        outer_optimizer: makes the optimizer of a list of one flat FP32 tensor, called once for each fragment; it
            must work element by element. None: SGD, lr 0.4, Nesterov momentum 0.9.
        sync_every: H, inner steps between two exchanges of a fragment.
        fragments: a `Fragments` rule, a number (1: the whole model), or lists of parameter names; see
            `schedule.split`. None: `Fragments()`, three layers each, strided.
        overlap: tau, inner steps between an exchange's start and its application; 0 <= tau < H.
        mixing: alpha, the weight of the local parameters when the outer ones are applied; 0 <= alpha <= 1.
        warmup_steps: first train that many steps data parallel: gradients are averaged in FP32 before each inner
            step (or where you call `average_gradients`, before clipping them, say).
        format, group_size, scale_dtype: of the exchange; "float32" and "bfloat16" send values.
        group: the replicas' process group; None is the default group.
        outer_device: where outer parameters and momentum live: "cpu", another device, or None for the parameters'.
        error_feedback: add what an encoding lost to the fragment's next outer gradient.
        early: a fragment may be exchanged before it has run H steps.
        gather_up_to: up to this many replicas, every outer gradient is gathered; more use an all-to-all and an int8
            return.

    Attributes:
        replicas: their number.
        schedule: what is exchanged when.
        fragments: the state of each.
        start_up_bytes: that this replica has sent in the start-up broadcast.
        warmup_bytes: that it has sent to average gradients.
        bytes_sent: that it has sent for outer gradients.
        blocked_seconds: that the training thread has waited for exchanges.

    Raises:
        ValueError, TypeError: an argument is not one of the above.
        Disagreement: the replicas' options or parameters differ; raised on all of them.
        RuntimeError: a peer has died or does not answer within the group's timeout.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: OuterOptimizer | None = None,
        *,
        sync_every: int,
        fragments: Fragments | int | Sequence[Sequence[str]] | None = None,
        overlap: int = 0,
        mixing: float = 0.0,
        warmup_steps: int = 0,
        format: str = "fp4_e3m0",
        group_size: int = 128,
        scale_dtype: torch.dtype = torch.bfloat16,
        group: dist.ProcessGroup | None = None,
        outer_device: torch.device | str | None = "cpu",
        error_feedback: bool = False,
        early: bool = False,
        gather_up_to: int = GATHER_UP_TO,
    ) -> None:
        if not hasattr(inner_optimizer, "register_step_pre_hook"):
            kind = type(inner_optimizer).__name__
            raise TypeError(f"{NAME}: inner_optimizer must be a torch.optim.Optimizer; got {kind}")
        if not 0 <= mixing <= 1:
            raise ValueError(f"{NAME}: mixing must be between 0 and 1; got {mixing}")
        self._codec = Codec(format, group_size, scale_dtype)
        self._codec.check(NAME)
        self._mixing, self._model, self._inner = mixing, model, inner_optimizer
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        rule = Fragments() if fragments is None else fragments
        parts = schedules.split({name: p.numel() for name, p in trained.items()}, rule)
        self.schedule = Schedule(sync_every, len(parts), overlap, warmup_steps, early)
        self._group: dist.ProcessGroup | None = None
        if group is not None or dist.is_initialized():
            self._group = resolve_group(NAME, group)
        self.replicas = self._group.size() if self._group is not None else 1
        self._gather = self.replicas <= gather_up_to
        device = torch.device(outer_device) if outer_device is not None else None
        self.fragments = [Fragment(part, [trained[n] for n in part], group_size, device) for part in parts]
        self._trained = list(trained.values())
        self._step = 0
        self._interrupted = self._loaded = self._averaged = False
        self._hooks: list[Any] = []
        self.start_up_bytes = self.warmup_bytes = self.bytes_sent = 0
        self.blocked_seconds = 0.0
        self._transfers: deque[Transfer] = deque(maxlen=_MAX_TRANSFERS)
        self._channel: Channel | None = None
        if self.replicas > 1 and self._group is not None:
            self._channel = channel_of(self._group)
            plan = self.schedule
            self._agree(
                f"H={plan.sync_every} fragments={len(self.fragments)} (names {names_digest(self.fragments)}) "
                f"overlap={plan.overlap} mixing={mixing:g} warmup={plan.warmup_steps} early={plan.early} "
                f"{self._codec} feedback={error_feedback} gather={self._gather}"
            )
            self._broadcast()
        factory = outer_optimizer or default_outer_optimizer
        for fragment in self.fragments:
            fragment.adopt()
            fragment.make_optimizer(factory)
            if error_feedback:
                shape = torch.zeros(fragment.numel, device=self._exchange_device(fragment))
                fragment.residual = shape
        if warmup_steps and self.replicas > 1:
            inner_optimizer.register_step_pre_hook(self._before_inner_step)

    # --- set-up ---

    def _agree(self, options: str) -> None:
        assert self._channel is not None and self._group is not None
        channel, token = self._channel, torch.empty(0, device=self._token_device())

        def body(*transports: Transport) -> None:
            channel.agree(transports, NAME, f"{NAME} {options}")

        channel.run_now(NAME, body, [token], [self._group])

    def _token_device(self) -> torch.device:
        return self._exchange_device(self.fragments[0]) if self.fragments else torch.device("cpu")

    def _broadcast(self) -> None:
        """The first replica's parameters, frozen ones too, and buffers, to all; unquantized."""
        assert self._group is not None
        source = dist.get_global_rank(self._group, 0)
        sent = 0
        for tensor in [*self._model.parameters(), *self._model.buffers()]:
            own = local(tensor)
            if own.numel():
                raw = own.contiguous().view(-1).view(torch.uint8)  # Gloo does not know every dtype
                dist.broadcast(raw, source, group=self._group)
                own.copy_(raw.view(own.dtype).view(own.shape))
                sent += raw.nbytes
        if self._group.rank() == 0:
            self.start_up_bytes = sent * (self.replicas - 1)

    def _exchange_device(self, fragment: Fragment) -> torch.device:
        if self._group is not None and exchanges_on_device(self._group, fragment.device):
            return fragment.device
        return torch.device("cpu")

    # --- training ---

    @property
    def steps_done(self) -> int:
        """Inner steps seen so far."""
        return self._step

    @property
    def interrupted(self) -> bool:
        """`step` has raised (perhaps before the checkpoint that was loaded) and must be called again."""
        return self._interrupted

    def step(self) -> None:
        """What follows an inner step: starts the exchanges that are due, applies those that are to finish.

        Waits for the latter alone.

        Raises:
            RuntimeError: an exchange failed. Nothing has been applied.
        """
        step = self._step + 1
        interrupted, self._interrupted = self._interrupted, True
        self._resume(interrupted)
        if step <= self.schedule.warmup_steps:
            self._averaged = False
            if step == self.schedule.warmup_steps:
                for fragment in self.fragments:
                    fragment.adopt()
        else:
            for index in self.schedule.starts(step):
                if not self.fragments[index].in_flight:
                    self._start(index)
            finishing = [self.fragments[index] for index in self.schedule.finishes(step)]
            self._wait(finishing)
            for fragment in finishing:
                self._finish(fragment)
        self._step, self._interrupted = step, False

    def _start(self, index: int) -> None:
        fragment = self.fragments[index]
        value = fragment.outer_gradient(self._exchange_device(fragment))
        if fragment.residual is not None:
            value += fragment.residual
        fragment.value = value
        self._send(index)

    def _send(self, index: int) -> None:
        """Puts the fragment's value in flight."""
        fragment = self.fragments[index]
        value = fragment.value
        assert value is not None
        if (
            self._channel is None or self._group is None
        ):  # the mean of one replica is its own value, unencoded
            fragment.mean = value
            fragment.left = None if fragment.residual is None else torch.zeros_like(value)
            return
        mean = torch.empty_like(value)
        left = None if fragment.residual is None else torch.empty_like(value)
        body = partial(self._exchange, index, value, mean, left)
        written = [mean] if left is None else [mean, left]
        fragment.work = self._channel.run(NAME, body, written, [self._group], [value])
        fragment.mean, fragment.left = mean, left

    def _exchange(
        self, index: int, value: Tensor, mean: Tensor, left: Tensor | None, transport: Transport
    ) -> None:
        """Runs in the background where messages go through the host."""
        assert self._channel is not None
        began, before = time.monotonic(), self._channel.bytes_sent
        self._channel.agree([transport], NAME, f"{NAME} fragment={index} numel={value.numel()} {self._codec}")
        mean_over_replicas(transport, value, mean, left, self._codec, self._gather)
        sent = self._channel.bytes_sent - before
        self.bytes_sent += sent
        self._transfers.append(Transfer(began, time.monotonic(), sent))

    def _wait(self, fragments: Sequence[Fragment]) -> None:
        began = time.monotonic()
        try:
            for fragment in fragments:
                if fragment.work is not None:
                    fragment.work.wait()
        finally:
            self.blocked_seconds += time.monotonic() - began

    def _finish(self, fragment: Fragment) -> None:
        if fragment.mean is None:
            # Loaded from a checkpoint of a schedule that it does not belong to.
            raise RuntimeError(f"{NAME}: a fragment is due that was never started")
        fragment.apply(fragment.mean, self._mixing)
        if fragment.residual is not None and fragment.left is not None:
            fragment.residual = fragment.left
        fragment.clear()

    def average_gradients(self) -> None:
        """During the warm-up: replaces the gradients by their FP32 mean over the replicas, once a step.

        Happens by itself before the inner optimizer's step. Call it before anything that reads the gradients.
        """
        if self._step >= self.schedule.warmup_steps or self._averaged or self._channel is None:
            return
        gradients = [local(p.grad) for p in self._trained if p.grad is not None]
        began, before = time.monotonic(), self._channel.bytes_sent
        collectives.all_reduce(gradients, "avg", self._group, format="float32")
        ended, sent = time.monotonic(), self._channel.bytes_sent - before
        self._transfers.append(Transfer(began, ended, sent, warmup=True))
        self.blocked_seconds += ended - began
        self.warmup_bytes += sent
        self._averaged = True

    def _before_inner_step(self, *_: Any) -> None:
        self.average_gradients()

    def __enter__(self) -> StreamingDiLoCo:
        after: Callable[..., None] = lambda *_: self.step()  # noqa: E731
        self._hooks.append(self._inner.register_step_post_hook(after))
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.pop().remove()

    @contextlib.contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Puts the outer parameters in the model's place, to be evaluated or saved; bit-identical on all replicas.

        The local ones return at the end. During the warm-up both are the same. Takes a copy of the parameters.
        """
        if self._step <= self.schedule.warmup_steps and self._step:
            yield
            return
        kept = [fragment.backup() for fragment in self.fragments]
        for fragment in self.fragments:
            fragment.unpack(fragment.outer.detach())
        try:
            yield
        finally:
            for fragment, values in zip(self.fragments, kept, strict=True):
                fragment.restore(values)

    # --- figures ---

    @property
    def transfers(self) -> list[Transfer]:
        """The exchanges so far, the start-up broadcast left out; the newest 100000."""
        return list(self._transfers)

    def peak_bandwidth(self, window: float = 1.0) -> float:
        """The most bytes a second that this replica has sent over any `window` seconds after the warm-up.

        An exchange's bytes count as spread evenly over its duration.
        """
        return peak_bandwidth(self.transfers, window)

    # --- saving ---

    def state_dict(self) -> dict[str, Any]:
        """The state of this replica, under a name that no other rank uses. A collective: waits for what is in flight.

        Save the model and the inner optimizer beside it.
        """
        for fragment in self.fragments:
            with contextlib.suppress(RuntimeError):  # then what was sent is saved, to be sent again
                self._wait([fragment])
        content = {
            "step": self._step,
            "interrupted": self._interrupted,
            "warmup_bytes": self.warmup_bytes,
            "bytes_sent": self.bytes_sent,
            "start_up_bytes": self.start_up_bytes,
            "blocked_seconds": self.blocked_seconds,
            "fragments": [fragment.state() for fragment in self.fragments],
        }
        return {f"rank{self._rank()}": Saved(content)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was saved, between a fragment's start and finish too.

        Raises:
            ValueError: it holds nothing of this rank, or another model's or schedule's state.
        """
        saved = state.get(f"rank{self._rank()}")
        if not isinstance(saved, Saved):
            raise ValueError(f"{NAME}: the state holds nothing for rank {self._rank()}")
        parts = saved.content["fragments"]
        found, own = [p["outer"].numel() for p in parts], [f.numel for f in self.fragments]
        if found != own:
            raise ValueError(f"{NAME}: the state must have fragments of {own} elements; got {found}")
        for fragment, part in zip(self.fragments, parts, strict=True):
            fragment.load(part, self._exchange_device(fragment))
        self._step, self._interrupted = saved.content["step"], saved.content["interrupted"]
        for name in ("warmup_bytes", "bytes_sent", "start_up_bytes", "blocked_seconds"):
            setattr(self, name, saved.content[name])
        self._loaded = True

    def _resume(self, interrupted: bool) -> None:
        """After loading: makes sure that all replicas are at one step, and sends again what did not arrive."""
        if not self._loaded:
            return
        unsent = [index for index, fragment in enumerate(self.fragments) if fragment.unsent]
        if self._channel is not None:
            self._agree(f"resumes after step={self._step} interrupted={interrupted} unsent={unsent}")
        for index in unsent:
            self._send(index)
        self._loaded = False

    def _rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0
