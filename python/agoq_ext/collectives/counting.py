"""Counts of the bytes that a process has sent, and the convention for what it has sent by other means."""

from __future__ import annotations

import torch.distributed as dist

from .channel import Channel, channel_of, resolve_group
from .two_level import TwoLevel

Group = dist.ProcessGroup | TwoLevel | None


def _channel(name: str, group: Group) -> Channel:
    return group.channel() if isinstance(group, TwoLevel) else channel_of(resolve_group(name, group))


def bytes_sent(group: Group = None) -> int:
    """Bytes that this process has handed to the network for other ranks of `group`, through this package.

    Messages with their padding, and the records that ranks compare; not what a rank sends to itself, and not what
    the transport adds (TCP, Gloo and NCCL headers, connecting). An all-gather to W ranks counts W - 1 copies, which
    is what direct and ring algorithms both send. An operation counts once it is over.
    """
    return _channel("bytes_sent", group).bytes_sent


def reset_bytes_sent(group: Group = None) -> None:
    """Sets `bytes_sent` of `group` to zero."""
    _channel("reset_bytes_sent", group).reset_bytes()


def add_bytes_sent(count: int, group: Group = None) -> None:
    """Adds to `bytes_sent` what the caller has sent by other means, so that one number holds all."""
    if count < 0:
        raise ValueError(f"add_bytes_sent: count must not be negative; got {count}")
    _channel("add_bytes_sent", group).add_bytes(count)


def plain_all_reduce_bytes(nbytes: int, world: int) -> int:
    """Bytes that a rank sends in an unquantized all-reduce of `nbytes`: 2 (world - 1) / world of them, rounded up.

    A convention, not a measurement: it is what ring and halving-doubling algorithms send, the least that any can.
    """
    return -(-2 * (world - 1) * nbytes // world)
