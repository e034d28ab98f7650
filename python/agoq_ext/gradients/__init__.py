"""8-bit gradient storage: gradients live as codes from the moment backward makes them until the optimizer reads them.

`buckets` lays parameters out in messages of codes; `exchange` reduces them between ranks as they are; `shards` holds
the part of each parameter that a rank steps (ZeRO-1); `optimizers` steps an optimizer part by part; `store` is
`GradientStore` itself. docs/gradients.md states the guarantees.
"""

from __future__ import annotations

from .sink import GradientSink
from .store import GradientStore, StepResult

__all__ = ["GradientSink", "GradientStore", "StepResult"]
