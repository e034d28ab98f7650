"""Whole models: conversion, what it stores, and the measurement of what backward keeps."""

from __future__ import annotations

from .blocks import BlockMap
from .calibrate import Calibration, calibrate
from .conversion import ConversionReport
from .convert import compress_activations, restore
from .hooks import SavedTensorsReport, compress_saved_tensors
from .meter import SavedBytesMeter
from .policy import ActivationPolicy, Override, TensorFormat
from .report import ActivationReport, activation_report

__all__ = [
    "ActivationPolicy",
    "ActivationReport",
    "BlockMap",
    "Calibration",
    "ConversionReport",
    "Override",
    "SavedBytesMeter",
    "SavedTensorsReport",
    "TensorFormat",
    "activation_report",
    "calibrate",
    "compress_activations",
    "compress_saved_tensors",
    "restore",
]
