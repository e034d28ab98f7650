"""What a run tells while it goes on: lines on the terminal and metrics.jsonl (rank 0)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from . import checkpoint
from .config import TrainConfig
from .data import Corpus

FILE_NAME = "metrics.jsonl"


class Metrics:
    """Appends one JSON object a step to metrics.jsonl and prints a line every `log_every` steps.

    Records of a step: step, train_loss (mean over ranks, nats a byte), lr, gradient_norm (before clipping), seconds (of
    the steps since the last record: replicas record some steps only), rss_bytes (largest of the ranks), wire_bytes
    (sent by all ranks together since the run began). Records of a validation: step, val_loss.
    """

    def __init__(self, folder: Path, config: TrainConfig, first_step: int, history: Path | None) -> None:
        """Begins metrics.jsonl in `folder` with what the run resumed from `history` had told up to `first_step`."""
        self.config = config
        self.first_step = first_step
        path = folder / FILE_NAME
        kept = (
            [line for line in _lines(history / FILE_NAME) if _step_of(line) <= first_step] if history else []
        )
        checkpoint.write_atomically(path, lambda file: file.write("".join(kept).encode()))
        self._file = open(path, "a", encoding="utf-8", buffering=1)
        self._seconds = 0.0
        self._steps = 0
        self._logged = first_step

    def start(self, corpus: Corpus, model: nn.Module, products: str) -> None:
        """Prints what is about to run."""
        config = self.config
        parameters = sum(p.numel() for p in model.parameters())
        print(
            f"model {config.model}: {parameters:,} parameters; {corpus.source}: {corpus.files:,} files, "
            f"{len(corpus.train):,} bytes to train on, {len(corpus.validation):,} to validate on"
        )
        print(
            f"{config.ranks} ranks x {config.threads_per_rank} threads; a step takes {config.sequences_per_step} x "
            f"{config.seq} bytes; activations {config.activations}, {_exchanged(config)}, {config.precision}"
        )
        if config.precision == "bf16":
            print(f"products: {products}")
        if self.first_step:
            print(f"resuming after step {self.first_step}")

    def step(self, step: int, **values: Any) -> None:
        """Records one step; see the class for what it takes."""
        self._write({"step": step, **values})
        self._seconds += values["seconds"]
        self._steps = step - self._logged
        if step % self.config.log_every == 0 or step == self.config.steps:
            tokens = self._steps * self.config.sequences_per_step * self.config.seq
            print(
                f"step {step:>6}/{self.config.steps}  loss {values['train_loss']:.4f}  lr {values['lr']:.2e}  "
                f"{tokens / self._seconds:>8,.0f} tokens/s  memory {megabytes(values['rss_bytes'])}  "
                f"sent {megabytes(values['wire_bytes'])}",
                flush=True,
            )
            self._seconds, self._steps, self._logged = 0.0, 0, step

    def validation(self, step: int, loss: float) -> None:
        """Records a validation loss, in nats a byte."""
        self._write({"step": step, "val_loss": loss})
        print(f"step {step:>6}/{self.config.steps}  validation loss {loss:.4f}", flush=True)

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")


def _exchanged(config: TrainConfig) -> str:
    if not config.diloco:
        return f"gradients {config.gradients}"
    return (
        f"outer gradients every {config.diloco} steps in {config.format}, overlap {config.overlap}, "
        f"{config.warmup} steps of warm-up"
    )


def megabytes(count: float) -> str:
    """A number of bytes in units of 10^6."""
    return f"{count / 1e6:,.1f} MB"


def read(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, oldest first."""
    return [json.loads(line) for line in _lines(folder / FILE_NAME)]


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]  # a killed run may leave half a line


def _step_of(line: str) -> int:
    return int(json.loads(line)["step"])
