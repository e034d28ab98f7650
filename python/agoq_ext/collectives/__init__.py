"""Quantized collectives: what they exchange is codes and scales, what they compute is FP32.

`wire` turns a flat tensor into messages and back, without any communication; `transport` moves messages between
ranks; `channel` is what a process keeps for each process group; `functions` holds the collectives themselves.
docs/collectives.md states the guarantees.
"""

from __future__ import annotations

from .channel import Disagreement
from .functions import add_bytes_sent, all_reduce, bytes_sent, plain_all_reduce_bytes, reset_bytes_sent, setup
from .wire import Codec, mix_seed
from .work import Work

__all__ = [
    "Codec",
    "Disagreement",
    "Work",
    "add_bytes_sent",
    "all_reduce",
    "bytes_sent",
    "mix_seed",
    "plain_all_reduce_bytes",
    "reset_bytes_sent",
    "setup",
]
