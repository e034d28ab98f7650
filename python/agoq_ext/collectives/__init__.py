"""Quantized collectives: what they exchange is codes and scales, what they compute is FP32.

`wire` turns a flat tensor into messages and back, without any communication; `transport` moves messages between
ranks; `pipeline` overlaps the chunks of an exchange; `segments` deals a call's tensors to flat ones; `feedback` keeps
what encodings lose; `channel` is what a process keeps for each process group; `functions` holds the collectives
themselves. docs/collectives.md states the guarantees.
"""

from __future__ import annotations

from .channel import Disagreement
from .counting import add_bytes_sent, bytes_sent, plain_all_reduce_bytes, reset_bytes_sent
from .feedback import ErrorFeedback
from .functions import all_gather, all_reduce, reduce_scatter, setup
from .two_level import TwoLevel
from .wire import Codec, mix_seed
from .work import Work

__all__ = [
    "Codec",
    "Disagreement",
    "ErrorFeedback",
    "TwoLevel",
    "Work",
    "add_bytes_sent",
    "all_gather",
    "all_reduce",
    "bytes_sent",
    "mix_seed",
    "plain_all_reduce_bytes",
    "reduce_scatter",
    "reset_bytes_sent",
    "setup",
]
