"""Checkpoints: written whole or not at all, read with checks.

One file holds everything that a run's continuation depends on, so that a resumed run takes the same steps bit for
bit as one that was never stopped: model, optimizer, step, every rank's random state, and the options.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UserError
from .config import TrainConfig

FILE_NAME = "checkpoint.pt"
_KIND = "agoq-train-checkpoint"
_VERSION = 1


@dataclass
class Checkpoint:
    """State after `step` optimizer steps.

    Attributes:
        config: the options, as `TrainConfig.to_dict` gives them.
        data_digest: digest of the corpus (`Corpus.digest`).
        model, optimizer: state dicts; equal on all ranks.
        random_states: torch's generator state of each rank.
        recent_losses: training losses of the last steps, oldest first.
        wire_bytes: bytes sent by all ranks together so far.
        train_seconds: time spent in steps so far.
        replicas: with --diloco, each rank's own parameters, optimizer and synchronization (`model` holds the outer
            parameters); else None.
    """

    step: int
    config: dict[str, Any]
    data_digest: str
    model: dict[str, Any]
    optimizer: dict[str, Any]
    random_states: list[torch.Tensor]
    recent_losses: list[float]
    wire_bytes: int
    train_seconds: float
    replicas: list[dict[str, Any]] | None = None

    def save(self, folder: Path) -> Path:
        """Writes `folder`/checkpoint.pt; whatever happens meanwhile, that path holds the old or the new one."""
        path = folder / FILE_NAME
        content = {"kind": _KIND, "version": _VERSION, **vars(self)}
        write_atomically(path, lambda file: torch.save(content, file))
        return path

    def train_config(self) -> TrainConfig:
        return TrainConfig.from_dict(self.config)


def locate(resume: str, out: str) -> Path:
    """The file that `--resume` means: a checkpoint, a folder that holds one, or (empty) the one in --out."""
    path = Path(resume or out)
    if path.is_dir():
        path = path / FILE_NAME
    if not path.is_file():
        raise UserError(f"--resume: there is no checkpoint at {path}")
    return path


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint.

    Raises:
        UserError: the file cannot be read or is not a checkpoint of this program.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"--resume: cannot read {path}: {error.strerror}") from error
    except Exception as error:  # unpickling fails in many ways
        raise UserError(f"--resume: {path} is not a checkpoint, or is damaged") from error
    if not isinstance(content, dict) or content.pop("kind", None) != _KIND:
        raise UserError(f"--resume: {path} is not a checkpoint of agoq train")
    version = content.pop("version", None)
    if version != _VERSION:
        raise UserError(f"--resume: {path} has version {version}; this program reads version {_VERSION}")
    return Checkpoint(**content)


def load_model(model: nn.Module, state: dict[str, Any], path: Path) -> None:
    """Loads the parameters, or raises UserError naming the first that does not fit."""
    own = model.state_dict()
    for name in sorted(own.keys() | state.keys()):
        if name not in state or name not in own:
            place = "the checkpoint" if name not in state else "the model"
            raise UserError(f"--resume: {path} holds another model: {place} has no {name}")
        if own[name].shape != state[name].shape:
            raise UserError(
                f"--resume: {path} holds another model: {name} has shape {tuple(state[name].shape)}, "
                f"the model's has {tuple(own[name].shape)}"
            )
    model.load_state_dict(state)


def write_atomically(path: Path, write: Any) -> None:
    """Calls `write(file)` on a binary file that then takes the place of `path` in one move."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def prepare_folder(out: str) -> Path:
    """Makes the folder of --out and proves that files can be written to it; UserError otherwise."""
    folder = Path(out)
    probe = folder / f".agoq-probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out: cannot write to {out}: {error.strerror}") from error
    return folder
