"""agoq_ext: 4-bit activations, 8-bit gradients and quantized collectives for training transformers."""

from __future__ import annotations

from ._version import __version__
from .tensor import QuantizedTensor, dequantize, quantize

__all__ = ["QuantizedTensor", "__version__", "dequantize", "quantize"]
