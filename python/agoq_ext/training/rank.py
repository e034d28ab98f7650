"""One rank of a run: joins the others, trains, and turns how that ended into an exit status."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from . import checkpoint
from .config import TrainConfig
from .signals import StopRequest, exit_status

EXIT_FAILED = 1
EXIT_USER_ERROR = 2


def run_rank(
    config: TrainConfig,
    resume: Path | None,
    stop: StopRequest,
    *,
    rank: int | None = 0,
    rendezvous: str | None = None,
) -> int:
    """Runs this process' part of `config` (see `launch.run` for the status).

    Args:
        rank: this process' rank of `config.ranks`; None takes both from torchrun's environment.
        rendezvous: the file local ranks meet at; None for a world of one and for torchrun.

    Raises:
        UserError: on every rank, whichever of them found the reason; all but that one get `PeerUserError`.
    """
    from . import world as worlds
    from .trainer import Trainer, TrainingFailed

    # Gloo picks its address by resolving the host's name; ranks on one host need none, and some hosts have none.
    if rank is not None and sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with worlds.join(rank, config.ranks, rendezvous) as world:
        try:
            outcome = Trainer(config, world, resume).run(stop)
        except TrainingFailed as error:
            if world.first:
                complain(f"{error}{kept(config)}")
            return EXIT_FAILED
    if world.first and outcome.signal:
        print(
            f"stopped by {signal.Signals(outcome.signal).name} after step {outcome.step}; to continue: "
            f"agoq train --out {config.out} --resume",
            flush=True,
        )
    return exit_status(outcome.signal)


def run_here(config: TrainConfig, resume: Path | None) -> int:
    """Runs the rank that this process is: the only one, or one of torchrun's."""
    from .world import PeerUserError, torchrun_ranks

    rank = 0 if torchrun_ranks() is None else None
    try:
        with StopRequest().listening() as stop:
            return run_rank(config, resume, stop, rank=rank)
    except PeerUserError:
        return EXIT_USER_ERROR


def complain(message: str) -> None:
    """One line on stderr, in the form of all of the command's errors."""
    print(f"agoq: error: {message}", file=sys.stderr, flush=True)


def kept(config: TrainConfig) -> str:
    """A half-sentence about the checkpoint that a failed run leaves behind, if there is one."""
    path = Path(config.out) / checkpoint.FILE_NAME
    return f"; the last checkpoint stays in {path}" if path.is_file() else ""
