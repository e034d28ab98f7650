"""A request to stop, made by SIGINT or SIGTERM and honoured between two steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from .world import World

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Signals this close together are one request: `timeout` sends its own twice, to the process and to its group.
SAME_REQUEST_SECONDS = 1.0


class StopRequest:
    """Holds the first signal received, 0 until there is one."""

    def __init__(self) -> None:
        self.signal = 0
        self._time = 0.0

    def receive(self, number: int) -> bool:
        """Takes a signal; whether it is a second request and not the first one, or its echo."""
        now = time.monotonic()
        second = bool(self.signal) and now - self._time >= SAME_REQUEST_SECONDS
        if not self.signal:
            self.signal, self._time = number, now
        return second

    def agreed(self, world: World) -> int:
        """The signal that any rank has received (a collective call)."""
        return int(world.gather([self.signal]).max())

    @contextmanager
    def listening(self, *, insist: bool = True) -> Iterator[StopRequest]:
        """Takes SIGINT and SIGTERM while the block runs.

        Args:
            insist: whether a second request acts as if nobody listened. A rank started by the launcher leaves that
                to the launcher: Ctrl-C in a terminal reaches it twice, from the terminal and from there.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {number: signal.getsignal(number) for number in SIGNALS}

        def receive(number: int, frame: FrameType | None) -> None:
            if self.receive(number) and insist:
                for n, handler in previous.items():
                    signal.signal(n, handler)
                signal.raise_signal(number)

        for number in SIGNALS:
            signal.signal(number, receive)
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def exit_status(number: int) -> int:
    """The status with which a program ends that a signal stopped; 0 for none."""
    return 128 + number if number else 0
