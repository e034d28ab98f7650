"""Moves byte messages between the ranks of a group: through the host, or on the device's own streams."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


class Pending:
    """An exchange in flight."""

    def __init__(self, work: Any, sent: int, count: Callable[[int], None]) -> None:
        self._work, self._sent, self._count = work, sent, count

    def wait(self) -> None:
        """Ends when the messages are there: the host waits for a host exchange, the stream for a device one."""
        self._work.wait()
        self._count(self._sent)


class Transport:
    """Two exchanges of uint8 between all ranks of a group, and the count of bytes that they send.

    Both return at once. Ranks issue them in the same order, several may be in flight, and the tensors stay untouched
    until `Pending.wait` has returned.

    Attributes:
        rank, world: this process in the group, and the size of the group.
        device: where the messages must lie.
    """

    rank: int
    world: int
    device: torch.device

    def __init__(self, rank: int, world: int, device: torch.device, count: Callable[[int], None]) -> None:
        self.rank, self.world, self.device = rank, world, device
        self._count = count

    def all_to_all(self, received: Tensor, sent: Tensor) -> Pending:
        """received[r] <- what rank r sent to this one; both uint8 [world, n], contiguous."""
        size = sent.nbytes // self.world * (self.world - 1)
        return Pending(self._all_to_all(received.view(-1), sent.view(-1)), size, self._count)

    def all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """received[r] <- rank r's message; uint8 [world, n] and [n], contiguous."""
        size = sent.nbytes * (self.world - 1)
        return Pending(self._all_gather(received.view(-1), sent), size, self._count)

    def close(self) -> None:
        """Closes the connections that belong to this transport, so that a peer that waits fails at once."""

    def _all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        raise NotImplementedError

    def _all_gather(self, received: Tensor, sent: Tensor) -> Any:
        raise NotImplementedError


class HostTransport(Transport):
    """A Gloo group of its own over host memory.

    Gloo matches messages by the order in which a process issues its collectives, so one thread alone uses a
    transport. Making one is itself a collective: all ranks must do it.
    """

    # Each of Gloo's threads carries one exchange at a time; a pipeline keeps six in flight.
    THREADS = 6

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        world: int,
        timeout: timedelta,
        count: Callable[[int], None],
        name: str = "agoq_ext",
    ) -> None:
        super().__init__(rank, world, torch.device("cpu"), count)
        if not dist.is_gloo_available():
            raise RuntimeError("exchanging through the host needs a torch that is built with Gloo")
        if store is None:
            raise RuntimeError("exchanging through the host needs a group whose ranks met through a store")
        # A store's client serves one thread at a time, and this one may wait for peers while the caller goes on.
        own = store.clone() if hasattr(store, "clone") else store
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._threads, options._timeout = self.THREADS, timeout
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        options._devices = [gloo.create_device(interface=name) for name in interfaces] or [
            gloo.create_default_device()
        ]
        self._gloo: Any = gloo(dist.PrefixStore(name, own), rank, world, options)

    def close(self) -> None:
        self._gloo = None

    def _all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        options = distributed_c10d.AllToAllOptions()
        return _named(self._gloo, "alltoall_base", "all_to_all_single")(received, sent, [], [], options)

    def _all_gather(self, received: Tensor, sent: Tensor) -> Any:
        # As an all-to-all of equal messages: one step instead of a ring's W - 1, as many bytes, and every exchange
        # touches every peer, so that the death of any one ends every exchange in flight.
        return self._all_to_all(received, sent.expand(self.world, -1).reshape(-1))


def _named(backend: Any, *names: str) -> Callable[..., Any]:
    """The method of a backend that has one of these names; torch has renamed some."""
    return next(getattr(backend, name) for name in names if hasattr(backend, name))


class DeviceTransport(Transport):
    """The caller's own group, ordered on the current stream (NCCL); the host does not wait."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, count: Callable[[int], None]) -> None:
        super().__init__(group.rank(), group.size(), device, count)
        self._group = group

    def _all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        return dist.all_to_all_single(received, sent, group=self._group, async_op=True)

    def _all_gather(self, received: Tensor, sent: Tensor) -> Any:
        return dist.all_gather_into_tensor(received, sent, group=self._group, async_op=True)


def exchanges_on_device(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether `group` moves tensors of `device` on the device's streams; false for Gloo and for the CPU."""
    if device.type == "cpu":
        return False
    try:
        return group._get_backend(device).name() != "gloo"
    except RuntimeError:  # the group has no backend for this kind of device
        return False


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """The store through which the ranks of `group`, and nobody else, met; None for a group made by hand."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return distributed_c10d._get_process_group_store(group)  # an older torch


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The time after which an exchange of `group` that does not end is an error."""
    for device_type in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device_type)).options._timeout
        except (RuntimeError, AttributeError):  # no backend for that device, or one without options
            continue
    return distributed_c10d.default_pg_timeout
