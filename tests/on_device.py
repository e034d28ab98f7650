"""Runs functions on another device: tensors go there, and results come back to the CPU.

So a test written with CPU tensors tests the kernels of that device, with the same expectations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def on_device(function: Callable[..., Any], device: str | torch.device) -> Callable[..., Any]:
    """`function` with its tensors on `device`. What it changes in place is changed in the arguments too."""

    def call(*args: Any, **kwargs: Any) -> Any:
        moved: list[tuple[Tensor, Tensor, int]] = []

        def there(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            copy = to_device(value, device)
            moved.append((value, copy, copy._version))
            return copy

        result = function(*map(there, args), **{key: there(value) for key, value in kwargs.items()})
        for original, copy, version in moved:
            if copy._version > version:
                original.copy_(copy)
        return back(result)

    return call


def to_device(x: Tensor, device: str | torch.device) -> Tensor:
    """A copy of `x` on `device` with its strides and storage offset."""
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    offset, extent = x.storage_offset(), 1 + steps if x.numel() else 0
    storage = torch.empty(offset + extent, dtype=x.dtype, device=device)
    storage[offset:].copy_(x.detach().as_strided((extent,), (1,), offset))
    return storage.as_strided(x.shape, x.stride(), offset)


def back(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.cpu()
    return type(result)(map(back, result)) if isinstance(result, (tuple, list)) else result
