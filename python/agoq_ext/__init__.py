"""agoq_ext: 4-bit activations, 8-bit gradients and quantized collectives for training transformers."""

from __future__ import annotations

from . import collectives, ddp, nn, pipeline
from ._version import __version__
from .activation import (
    ActivationPolicy,
    ActivationReport,
    ConversionReport,
    Override,
    TensorFormat,
    activation_report,
    compress_activations,
    restore,
)
from .collectives import all_reduce
from .tensor import QuantizedTensor, dequantize, quantize

__all__ = [
    "ActivationPolicy",
    "ActivationReport",
    "ConversionReport",
    "Override",
    "QuantizedTensor",
    "TensorFormat",
    "__version__",
    "activation_report",
    "all_reduce",
    "collectives",
    "compress_activations",
    "ddp",
    "dequantize",
    "nn",
    "pipeline",
    "quantize",
    "restore",
]
