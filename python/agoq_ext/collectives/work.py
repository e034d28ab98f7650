"""The handle of a collective in flight."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Work(dist.Work):
    """What an asynchronous collective returns, used like the Work of torch.distributed.

    `wait()` and the future cover the whole operation, dequantization included. For tensors on a CUDA device both
    order the current stream after the operation and do not block the host for it.
    """

    def __init__(self, op: str, tensors: list[Tensor]) -> None:
        super().__init__()
        self._op = op
        self._tensors = tensors
        self._error: BaseException | None = None
        self._known = False  # the outcome is; callbacks of the future may still run
        self._over = threading.Event()
        self._device_event: torch.cuda.Event | None = None
        # The thread that will finish this work, and runs the callbacks; it must not block on it.
        self.runs_on: threading.Thread | None = None
        devices: list[int | str | torch.device] = [t.device for t in tensors if t.is_cuda]
        self._source: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
        # torch keeps an exception set from Python as a value, which C++ (DDP's reducer) takes for success; one that a
        # callback raises is an error to both.
        self._future = self._source.then(lambda future: future.value())
        self._once = threading.Lock()

    def finish(self, device_event: torch.cuda.Event | None = None) -> None:
        """Marks the result as written, on the device once `device_event` has passed. The first outcome counts."""
        if self._once.acquire(blocking=False):
            self._device_event = device_event
            self._known = True
            self._source.set_result(self._tensors)
            self._over.set()

    def fail(self, error: BaseException) -> None:
        """Marks the work as failed. The first outcome counts."""
        if self._once.acquire(blocking=False):
            self._error = error
            self._known = True
            self._source.set_exception(RuntimeError(str(error)))  # type: ignore[arg-type]
            self._over.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the result is written, for ever if `timeout` is None or zero (what C++ passes); True.

        Raises:
            RuntimeError: the exchange failed, or this is a callback of an earlier collective on the same group,
                which that collective's thread runs and which therefore must not wait.
            TimeoutError: the work is not over after `timeout`. It stays in flight.
        """
        if self.runs_on is threading.current_thread():
            if not self._known:
                raise RuntimeError(
                    f"{self._op}: a callback must not wait for a later collective on the same group"
                )
        elif not self._over.wait(timeout.total_seconds() if timeout else None):
            raise TimeoutError(f"{self._op}: not finished after {timeout}")
        if self._error is not None:
            raise self._error
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Orders the current stream after the operation, which must have been issued."""
        if self._device_event is not None:
            torch.cuda.current_stream(self._tensors[0].device).wait_event(self._device_event)

    def is_completed(self) -> bool:
        """Whether the operation is over, with or without an error."""
        return self._over.is_set() and (self._device_event is None or self._device_event.query())

    def is_success(self) -> bool:
        """Whether the operation is over without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """The error of an operation that failed."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that the operation writes."""
        return self._tensors

    def get_future(self) -> Any:
        """A torch.futures.Future of the list of the tensors that the operation writes."""
        return self._future
