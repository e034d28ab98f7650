"""The training loop of one rank, from set-up to the final checkpoint and summary."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from . import bf16_products, checkpoint, process
from .config import TrainConfig
from .data import Corpus, load_corpus
from .gradients import GradientExchange, StoredGradients
from .metrics import Metrics
from .model import autocast, build_model, learning_rate, loss_inputs, make_optimizer
from .replicas import ReplicaExchange
from .signals import StopRequest
from .world import World

MAX_GRADIENT_NORM = 1.0
SUMMARY_NAME = "summary.json"


class TrainingFailed(Exception):
    """The run cannot go on for a reason that is not in the options; the last checkpoint stays."""


@dataclass
class Outcome:
    """How a run ended: the last step done, and the signal that stopped it (0: it reached its end)."""

    step: int
    signal: int
    summary: dict[str, Any]


class Trainer:
    """Everything one rank holds during a run. `run` is the whole of it.

    A step's data, learning rate and exchange depend on the step's number and the options alone, and what remains
    (parameters, optimizer, random state) is in the checkpoint: that is why a resumed run repeats every bit.
    """

    def __init__(self, config: TrainConfig, world: World, resume: Path | None) -> None:
        self.config = config
        self.world = world
        self.history = resume.parent if resume else None
        torch.set_num_threads(config.threads_per_rank)
        with world.together():
            self.folder = checkpoint.prepare_folder(config.out) if world.first else Path(config.out)
            self.corpus: Corpus = load_corpus(config.data)
            self.corpus.check_length(config.seq, config.sequences_per_step, config.batch)
            self.model: nn.Module = build_model(config)
            loaded = checkpoint.load(resume) if resume else None
            if loaded is not None and resume is not None:
                self._check(loaded, resume)
                checkpoint.load_model(self.model, loaded.model, resume)
        self.products = bf16_products.enable() if config.precision == "bf16" else "FP32"
        self.optimizer = make_optimizer(self.model.parameters(), config)
        self.exchange = self._make_exchange()
        torch.manual_seed(config.seed + world.rank)  # dropout, where a configuration has it, differs by rank
        self.step = 0
        self.wire_bytes = 0
        self._written = 0  # by this rank within steps, before their closing exchange
        self._cpu_seconds = 0.0
        self.train_seconds = 0.0
        self._unmetered = 0.0  # seconds of steps since the last one that metrics record
        self.recent_losses: deque[float] = deque(maxlen=max(1, config.steps // 20))
        if loaded is not None:
            self._restore(loaded)
        self.first_step = self.step

    def _make_exchange(self) -> GradientExchange | StoredGradients | ReplicaExchange:
        if not self.config.diloco:
            if self.config.gradients == "store":
                return StoredGradients(self.model)
            return GradientExchange(self.model, self.config.gradients)
        try:
            return ReplicaExchange(self.model, self.optimizer, self.config)
        except ValueError as error:  # more fragments than layers, say: alike on all ranks
            raise UserError(str(error)) from error

    def _check(self, loaded: checkpoint.Checkpoint, path: Path) -> None:
        if loaded.data_digest != self.corpus.digest:
            raise UserError(
                f"--resume: {path} was trained on other data than {self.corpus.source} holds now: resuming needs "
                "the same files"
            )
        if len(loaded.random_states) != self.world.size:
            raise UserError(
                f"--resume: {path} was trained by {len(loaded.random_states)} ranks; got {self.world.size}"
            )

    def _restore(self, loaded: checkpoint.Checkpoint) -> None:
        if isinstance(self.exchange, ReplicaExchange) and loaded.replicas is not None:
            rank = self.world.rank
            self.exchange.restore(loaded.replicas[rank], self.optimizer, rank)
        else:
            self.optimizer.load_state_dict(loaded.optimizer)
        self.step = loaded.step
        self.wire_bytes = loaded.wire_bytes
        self.train_seconds = loaded.train_seconds
        self.recent_losses.extend(loaded.recent_losses)
        torch.set_rng_state(loaded.random_states[self.world.rank])

    def run(self, stop: StopRequest) -> Outcome:
        """Trains until the last step or a signal, saves a checkpoint, and writes the summary at the end."""
        config, world = self.config, self.world
        metrics = Metrics(self.folder, config, self.first_step, self.history) if world.first else None
        if metrics:
            metrics.start(self.corpus, self.model, self.products)
        self._settle()
        process.reset_peak()
        saved = -1
        signal = stop.agreed(world)
        while self.step < config.steps and not signal:
            signal = self._step(metrics, stop)
            if config.eval_every and self.step % config.eval_every == 0 and self.step < config.steps:
                loss = self.validation_loss()
                if metrics:
                    metrics.validation(self.step, loss)
            if config.save_every and self.step % config.save_every == 0:
                self.save()
                saved = self.step
        if saved != self.step:
            self.save()
        summary = {} if signal else self._summary(metrics)
        return Outcome(self.step, signal, summary)

    def _settle(self) -> None:
        """Two forwards and backwards that change nothing.

        DDP arranges its buckets anew after the first backward, and with them the groups that share a scale. Done
        before the first step, the arrangement is the same for a run from the start and for a resumed one. The
        second lets the ranks compare their options for the new buckets, which they do once.
        """
        inputs, targets = self._batch(0, 0)
        state = torch.get_rng_state()
        for _ in range(2):
            self._loss(inputs, targets).backward()
            self.exchange.drop(self.optimizer)
        torch.set_rng_state(state)
        self.exchange.take_count()

    def _batch(self, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        config = self.config
        first = step * config.sequences_per_step
        first += (micro_step * self.world.size + self.world.rank) * config.batch
        return self.corpus.train_batch(first, config.batch, config.seq, config.seed)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast(self.config.precision):
            return self.exchange.module(**loss_inputs(inputs, targets)).loss

    def _step(self, metrics: Metrics | None, stop: StopRequest) -> int:
        """One optimizer step; returns the signal that any rank has received, 0 if none."""
        config = self.config
        began, cpu_began, written = time.perf_counter(), time.process_time(), process.written_bytes()
        rate = learning_rate(self.step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = 0.0
        for micro_step in range(config.accumulate):
            with self.exchange.micro_step(last=micro_step == config.accumulate - 1):
                part = self._loss(*self._batch(self.step, micro_step)) / config.accumulate
                part.backward()
            loss += part.item()
        norm = self.exchange.step(self.optimizer, MAX_GRADIENT_NORM)
        self._written += process.written_bytes() - written
        if not self._meeting(self.step + 1):
            self._account(began, cpu_began)
            return 0
        rows = self.world.gather([loss, stop.signal, self.exchange.take_count(), process.resident_bytes()])
        loss, signal = rows[:, 0].mean().item(), int(rows[:, 1].max())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingFailed(
                f"step {self.step + 1}: the loss is {loss}, the gradient's norm {norm}: training has diverged; try a "
                "smaller --lr"
            )
        self._account(began, cpu_began)
        seconds, self._unmetered = self._unmetered, 0.0
        self.wire_bytes += int(rows[:, 2].sum())
        self.recent_losses.append(loss)
        if metrics:
            metrics.step(
                self.step,
                train_loss=loss,
                lr=rate,
                gradient_norm=norm,
                seconds=seconds,
                rss_bytes=int(rows[:, 3].max()),
                wire_bytes=self.wire_bytes,
            )
        return signal

    def _meeting(self, step: int) -> bool:
        """Whether the ranks tell each other of step `step` (1-based): every step, but replicas meet rarely."""
        config = self.config
        every = [config.log_every, config.save_every, config.eval_every]
        return not config.diloco or step == config.steps or any(n and step % n == 0 for n in every)

    def _account(self, began: float, cpu_began: float) -> None:
        """Counts a step that is done."""
        seconds = time.perf_counter() - began
        self._cpu_seconds += time.process_time() - cpu_began
        self.step += 1
        self.train_seconds += seconds
        self._unmetered += seconds

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean cross-entropy in nats a byte over the fixed validation windows, the same on every rank."""
        config, world = self.config, self.world
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64)
        batches = self.corpus.validation_batches(config.seq, config.eval_windows, config.batch)
        with self._evaluated_parameters():
            for index, (inputs, targets) in enumerate(batches):
                if index % world.size == world.rank:
                    with autocast(config.precision):
                        loss = self.model(**loss_inputs(inputs, targets)).loss
                    total += torch.tensor([loss.item() * len(inputs), len(inputs)], dtype=torch.float64)
        self.model.train()
        summed = world.gather(total.tolist()).sum(dim=0)
        return (summed[0] / summed[1]).item()

    def _evaluated_parameters(self) -> AbstractContextManager[None]:
        """Puts the parameters in place that all ranks share."""
        exchange = self.exchange
        return exchange.diloco.outer_parameters() if isinstance(exchange, ReplicaExchange) else nullcontext()

    def save(self) -> None:
        """Writes the checkpoint (rank 0; a collective call)."""
        states = self.world.gather_objects(torch.get_rng_state())
        replicas = None
        if isinstance(self.exchange, ReplicaExchange):
            own = self.exchange.state(self.optimizer, self.world.rank)
            replicas = self.world.gather_objects(own)
        if not self.world.first:
            return
        with self._evaluated_parameters():
            model = {name: value.clone() for name, value in self.model.state_dict().items()}
        try:
            checkpoint.Checkpoint(
                step=self.step,
                config=self.config.to_dict(),
                data_digest=self.corpus.digest,
                model=model,
                optimizer=self.optimizer.state_dict(),
                random_states=states,
                recent_losses=list(self.recent_losses),
                wire_bytes=self.wire_bytes,
                train_seconds=self.train_seconds,
                replicas=replicas,
            ).save(self.folder)
        except OSError as error:
            raise UserError(f"--out: cannot write a checkpoint to {self.folder}: {error.strerror}") from error

    def _summary(self, metrics: Metrics | None) -> dict[str, Any]:
        """What the run measured; rank 0 also writes it to summary.json."""
        config = self.config
        rows = self.world.gather([process.peak_resident_bytes(), self._written, self._cpu_seconds])
        peak, written, cpu_seconds = int(rows[:, 0].max()), int(rows[:, 1].sum()), rows[:, 2].max().item()
        validation = self.validation_loss()
        if metrics:
            metrics.validation(self.step, validation)
        activations = self._activation_bytes()
        tokens = self.step * config.sequences_per_step * config.seq
        summary = {
            "val_loss": validation,
            "train_loss": sum(self.recent_losses) / max(1, len(self.recent_losses)),
            "train_loss_steps": len(self.recent_losses),
            "tokens_per_s": tokens / self.train_seconds if self.train_seconds else 0.0,
            "saved_activation_bytes": activations["total_bytes"],
            "saved_activation_bytes_by_operator": activations["by_operator"],
            "wire_bytes": self.wire_bytes,
            "gradient_bytes": self.exchange.held_bytes,
            # These two count this process alone: they are the whole run's only where it was not resumed.
            "kernel_written_bytes": written if written and not self.first_step else None,
            "train_cpu_seconds": cpu_seconds if not self.first_step else None,
            "peak_rss_bytes": peak,
            "steps": self.step,
            "tokens": tokens,
            "train_seconds": self.train_seconds,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "bf16_products": self.products,
            "threads_per_rank": config.threads_per_rank,
            "data_digest": self.corpus.digest,
            "config": config.to_dict(),
        }
        if isinstance(self.exchange, ReplicaExchange):
            summary["diloco"] = self.exchange.report(self.world, self.train_seconds)
        if self.world.first:
            text = json.dumps(summary, indent=2) + "\n"
            checkpoint.write_atomically(self.folder / SUMMARY_NAME, lambda file: file.write(text.encode()))
        return summary

    def _activation_bytes(self) -> dict[str, Any]:
        """Bytes that one forward of one rank's batch keeps for backward, measured."""
        from ..activation import activation_report

        inputs, targets = self._batch(0, 0)
        with autocast(self.config.precision):
            report = activation_report(self.model, loss_inputs(inputs, targets))
        return {"total_bytes": report.total_bytes, "by_operator": dict(report.by_operator)}
