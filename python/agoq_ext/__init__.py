"""agoq_ext: 4-bit activations, 8-bit gradients and quantized collectives for training transformers."""

from __future__ import annotations

from . import collectives, ddp, jit, nn, pipeline
from ._version import __version__
from .activation import (
    ActivationPolicy,
    ActivationReport,
    BlockMap,
    ConversionReport,
    Override,
    TensorFormat,
    activation_report,
    calibrate,
    compress_activations,
    compress_saved_tensors,
    restore,
)
from .collectives import ErrorFeedback, TwoLevel, all_gather, all_reduce, reduce_scatter
from .diloco import StreamingDiLoCo
from .gradients import GradientStore
from .jit import get_include
from .tensor import QuantizedTensor, dequantize, quantize

__all__ = [
    "ActivationPolicy",
    "ActivationReport",
    "BlockMap",
    "ConversionReport",
    "ErrorFeedback",
    "GradientStore",
    "Override",
    "QuantizedTensor",
    "StreamingDiLoCo",
    "TensorFormat",
    "TwoLevel",
    "__version__",
    "activation_report",
    "all_gather",
    "all_reduce",
    "calibrate",
    "collectives",
    "compress_activations",
    "compress_saved_tensors",
    "ddp",
    "dequantize",
    "get_include",
    "jit",
    "nn",
    "pipeline",
    "quantize",
    "reduce_scatter",
    "restore",
]
