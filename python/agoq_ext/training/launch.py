"""Starts the ranks of a run as local processes, passes signals on to them, and ends them all when one fails."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import UserError
from .config import TrainConfig
from .rank import EXIT_FAILED, EXIT_USER_ERROR, complain, kept, run_here, run_rank
from .signals import SIGNALS, StopRequest, exit_status
from .world import PeerUserError, torchrun_ranks

# How long the other ranks may take to say what happened to them before they are killed.
GRACE_SECONDS = 3.0


def run(config: TrainConfig, resume: Path | None = None) -> int:
    """Runs `config` to its end on the ranks it asks for, and returns the exit status.

    0: done. 128 + n: stopped by signal n, checkpoint saved. 1: a rank failed or died, and stderr says how.

    Raises:
        UserError: what the user gave cannot work. No rank is left running.
    """
    if config.ranks == 1 or torchrun_ranks() is not None:
        return run_here(config, resume)
    return _LocalRanks(config, resume).run()


@dataclass(frozen=True)
class _Report:
    """How a rank ended: its status and, if it failed, when and why."""

    status: int
    user_error: str | None = None
    traceback: str | None = None
    time: float = field(default_factory=time.monotonic)  # one clock for all processes of a machine


@dataclass
class _Rank:
    """The parent's view of one rank."""

    index: int
    process: Any
    reports: connection.Connection
    lifeline: connection.Connection
    report: _Report | None = None
    ended_by_us: bool = False

    @property
    def alive(self) -> bool:
        return self.process.exitcode is None

    @property
    def failed(self) -> bool:
        if self.report is not None:
            return self.report.status in (EXIT_FAILED, EXIT_USER_ERROR)
        return not self.alive and not self.ended_by_us

    def collect(self) -> None:
        """Takes the rank's report, if it has sent one."""
        if self.report is None and self.reports.poll():
            try:
                self.report = self.reports.recv()
            except EOFError:
                pass

    def ask_to_stop(self) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.alive:
            self.ended_by_us = True
            self.process.kill()


class _LocalRanks:
    """The parent of a run's local ranks."""

    def __init__(self, config: TrainConfig, resume: Path | None) -> None:
        self.config = config
        self.resume = resume
        self.ranks: list[_Rank] = []
        self.stop = StopRequest()
        self.forced = False

    def run(self) -> int:
        previous = (
            {number: signal.signal(number, self._receive) for number in SIGNALS} if _main_thread() else {}
        )
        try:
            with tempfile.TemporaryDirectory(prefix="agoq-") as folder:
                self._start(os.path.join(folder, "rendezvous"))
                self._wait()
            return self._status()
        finally:
            for rank in self.ranks:
                rank.kill()
                rank.process.join()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self, rendezvous: str) -> None:
        # A server imports the libraries once and forks the ranks, which saves seconds for each of them.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([f"{__package__}.preload"])
        for index in range(self.config.ranks):
            reports, report_end = context.Pipe(duplex=False)
            lifeline_end, lifeline = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(self.config, self.resume, index, rendezvous, report_end, lifeline_end),
                name=f"agoq-rank-{index}",
            )
            process.start()
            report_end.close()
            lifeline_end.close()
            self.ranks.append(_Rank(index, process, reports, lifeline))
        if self.stop.signal:  # it came before the last rank was there to be told
            for rank in self.ranks:
                rank.ask_to_stop()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """The first request asks the ranks to stop at a step's end, the second ends them."""
        self.forced |= self.stop.receive(number)
        for rank in self.ranks:
            if self.forced:
                rank.kill()
            else:
                rank.ask_to_stop()

    def _wait(self) -> None:
        deadline = float("inf")
        while any(rank.alive for rank in self.ranks):
            waiting: list[Any] = [rank.process.sentinel for rank in self.ranks if rank.alive]
            waiting += [rank.reports for rank in self.ranks if rank.alive and rank.report is None]
            connection.wait(waiting, timeout=0.5)
            for rank in self.ranks:
                rank.collect()
            if any(rank.failed for rank in self.ranks):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() >= deadline:
                for rank in self.ranks:
                    rank.kill()
        for rank in self.ranks:
            rank.process.join()
            rank.collect()

    def _status(self) -> int:
        reports = [rank.report for rank in self.ranks if rank.report is not None]
        for report in reports:
            if report.user_error is not None:
                raise UserError(report.user_error)
        signalled = self.stop.signal
        if self.forced or (signalled and len(reports) < len(self.ranks)):
            complain(f"stopped at once by {signal.Signals(signalled).name}{kept(self.config)}")
            return exit_status(signalled)
        # A rank that died is the cause; what the others then report (a lost connection) follows from it.
        for rank in self.ranks:
            if rank.report is None and not rank.ended_by_us:
                complain(
                    f"rank {rank.index} {_death(rank.process.exitcode)}; training stopped{kept(self.config)}"
                )
                return EXIT_FAILED
        failures = sorted((r for r in reports if r.traceback is not None), key=lambda r: r.time)
        if failures:
            index = next(rank.index for rank in self.ranks if rank.report is failures[0])
            print(failures[0].traceback, file=sys.stderr, end="")
            complain(f"rank {index} failed; training stopped{kept(self.config)}")
            return EXIT_FAILED
        status = max(report.status for report in reports)
        return exit_status(signalled) if signalled and status > 128 else status


def _death(exitcode: int) -> str:
    if exitcode >= 0:
        return f"ended without a report, with status {exitcode}"
    name = signal.Signals(-exitcode).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _rank_main(
    config: TrainConfig,
    resume: Path | None,
    rank: int,
    rendezvous: str,
    reports: connection.Connection,
    lifeline: connection.Connection,
) -> None:
    """What a local rank runs; its report is the last thing it does."""
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    with StopRequest().listening(insist=False) as stop:
        try:
            report = _Report(run_rank(config, resume, stop, rank=rank, rendezvous=rendezvous))
        except PeerUserError:
            report = _Report(EXIT_USER_ERROR)
        except UserError as error:
            report = _Report(EXIT_USER_ERROR, user_error=str(error))
        except Exception:
            report = _Report(EXIT_FAILED, traceback=traceback.format_exc())
        reports.send(report)
    sys.exit(report.status)


def _end_with_parent(lifeline: connection.Connection) -> None:
    """Ends this process as soon as its parent is gone, however that died."""
    try:
        lifeline.recv()
    except (EOFError, OSError):
        os._exit(EXIT_FAILED)
