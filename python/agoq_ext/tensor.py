"""QuantizedTensor, and the functions that make it and expand it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import layout, ops


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor stored as group-scaled codes (docs/formats.md).

    Attributes:
        packed: uint8 [rows, row_bytes], the codes.
        scales: bfloat16 or float32 [rows, groups]; [rows, groups, 2] = (scale, min) for uint4.
        shape: shape of the tensor that was quantized.
        dtype: dtype of the tensor that was quantized, and of `dequantize()` by default.
        format: name of the code, e.g. "int4".
        group_size: elements that share a scale, along the last dimension.
        layout: order of the packed bytes; "rows".
    """

    packed: Tensor
    scales: Tensor
    shape: torch.Size
    dtype: torch.dtype
    format: str
    group_size: int
    layout: str = "rows"

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return self.packed.nbytes + self.scales.nbytes

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, `dtype` (default: the original dtype) of `shape`.

        A tensor that CuPy and NumPy read without a copy, e.g. `numpy.from_dlpack(q.dequantize(torch.float32))`.
        """
        _, cols = layout.as_rows(self.shape)
        out = ops.dequantize(
            self.packed, self.scales, cols, self.format, self.group_size, dtype or self.dtype
        )
        return out.reshape(self.shape)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> QuantizedTensor:
        """The same codes on `device`; itself if it is there."""
        packed = self.packed.to(device, non_blocking=non_blocking)
        if packed is self.packed:
            return self
        return replace(self, packed=packed, scales=self.scales.to(device, non_blocking=non_blocking))

    def __repr__(self) -> str:
        return (
            f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, format={self.format!r}, "
            f"group_size={self.group_size}, nbytes={self.nbytes}, device='{self.device}')"
        )


torch.serialization.add_safe_globals([QuantizedTensor])


def quantize(
    x: Any,
    format: str = "int4",
    group_size: int = 128,
    scale_dtype: torch.dtype = torch.bfloat16,
    rounding: str = "nearest",
    seed: int | Tensor | None = None,
    layout: str = "rows",
) -> QuantizedTensor:
    """Quantizes `x` in groups along its last dimension.

    Args:
        x: float32, float16 or bfloat16, any shape and strides: a tensor, or an array that DLPack or
            `__cuda_array_interface__` describes (NumPy, CuPy), which is read where it lies.
        format: int8, int6, int5, int4, uint4, nf4, fp4_e2m1, fp4_e3m0, fp8_e4m3 or fp8_e5m2.
        group_size: 32, 64, 128 or 256 elements that share one scale.
        scale_dtype: torch.bfloat16 or torch.float32.
        rounding: "nearest" (ties to the even code) or "stochastic" (unbiased, Philox4x32-10).
        seed: for stochastic rounding: an int, an int64 tensor of one element on x's device, or None to draw one
            from torch's generator.
        layout: order of the packed bytes; "rows".

    A group that holds NaN or Inf decodes to NaN; an all-zero group to exact zeros.

    Raises:
        ValueError, TypeError: an argument is not one of the above.
    """
    _check_layout("quantize", layout)
    x = _as_tensor("quantize", x)
    packed, scales = ops.quantize(x, format, group_size, scale_dtype, rounding, seed)
    return QuantizedTensor(packed, scales, x.shape, x.dtype, format, group_size, layout)


def dequantize(q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """The values of `q`: `dtype` (default: the dtype it was made from) of `q.shape`."""
    if not isinstance(q, QuantizedTensor):
        raise TypeError(f"dequantize: q must be a QuantizedTensor; got {type(q).__name__}")
    return q.dequantize(dtype)


def _as_tensor(op: str, x: Any) -> Tensor:
    """`x` as a tensor over the same memory."""
    if isinstance(x, Tensor):
        return x
    if hasattr(x, "__cuda_array_interface__"):
        return torch.as_tensor(x)
    if hasattr(x, "__array_interface__") or hasattr(x, "__dlpack__"):
        try:
            return torch.from_dlpack(x)
        except (BufferError, RuntimeError):  # a read-only array, say
            return torch.as_tensor(x)
    raise TypeError(f"{op}: x must be a torch.Tensor or an array with DLPack; got {type(x).__name__}")


def _check_layout(op: str, name: str) -> None:
    if name not in layout.LAYOUTS:
        raise ValueError(f"{op}: layout must be one of {', '.join(layout.LAYOUTS)}; got {name!r}")
