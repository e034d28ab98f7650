"""The `agoq train` and `agoq demo` commands: their options, and how these become a run.

Importing this module is quick: what trains is imported when a command runs.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UserError
from . import config as configs
from .config import TrainConfig

_DEFAULTS = TrainConfig(out="")


def add_train_parser(subparsers: Any) -> None:
    """Adds `agoq train`."""
    # Options that are not given stay out of the result, so that --resume can tell them from those that are.
    parser = subparsers.add_parser(
        "train",
        help="train a LLaMA-style model on bytes of text",
        description="Trains a LLaMA-style model on bytes of text, on one or more ranks; also under torchrun.",
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--out",
        required=True,
        metavar="DIR",
        help="folder for the checkpoint, metrics.jsonl and summary.json",
    )
    add(
        "--model",
        metavar="NAME|JSON",
        help=f"{', '.join(configs.MODELS)}, or a JSON file with a LlamaConfig [tiny]",
    )
    add("--data", nargs="+", metavar="PATH", help="files or folders of text [Python's standard library]")
    add("--ranks", type=int, metavar="N", help="local processes [1; under torchrun: its own]")
    add(
        "--activations",
        choices=configs.ACTIVATIONS,
        help=_default("what is kept for backward", "activations"),
    )
    add("--gradients", choices=configs.GRADIENTS, help=_default("how gradients are exchanged", "gradients"))
    add("--precision", choices=configs.PRECISIONS, help=_default("bf16 is autocast", "precision"))
    add("--steps", type=int, metavar="N", help=_default("optimizer steps", "steps"))
    add("--batch", type=int, metavar="N", help=_default("sequences of a rank in a micro-step", "batch"))
    add("--seq", type=int, metavar="N", help=_default("bytes of a sequence", "seq"))
    add("--accumulate", type=int, metavar="N", help=_default("micro-steps in a step", "accumulate"))
    add("--lr", type=float, metavar="RATE", help=_default("peak learning rate", "lr"))
    add("--weight-decay", type=float, metavar="RATE", help=_default("decoupled, of matrices", "weight_decay"))
    add("--seed", type=int, metavar="N", help=_default("of parameters and data order", "seed"))
    add(
        "--eval-every",
        type=int,
        metavar="N",
        help="steps between validations; one at the end in any case [0: none]",
    )
    add("--eval-windows", type=int, metavar="N", help=_default("sequences of a validation", "eval_windows"))
    add(
        "--save-every",
        type=int,
        metavar="N",
        help=_default("steps between checkpoints; 0: the last", "save_every"),
    )
    add("--log-every", type=int, metavar="N", help=_default("steps between lines", "log_every"))
    add("--threads", type=int, metavar="N", help="threads of a rank [the machine's cores / ranks]")
    add(
        "--resume",
        nargs="?",
        const="",
        metavar="FILE",
        help="continue from FILE, or from the checkpoint in --out",
    )
    add("--overwrite", action="store_true", help="start anew where --out already holds a checkpoint")
    _add_diloco(parser)
    parser.set_defaults(func=run_train)


def _add_diloco(parser: argparse.ArgumentParser) -> None:
    """The options of replicas that synchronize rarely."""
    add = parser.add_argument_group(
        "streaming DiLoCo", "every rank is a replica; outer gradients are exchanged instead of gradients"
    ).add_argument
    add(
        "--diloco", type=int, metavar="H", help="steps between two exchanges of a fragment [0: data parallel]"
    )
    add("--replicas", type=int, metavar="M", help="local processes; another name for --ranks")
    add("--fragments", type=int, metavar="N", help="1: the whole model [0: three layers each, strided]")
    add("--overlap", type=int, metavar="TAU", help=_default("steps an exchange may take", "overlap"))
    add("--format", choices=configs.OUTER_FORMATS, help=_default("of outer gradients", "format"))
    add("--warmup", type=int, metavar="N", help=_default("data-parallel steps first", "warmup"))
    add("--outer-lr", type=float, metavar="RATE", help=_default("of the outer optimizer", "outer_lr"))


def add_demo_parser(subparsers: Any) -> None:
    """Adds `agoq demo`."""
    parser = subparsers.add_parser(
        "demo",
        help="train uncompressed and compressed, and compare",
        description="Trains the same model on the same data three times on two ranks: uncompressed, with compressed "
        "activations and an int8 all-reduce, and with gradients stored in int8; compares what each took.",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for report.json and the plots")
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="PATH", help="text [Python's standard library]"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of parameters and data order [0]")
    parser.add_argument("--steps", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="tiny", help=argparse.SUPPRESS)
    parser.set_defaults(func=run_demo)


def _default(text: str, name: str) -> str:
    return f"{text} [{getattr(_DEFAULTS, name)}]"


def run_train(args: argparse.Namespace) -> int:
    """Runs `agoq train`; returns its exit status."""
    given = {name: value for name, value in vars(args).items() if name not in ("command", "func")}
    resume = given.pop("resume", None)
    overwrite = given.pop("overwrite", False)
    replicas = given.pop("replicas", None)
    if replicas is not None and given.setdefault("ranks", replicas) != replicas:
        raise UserError(f"--replicas and --ranks are one number; got {replicas} and {given['ranks']}")
    if "data" in given:
        given["data"] = tuple(given["data"])
    if "model" in given:
        given["model_config"] = configs.read_model(given["model"])

    from . import launch
    from .world import torchrun_ranks

    ranks = torchrun_ranks()
    if ranks is not None and given.setdefault("ranks", ranks) != ranks:
        raise UserError(f"--ranks must be left out under torchrun, or be its {ranks}; got {given['ranks']}")
    if resume is None:
        _check_unused(given["out"], overwrite)
        return launch.run(TrainConfig(**given))
    config, path = _resumed(given, resume)
    if path.resolve().parent != Path(config.out).resolve():
        _check_unused(config.out, overwrite)
    elif overwrite:
        raise UserError("--overwrite and --resume from the same folder contradict each other")
    return launch.run(config, path)


def _resumed(given: dict[str, Any], resume: str) -> tuple[TrainConfig, Path]:
    """The options of a resumed run: the checkpoint's, with those that may change as given."""
    from . import checkpoint

    path = checkpoint.locate(resume, given["out"])
    loaded = checkpoint.load(path)
    stored = loaded.train_config()
    configs.check_resumable(stored, given, str(path))
    changes = {name: value for name, value in given.items() if name in configs.FREE_ON_RESUME}
    config = replace(stored, **changes)
    if config.steps < loaded.step:
        raise UserError(f"--steps must be at least {loaded.step}, which {path} has done; got {config.steps}")
    return config, path


def _check_unused(out: str, overwrite: bool) -> None:
    from . import checkpoint

    path = Path(out) / checkpoint.FILE_NAME
    if not overwrite and path.exists():
        raise UserError(
            f"--out: {path} is there from an earlier run: continue it with --resume, or give --overwrite"
        )


def run_demo(args: argparse.Namespace) -> int:
    """Runs `agoq demo`; returns its exit status."""
    from . import demo

    return demo.run(args.out, data=tuple(args.data), seed=args.seed, steps=args.steps, model=args.model)
