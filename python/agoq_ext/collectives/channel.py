"""What a process keeps for each process group: connections, the FIFO worker, what was agreed, what was sent."""

from __future__ import annotations

import atexit
import contextlib
import math
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .._version import __version__
from .transport import DeviceTransport, HostTransport, Transport, exchanges_on_device, store_of, timeout_of
from .work import Work

# Bytes of the text that ranks compare before they first exchange anything.
RECORD_BYTES = 256
_RECORD_PREFIX = "agoq_ext "
# Distinct calls whose agreement is remembered. All ranks have the same history, so all forget together.
_MAX_AGREED = 4096

# Called with one transport for each group of the channel.
Body = Callable[..., None]


class Disagreement(RuntimeError):
    """The ranks of a group did not call the same collective with the same options; raised on all of them."""


class Channel:
    """One process group, or the two of a two-level exchange, as this process sees them.

    Host exchanges run in FIFO order on one thread, over a Gloo group that nobody else uses, whether the caller
    waits for them or not. So calls match across ranks if every rank issues them in the same order, and what the
    caller does on its own group in between does not matter. Device exchanges are issued by the caller's thread.

    After a failed host exchange the ranks may be out of step, so the channel stays broken: it closes its
    connections, which tells the peers, and every later call fails at once and names the first failure.
    """

    def __init__(self, *groups: dist.ProcessGroup) -> None:
        self.rank, self.world = groups[0].rank(), math.prod(group.size() for group in groups)
        # Not the groups themselves: a channel must not keep alive what it is found by.
        self._members = [(store_of(g), g.rank(), g.size(), timeout_of(g)) for g in groups]
        self._name = "agoq_ext" if len(groups) == 1 else "agoq_ext/two_level"
        self._lock = threading.Lock()
        self._sent = 0
        self._agreed: set[str] = set()
        self._host: list[HostTransport] | None = None
        self._failure: str | None = None
        self._aborted = False
        self._flying: weakref.WeakSet[Work] = weakref.WeakSet()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    # --- bytes ---

    @property
    def bytes_sent(self) -> int:
        return self._sent

    def add_bytes(self, count: int) -> None:
        with self._lock:
            if self._failure is not None:  # aborted meanwhile: nothing is written any more
                raise RuntimeError(self._failure)
            self._sent += count

    def reset_bytes(self) -> None:
        with self._lock:
            self._sent = 0

    # --- running ---

    def run(
        self,
        op: str,
        body: Body,
        tensors: list[Tensor],
        groups: Sequence[dist.ProcessGroup],
        inputs: Sequence[Tensor] = (),
    ) -> Work:
        """Runs `body`, which exchanges through the transports it is given and writes `tensors`; the work in flight.

        A device exchange is issued on a stream of its own, in order with the current one; `inputs` are the other
        tensors that `body` uses.
        """
        work = Work(op, tensors)
        device = tensors[0].device
        if exchanges_on_device(groups[0], device):
            with self._stream([*tensors, *inputs], None) as event:
                body(*self._device_transports(groups, device))
                event.record()
                work.finish(event)
        else:
            self._submit(op, body, tensors, inputs, work)
        return work

    def run_now(
        self,
        op: str,
        body: Body,
        tensors: list[Tensor],
        groups: Sequence[dist.ProcessGroup],
        inputs: Sequence[Tensor] = (),
    ) -> None:
        """Like `run`, and waits: the host for a host exchange, the current stream for a device exchange."""
        device = tensors[0].device
        if exchanges_on_device(groups[0], device):
            body(*self._device_transports(groups, device))
        else:
            self.run(op, body, tensors, groups, inputs).wait()

    def _device_transports(
        self, groups: Sequence[dist.ProcessGroup], device: torch.device
    ) -> list[DeviceTransport]:
        return [DeviceTransport(group, device, self.add_bytes) for group in groups]

    def _submit(
        self, op: str, body: Body, tensors: list[Tensor], inputs: Sequence[Tensor], work: Work
    ) -> None:
        ready = None
        if tensors[0].is_cuda:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(tensors[0].device))

        def task() -> None:
            try:
                with torch.no_grad():
                    if ready is None:
                        body(*self._host_transports(op))
                        work.finish()
                    else:
                        with self._stream([*tensors, *inputs], ready) as event:
                            body(*self._host_transports(op))
                            event.record()
                            work.finish(event)
            except Disagreement as error:
                work.fail(error)
            except BaseException as error:
                work.fail(self._break(op, error))

        with self._lock:
            if self._aborted:  # the worker may be stuck, and will not come to this call
                work.fail(self._refusal(op))
                return
            if self._worker is None:
                # A daemon: a peer that never answers must not keep this process from exiting.
                self._worker = threading.Thread(
                    target=_serve, args=(self._tasks,), name="agoq_ext", daemon=True
                )
                self._worker.start()
                _workers[self._worker] = self._tasks
            work.runs_on = self._worker
            self._flying.add(work)
            self._tasks.put(task)

    def _host_transports(self, op: str) -> list[HostTransport]:
        if self._failure is not None:
            raise self._refusal(op)
        if self._host is None:
            self._host = [
                HostTransport(store, rank, world, timeout, self.add_bytes, self._name)
                for store, rank, world, timeout in self._members
            ]
        return self._host

    def _refusal(self, op: str) -> RuntimeError:
        return RuntimeError(
            f"{op}: an earlier exchange on this group failed, so the group cannot be used any more "
            f"({self._failure})"
        )

    def _break(self, op: str, error: BaseException) -> BaseException:
        if self._failure is not None:
            return error
        self._failure = str(error)
        # The frames hold buffers and exchanges in flight, which whoever keeps the error would keep.
        traceback.clear_frames(error.__traceback__)
        for transport in self._host or ():
            transport.close()
        failure = RuntimeError(f"{op}: rank {self.rank} of {self.world}: the exchange failed: {error}")
        failure.__cause__ = error
        return failure

    @contextlib.contextmanager
    def _stream(
        self, tensors: Sequence[Tensor], ready: torch.cuda.Event | None
    ) -> Iterator[torch.cuda.Event]:
        """Makes the channel's stream on the tensors' device current, after `ready` or the present current stream."""
        device = tensors[0].device
        with torch.cuda.device(device):
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            if ready is None:
                stream.wait_stream(torch.cuda.current_stream(device))
            else:
                stream.wait_event(ready)
            for tensor in tensors:
                tensor.record_stream(stream)
            with torch.cuda.stream(stream):
                yield torch.cuda.Event()

    def close(self) -> None:
        """Ends the worker once it has done what was submitted."""
        self._tasks.put(None)

    def abort(self) -> None:
        """Ends every call in flight, and every later one, with an error; does not wait for anything."""
        error = RuntimeError(f"rank {self.rank} of {self.world}: the group was aborted")
        with self._lock:
            self._failure, self._aborted = self._failure or str(error), True
            flying = list(self._flying)
        for work in flying:
            work.fail(error)
        self._tasks.put(None)

    # --- agreement ---

    def agree(self, transports: Sequence[Transport], op: str, call: str) -> None:
        """Makes sure that all ranks make this call with this version; exchanges a record the first time only.

        With TORCH_DISTRIBUTED_DEBUG=INFO or DETAIL every call is compared.

        Raises:
            Disagreement: on every rank, with the records of all.
        """
        if call in self._agreed and dist.get_debug_level() == dist.DebugLevel.OFF:
            return
        if transports[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{op}: the first call with new options or a new size must happen before a CUDA graph is captured"
            )
        own = f"{_RECORD_PREFIX}{__version__} {call}"
        records, width = [own], RECORD_BYTES
        for transport in transports:
            # The second level compares what the first one has found, so that every rank learns of every rank.
            found = records[0]
            if len(set(records)) > 1:
                found = (_RECORD_PREFIX + _join(records)).encode()[:width].decode(errors="ignore")
            records = [r.decode(errors="replace") for r in _gather_records(transport, found, width)]
            width *= transport.world + 1
            for rank, record in enumerate(records):
                if not record.startswith(_RECORD_PREFIX):
                    raise RuntimeError(
                        f"{op}: rank {rank} is making another call than rank {transport.rank}, which makes {own}"
                    )
        if len(set(records)) > 1 or _SEPARATOR in records[0]:
            raise Disagreement(f"{op}: the ranks of the group disagree: {_join(records)}")
        if len(self._agreed) >= _MAX_AGREED:
            self._agreed.clear()
        self._agreed.add(call)


_SEPARATOR = "; "


def _join(records: list[str]) -> str:
    return _SEPARATOR.join(f"rank {rank}: {record}" for rank, record in enumerate(records))


def _gather_records(transport: Transport, text: str, width: int) -> list[bytes]:
    data = text.encode()
    if len(data) > width:
        raise RuntimeError(f"collectives: the record of a call is longer than {width} bytes: {text}")
    record = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
    gathered = torch.empty(transport.world, width, dtype=torch.uint8, device=transport.device)
    transport.all_gather(gathered, record.to(transport.device)).wait()
    return [bytes(row).rstrip(b"\0") for row in gathered.tolist()]


def _serve(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Runs tasks in order until None arrives."""
    while (task := tasks.get()) is not None:
        task()
        del task  # holds tensors, which an idle worker must not keep alive


# --- at exit -------------------------------------------------------------------------------------------------

_workers: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Callable[[], None] | None]]
_workers = weakref.WeakKeyDictionary()
# Seconds that a process waits at exit for its workers, all together.
EXIT_SECONDS = 1.0


def _end_workers() -> None:
    """Lets workers end before the interpreter does.

    A daemon thread that comes back from C++ once the interpreter is going is unwound where it stands, which ends the
    process with an abort. One that waits for a peer keeps the process for `EXIT_SECONDS`, not longer.
    """
    deadline = time.monotonic() + EXIT_SECONDS
    workers = list(_workers.items())
    for _, tasks in workers:
        tasks.put(None)
    for worker, _ in workers:
        worker.join(max(0.0, deadline - time.monotonic()))


atexit.register(_end_workers)


# --- the channel of a group ----------------------------------------------------------------------------------

_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel] = weakref.WeakKeyDictionary()
_channels_lock = threading.Lock()


def resolve_group(op: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or the default group for None.

    Raises:
        RuntimeError: None, and torch.distributed is not initialized.
        TypeError: not a process group of which this rank is a member.
    """
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(f"{op}: torch.distributed is not initialized and no group is given")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{op}: group must be a process group that this rank is a member of; got {group!r}")
    return group


def channel_of(group: dist.ProcessGroup) -> Channel:
    """The channel of a group, made when it is first asked for; without any communication."""
    with _channels_lock:
        channel = _channels.get(group)
        if channel is None:
            channel = _channels[group] = Channel(group)
            # At interpreter exit nothing is left to tidy, and the worker may be blocked.
            weakref.finalize(group, channel.close).atexit = False
        return channel
