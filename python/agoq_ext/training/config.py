"""What a training run is: its options, the limits they are held to, and the sizes of model known by name."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import UserError

ACTIVATIONS = ("none", "agoq", "paper", "lean")
GRADIENTS = ("fp32", "bf16", "int8", "int4", "store")
PRECISIONS = ("bf16", "fp32")
OUTER_FORMATS = ("fp4_e3m0", "int4", "int8", "bfloat16", "float32")
VOCABULARY = 256

# The keys are those of transformers' LlamaConfig, as in a JSON file given to --model.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
    },
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
    },
}

# Options that a resumed run may change; every other one is part of what the checkpoint was trained with.
FREE_ON_RESUME = ("out", "steps", "threads", "log_every", "save_every", "eval_every")


def available_cpus() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class TrainConfig:
    """Options of one run; the command line's option of the same name explains each.

    `model` is only a name to show: `model_config` holds the LlamaConfig entries that the run really uses.
    `batch` counts sequences of one rank in one micro-step, so a step sees ranks * batch * accumulate sequences.
    """

    out: str
    model: str = "tiny"
    model_config: dict[str, Any] = field(default_factory=lambda: dict(MODELS["tiny"]))
    data: tuple[str, ...] = ()
    ranks: int = 1
    activations: str = "agoq"
    gradients: str = "int8"
    precision: str = "bf16"
    steps: int = 500
    batch: int = 8
    seq: int = 128
    accumulate: int = 1
    lr: float = 1e-3
    weight_decay: float = 0.1
    seed: int = 0
    eval_every: int = 0
    eval_windows: int = 256
    save_every: int = 100
    log_every: int = 10
    threads: int = 0
    diloco: int = 0
    fragments: int = 0
    overlap: int = 0
    warmup: int = 0
    format: str = "fp4_e3m0"
    outer_lr: float = 0.4

    def __post_init__(self) -> None:
        _check_choice("--activations", self.activations, ACTIVATIONS)
        _check_choice("--gradients", self.gradients, GRADIENTS)
        _check_choice("--precision", self.precision, PRECISIONS)
        cpus = available_cpus()
        # Every rank holds the whole model and needs a core: more ranks than this is a slip of the finger.
        _check_range("--ranks", self.ranks, 1, max(16, cpus), f" (this machine has {cpus} CPU cores)")
        for name in ("steps", "batch", "seq", "accumulate", "eval_windows", "log_every"):
            _check_range(f"--{name.replace('_', '-')}", getattr(self, name), 1, None)
        _check_choice("--format", self.format, OUTER_FORMATS)
        for name in ("save_every", "eval_every", "threads", "diloco", "fragments", "overlap", "warmup"):
            _check_range(f"--{name.replace('_', '-')}", getattr(self, name), 0, None)
        _check_range("--seed", self.seed, 0, 2**31 - 1)
        if self.diloco and self.overlap >= self.diloco:
            raise UserError(f"--overlap must be less than --diloco, {self.diloco}; got {self.overlap}")
        for name in ("lr", "weight_decay", "outer_lr"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"--{name.replace('_', '-')} must be a number of at least 0; got {value}")

    @property
    def sequences_per_step(self) -> int:
        """Sequences that one optimizer step sees, over all ranks."""
        return self.ranks * self.batch * self.accumulate

    @property
    def threads_per_rank(self) -> int:
        """Threads that one rank computes with: `threads`, or its share of the machine's cores."""
        return self.threads or max(1, available_cpus() // self.ranks)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "data": list(self.data)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """The inverse of `to_dict`; names this version does not know are left out."""
        known = {f.name for f in fields(cls)}
        kept = {name: value for name, value in values.items() if name in known}
        return cls(**{**kept, "data": tuple(kept.get("data", ()))})


def read_model(name: str) -> dict[str, Any]:
    """LlamaConfig entries of a size known by name, or of the JSON file `name`.

    Raises:
        UserError: neither a known size nor a readable JSON object.
    """
    if name in MODELS:
        return dict(MODELS[name])
    path = Path(name)
    if path.suffix != ".json" and not path.is_file():
        raise UserError(
            f"--model must be {', '.join(MODELS)} or a JSON file with a LlamaConfig; got {name!r}"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--model: cannot read {name}: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"--model: {name} must hold a JSON object; got {type(values).__name__}")
    return values


def check_resumable(stored: TrainConfig, given: dict[str, Any], source: str) -> None:
    """Raises UserError if an option given on the command line contradicts what the checkpoint was trained with."""
    known = stored.to_dict()
    if "model_config" in given and given["model_config"] != stored.model_config:
        differing = _first_difference(stored.model_config, given["model_config"])
        raise UserError(f"--resume: {source} holds another model: {differing}")
    for name, value in given.items():
        if name in FREE_ON_RESUME or name in ("model", "model_config"):
            continue
        value = list(value) if isinstance(value, tuple) else value
        if value != known[name]:
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                f"--resume: {source} was trained with {option} {known[name]}; got {option} {value}"
            )


def _first_difference(stored: dict[str, Any], given: dict[str, Any]) -> str:
    shared = [key for key in sorted(stored) if key in given]
    for key in shared + sorted(stored.keys() ^ given.keys()):
        if key not in given or key not in stored or stored[key] != given[key]:
            return f"its {key} is {stored.get(key, 'not given')}, --model says {given.get(key, 'nothing')}"
    return "the configurations differ"


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{option} must be one of {', '.join(choices)}; got {value!r}")


def _check_range(option: str, value: int, low: int, high: int | None, note: str = "") -> None:
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise UserError(f"{option} must be {limits}{note}; got {value}")
