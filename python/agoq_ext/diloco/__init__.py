"""Streaming DiLoCo: replicas that train apart and exchange outer gradients rarely, in the background, in 4 bits.

`schedule` says what is exchanged when, `fragment` is a fragment's state, `exchange` the mean over the replicas,
`streaming` joins them around a training loop; `simulate` says what bandwidth that needs. docs/diloco.md is the guide.
"""

from __future__ import annotations

from .schedule import Fragments, Schedule
from .streaming import StreamingDiLoCo, Transfer, default_outer_optimizer

__all__ = ["Fragments", "Schedule", "StreamingDiLoCo", "Transfer", "default_outer_optimizer"]
