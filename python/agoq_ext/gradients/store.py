"""GradientStore: gradients of a model as 8-bit codes, from backward to the optimizer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import ops
from ..collectives import Codec, mix_seed
from ..collectives.call import PHASE_REDUCED, PHASE_SEND
from . import checks, scaling, shards, state
from .buckets import Bucket, Entry, make_buckets
from .optimizers import check_optimizer, step_in_parts
from .reduction import Reduction
from .sink import GradientSink

BUCKET_BYTES = 4 * 2**20


@dataclass(frozen=True)
class StepResult:
    """What `GradientStore.step` did.

    Attributes:
        norm: the 2-norm of the mean gradient, unscaled, before clipping; NaN or Inf if it is not finite.
        stepped: whether the optimizer was stepped: not if a gradient is not finite.
    """

    norm: float
    stepped: bool


class GradientStore:
    """Keeps the gradients of `model` as codes, exchanges them as codes, and steps an optimizer from them.

        store = agoq_ext.GradientStore(model)
        for batch in batches:
            for micro_batch in batch[:-1]:
                with store.no_sync():
                    loss(model, micro_batch).backward()
            loss(model, batch[-1]).backward()      # its gradients complete the mean, which is exchanged meanwhile
            store.step(optimizer, max_norm=1.0)

    Each gradient is added to its codes (decoded, added in FP32, encoded, in one pass) when backward has made it, and
    freed at once. The buckets' codes are exchanged as they are: all-to-all, FP32 sum in rank order, encoded once more,
    all-gather (AGoQ, arXiv 2605.00539, QuanGrad). All ranks decode the same bytes. `.grad` stays None. `model` itself
    is trained, not a DistributedDataParallel around it; the constructor gives all ranks rank 0's parameters and
    buffers.

    Memory: 1 byte and 1/64 for each parameter (int8, groups of 128), one gradient at a time, and while buckets are
    exchanged up to five chunks (docs/collectives.md) more, or the largest bucket's.

    Args:
        model: dense float32, float16 or bfloat16 parameters, on one device. Frozen ones are left out, tied ones are
            one.
        group: the process group to average over; None is the default group, or no exchange where there is none.
        format: of the formats with 8 or 4 bits all but uint4.
        group_size, rounding: as for `agoq_ext.quantize`.
        bucket_bytes: bytes of codes of a bucket, about; what is exchanged at once.
        sharded: each rank steps only its shard of every bucket, and parameters are gathered (ZeRO-1): build the
            optimizer over `store.local(...)`. Gradients are encoded once, not twice.
        gather: with `sharded`, None to gather the parameters' own bytes, or a format such as "int8": then each rank
            keeps FP32 masters of its shard, and models hold what was decoded.
        scale_dtype: torch.bfloat16 or torch.float32.
        seed: of stochastic rounding; None: torch.initial_seed().

    Raises:
        ValueError, TypeError: an argument is not as required, or the model has no trainable parameters, sparse
            gradients, or is wrapped in DistributedDataParallel or FSDP.
        Disagreement: ranks differ in parameters or options.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        format: str = "int8",
        group_size: int = 128,
        rounding: str = "nearest",
        bucket_bytes: int = BUCKET_BYTES,
        *,
        sharded: bool = False,
        gather: str | None = None,
        scale_dtype: torch.dtype = torch.bfloat16,
        seed: int | None = None,
    ) -> None:
        op = "GradientStore"
        self.codec = Codec(format, group_size, scale_dtype, rounding)
        checks.check_options(op, self.codec, bucket_bytes, sharded, gather)
        named = checks.trainable_parameters(op, model, sharded)
        self._seed = torch.initial_seed() if seed is None else seed
        self._device = named[0][1].device
        ops.seed_tensor(op, "stochastic", self._seed, self._device)  # checks its range
        self._reduction = Reduction(group, self.codec, sharded, gather)
        self.world, self.rank, self.sharded = self._reduction.world, self._reduction.rank, sharded
        # Backward delivers gradients about in the reverse order of the parameters.
        self.buckets = make_buckets(named[::-1], self.codec, bucket_bytes, self.world)
        self._reduction.connect(model, self.buckets)
        self._entries = {entry.parameter: entry for bucket in self.buckets for entry in bucket.entries}
        self._pieces = {
            bucket: shards.make_pieces(bucket, self.rank, masters=gather is not None) if sharded else []
            for bucket in self.buckets
        }
        self._syncing = True
        self._encoded = 0  # encodings with noise so far, for their seeds
        self._unscale: float | None = None
        self._handles = [p.register_post_accumulate_grad_hook(self._take) for p in self._entries]

    # --- what the model's backward does --------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate: for all micro-batches of a step but the last."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def sink(self, parameter: nn.Parameter) -> GradientSink | None:
        """Where a kernel may write the gradient of `parameter` by rows; None if groups would cross its rows.

        Raises:
            ValueError: the parameter is not in the store.
        """
        entry = self._entry_of("GradientStore.sink", parameter)
        if parameter.dim() < 2 or parameter.shape[-1] % self.codec.group_size:
            return None
        return GradientSink(self, entry.parameter)

    def _take(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            name = self._entries[parameter].name  # type: ignore[index]
            raise ValueError(
                f"GradientStore: gradients must be dense; {name} got one of layout {gradient.layout}"
            )
        self._add(parameter, gradient, 0)
        del gradient
        self._arrived(parameter)

    @torch.no_grad()
    def _add(self, parameter: Tensor, gradient: Tensor, first: int) -> None:
        """Adds the gradient of the elements from `first` of a parameter."""
        entry, codec = self._entries[parameter], self.codec  # type: ignore[index]
        if entry.bucket.index < self._reduction.launched:
            raise RuntimeError(
                f"GradientStore: {entry.name} got a gradient after its bucket was exchanged; only the last backward "
                "pass of a step may be outside no_sync()"
            )
        flat = gradient.reshape(-1)
        if flat.numel() < entry.numel:
            entry.bucket.clear_unwritten([entry])
        seed = self._next_seed(PHASE_SEND)
        for start, numel, packed, scales in entry.bucket.pieces(entry, first, flat.numel()):
            part = flat[start - first : start - first + numel].unsqueeze(0)
            options = (codec.format, codec.group_size, codec.rounding, seed, entry.base + start)
            if entry.written:
                ops.accumulate_(packed, scales, part, 1.0, *options)
            else:
                ops.quantize_out(part, packed, scales, *options)
        entry.written = True

    def _arrived(self, parameter: Tensor) -> None:
        """Counts a parameter's gradient; issues the exchanges that have become possible."""
        if self._syncing:
            self._entries[parameter].ready = True  # type: ignore[index]
            self._reduction.launch_ready(self._reduced_seed)

    def _next_seed(self, phase: int) -> Tensor | None:
        seed = ops.seed_tensor("GradientStore", self.codec.rounding, self._seed, self._device)
        if seed is None:
            return None
        self._encoded += 1
        return mix_seed(seed, self.rank, phase, self._encoded)

    def _reduced_seed(self) -> Tensor | None:
        return self._next_seed(PHASE_REDUCED)

    # --- the step ------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Issues what has not been exchanged yet, and waits for all: the codes then hold the mean over the ranks.

        `step` does it. Every rank calls it equally often.

        Raises:
            RuntimeError: an exchange failed, e.g. because a peer died.
        """
        self._reduction.finish(self._reduced_seed)

    def unscale_(self, scaler: torch.amp.GradScaler) -> None:
        """Makes this step's norm, clipping and gradients those of the unscaled loss; `step(scaler=)` does it too.

        Raises:
            TypeError: not a GradScaler.  RuntimeError: this step's gradients are unscaled already.
        """
        scaling.check_scaler("GradientStore.unscale_", scaler)
        if self._unscale is not None:
            raise RuntimeError("GradientStore.unscale_: this step's gradients have been unscaled already")
        self._unscale = scaling.inverse_scale(scaler)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The 2-norm of the mean gradient, unscaled if `unscale_` was called: float64 [], NaN or Inf if not finite.

        From the codes, in a fixed order, the same bits on all ranks. A collective call.
        """
        self.synchronize()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for bucket in self.buckets:
            if self.sharded:
                for _, part in shards.reduced_pieces(
                    bucket, self._pieces[bucket], self.rank, self.world, 1.0
                ):
                    total = total + part.double().square().sum()
            else:
                squares, bad = bucket.norm()
                total = total + torch.where(bad, torch.nan, squares)
        if self.sharded:
            total = self._reduction.sum(total)
        return total.sqrt() * (1.0 if self._unscale is None else self._unscale)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> StepResult:
        """Steps `optimizer` with the mean gradient, bucket by bucket, and begins the next step's accumulation.

        Only one bucket's gradients exist in full precision at a time. Hooks of the optimizer run once; a closure is
        not supported. A collective call.

        Args:
            optimizer: over the parameters of the model (in a sharded store: over `local(...)`), all of which the store
                knows. It steps each parameter by itself; in a sharded store each element.
            max_norm: the gradient is scaled down to this 2-norm if it is longer.
            scaler: the loss was scaled by it: gradients are unscaled, and it is told whether they were finite. Call
                its `update` afterwards, not its `step`.

        Raises:
            ValueError, TypeError: an argument is not as required.
            RuntimeError: an exchange failed.
        """
        op = "GradientStore.step"
        check_optimizer(op, optimizer, self.sharded)
        checks.check_covered(op, optimizer, self._stepped(), self.sharded)
        checks.check_max_norm(op, max_norm)
        if scaler is not None:
            scaling.check_scaler(op, scaler)
            if self._unscale is None:
                self.unscale_(scaler)
        norm = self.norm().item()
        finite = math.isfinite(norm)
        if scaler is not None:
            scaling.record(scaler, optimizer, finite, self._device)
        if finite:
            factor = 1.0 if self._unscale is None else self._unscale
            if max_norm is not None and norm > max_norm:
                factor *= max_norm / (norm + 1e-6)
            with torch.no_grad():
                parts = [partial(self._set_gradients, bucket, factor) for bucket in self.buckets]
                step_in_parts(op, optimizer, parts)
                if self.sharded:
                    self._reduction.gather(self._pieces)
        self.clear()
        return StepResult(norm, finite)

    def _set_gradients(self, bucket: Bucket, factor: float) -> None:
        if self.sharded:
            for piece, part in shards.reduced_pieces(
                bucket, self._pieces[bucket], self.rank, self.world, factor
            ):
                piece.local.grad = part.to(piece.local.dtype)
            return
        for entry in bucket.entries:
            gradient = torch.empty_like(entry.parameter, memory_format=torch.contiguous_format)
            bucket.decode(entry, gradient, factor)
            entry.parameter.grad = gradient

    def _stepped(self) -> set[Tensor]:
        """What an optimizer has to hold."""
        if self.sharded:
            return {piece.local for pieces in self._pieces.values() for piece in pieces}
        return set(self._entries)

    def local(self, params: Any) -> Any:
        """Parameters, or an optimizer's groups of them, as the pieces that this rank steps, in a sharded store.

        Pieces are flat parameters: views of the model's, or FP32 masters with `gather`. Each keeps its group's
        settings.

        Raises:
            ValueError: a parameter is not in the store.  RuntimeError: the store is not sharded.
        """
        if not self.sharded:
            raise RuntimeError(
                "GradientStore.local: the store is not sharded; give an optimizer the model's parameters"
            )
        pieces: dict[nn.Parameter, list[nn.Parameter]] = {p: [] for p in self._entries}
        for piece in (piece for each in self._pieces.values() for piece in each):
            pieces[piece.entry.parameter].append(piece.local)
        return shards.local_parameters(params, pieces)

    def clear(self) -> None:
        """Drops this step's gradients; what is in flight is waited for."""
        self._reduction.reset()
        for entry in self._entries.values():
            entry.written = entry.ready = False
        self._unscale = None

    # --- looking inside ------------------------------------------------------------------------------------------

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's gradient as it is stored now: float32, of its shape; the mean once exchanged. For inspection.

        Raises:
            ValueError: the parameter is not in the store.  RuntimeError: a sharded store has exchanged it.
        """
        entry = self._entry_of("GradientStore.gradient", parameter)
        exchanged = entry.bucket.index < self._reduction.launched
        if self.sharded and exchanged:
            raise RuntimeError(
                "GradientStore.gradient: a sharded store has sent the gradients to their owners"
            )
        out = torch.zeros(parameter.shape, device=parameter.device)
        if entry.written or exchanged:
            self._reduction.wait()
            entry.bucket.decode(entry, out, 1.0)
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(bucket.memory.nbytes for bucket in self.buckets)

    def _entry_of(self, op: str, parameter: nn.Parameter) -> Entry:
        entry = self._entries.get(parameter)
        if entry is None:
            raise ValueError(
                f"{op}: parameter must be one that the model had when the store was made, and trainable; got one of "
                f"shape {tuple(parameter.shape)}"
            )
        return entry

    # --- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's codes, also in the middle of accumulation; a DCP `Stateful`. A collective call.

        Loading them goes on bit for bit. With `gather` the FP32 masters are in it too.
        """
        if self._reduction.launched:
            self.synchronize()
        pieces = [piece for each in self._pieces.values() for piece in each]
        content = state.save(self._reduction, self._entries.values(), pieces)
        content |= {"encoded": self._encoded, "unscale": self._unscale}
        return {f"rank{self.rank}": state.Saved(content)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """The inverse of `state_dict`, on the rank that it was made on.

        Raises:
            ValueError: it was made by another rank, or for another model or other options.
        """
        self._reduction.wait()
        pieces = [piece for each in self._pieces.values() for piece in each]
        content = state.load(saved.get(f"rank{self.rank}"), self._reduction, self._entries.values(), pieces)
        self._encoded, self._unscale = content["encoded"], content["unscale"]

    def close(self) -> None:
        """Takes the hooks off the model: backward fills `.grad` again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
