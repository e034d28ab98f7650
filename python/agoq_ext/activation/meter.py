"""SavedBytesMeter: the bytes kept for backward at every moment of a training step, and their peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class _Kept:
    """One saved tensor; the meter hears when autograd lets go of it."""

    __slots__ = ("key", "meter", "tensor")

    def __init__(self, meter: SavedBytesMeter, tensor: Tensor, key: int) -> None:
        self.meter, self.tensor, self.key = meter, tensor, key

    def __del__(self) -> None:
        self.meter._drop(self.key, self.tensor)


class SavedBytesMeter:
    """Context in which what autograd saves is counted, each storage once and whole, until its last saver drops it.

    With many micro-batches in flight, as in a pipeline, `peak_bytes` is what the stage needs for activations.
    Storages of the parameters and buffers of `modules` are not counted. Only what is saved inside the context counts,
    on the thread that entered it; saved-tensor hooks entered inside hide what is saved under them.

    Attributes:
        live_bytes: kept now. peak_bytes: the most that was ever kept at once.
    """

    def __init__(self, modules: nn.Module | Iterable[nn.Module] = ()) -> None:
        modules = [modules] if isinstance(modules, nn.Module) else list(modules)
        self.live_bytes = 0
        self.peak_bytes = 0
        self._modules = modules
        self._savers: Counter[int] = Counter()
        self._hooks: list[saved_tensors_hooks] = []

    def __enter__(self) -> SavedBytesMeter:
        self._parameters = {
            t.untyped_storage()._cdata for m in self._modules for t in (*m.parameters(), *m.buffers())
        }
        self._hooks.append(saved_tensors_hooks(self._pack, lambda kept: kept.tensor))
        self._hooks[-1].__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.pop().__exit__(*exception)

    def _pack(self, x: Tensor) -> _Kept:
        x = x.detach()  # an output of the operation that saves it would otherwise keep itself alive
        key = x.untyped_storage()._cdata
        self._savers[key] += 1
        if self._savers[key] == 1 and key not in self._parameters:
            self.live_bytes += x.untyped_storage().nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return _Kept(self, x, key)

    def _drop(self, key: int, x: Tensor) -> None:
        self._savers[key] -= 1
        if self._savers[key] == 0:
            del self._savers[key]
            if key not in self._parameters:
                self.live_bytes -= x.untyped_storage().nbytes()
