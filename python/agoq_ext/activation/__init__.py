"""Whole models: conversion, what it stores, and the measurement of what backward keeps."""

from __future__ import annotations

from .convert import ConversionReport, compress_activations, restore
from .meter import SavedBytesMeter
from .policy import ActivationPolicy, Override, TensorFormat
from .report import ActivationReport, activation_report

__all__ = [
    "ActivationPolicy",
    "ActivationReport",
    "ConversionReport",
    "Override",
    "SavedBytesMeter",
    "TensorFormat",
    "activation_report",
    "compress_activations",
    "restore",
]
