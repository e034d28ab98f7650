"""ctypes mirrors of the kernels' argument structs (src/cpp/core/args.h) and of the emulator tests' own.

A launch fails unless a struct has the size that the compiler gave it, so a mirror cannot fall behind unnoticed.
"""

from __future__ import annotations

import ctypes

# Positions in the enumerations of src/cpp/core/formats.h.
FORMATS = ("int8", "int6", "int5", "int4", "uint4", "nf4", "fp4_e2m1", "fp4_e3m0", "fp8_e4m3", "fp8_e5m2")
DTYPES = ("float32", "float16", "bfloat16")


class Dense(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("row_stride", ctypes.c_int64))


class Packed(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("scale_dtype", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("group_size", ctypes.c_int),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
    )


class Rounding(ctypes.Structure):
    _fields_ = (("stochastic", ctypes.c_bool), ("seed", ctypes.c_void_p), ("element_offset", ctypes.c_int64))


class QuantizeArgs(ctypes.Structure):
    _fields_ = (("x", Dense), ("out", Packed), ("rounding", Rounding))


class DequantizeArgs(ctypes.Structure):
    _fields_ = (("in", Packed), ("out", Dense))


class AccumulateArgs(ctypes.Structure):
    _fields_ = (("inout", Packed), ("x", Dense), ("factor", ctypes.c_float), ("rounding", Rounding))


class Shards(ctypes.Structure):
    _fields_ = (
        ("first", Packed),
        ("count", ctypes.c_int64),
        ("codes_stride", ctypes.c_int64),
        ("scales_stride", ctypes.c_int64),
    )


class ReduceArgs(ctypes.Structure):
    _fields_ = (("in", Shards), ("factor", ctypes.c_float), ("out", Dense))


class ReduceQuantizeArgs(ctypes.Structure):
    _fields_ = (("in", Shards), ("factor", ctypes.c_float), ("out", Packed), ("rounding", Rounding))


class NormArgs(ctypes.Structure):
    _fields_ = (("in", Packed), ("partial", ctypes.c_void_p))


class NormCall(ctypes.Structure):
    """kernels/package.cpp: norm's struct and the two pointers that its launcher takes beside it."""

    _fields_ = (("args", NormArgs), ("sum", ctypes.c_void_p), ("nonfinite", ctypes.c_void_p))


class RowNorm(ctypes.Structure):
    _fields_ = (("centered", ctypes.c_bool), ("weight", Dense), ("bias", Dense), ("eps", ctypes.c_float))


class RowNormQuantizeArgs(ctypes.Structure):
    _fields_ = (("x", Dense), ("norm", RowNorm), ("y", Dense), ("out", Packed))


class RowNormBackwardArgs(ctypes.Structure):
    _fields_ = (
        ("in", Packed),
        ("dtype", ctypes.c_int32),
        ("norm", RowNorm),
        ("dy", Dense),
        ("dx", Dense),
        ("y", Dense),
        ("dweight", ctypes.c_void_p),
        ("dbias", ctypes.c_void_p),
        ("parts", ctypes.c_int64),
    )


class PartSumArgs(ctypes.Structure):
    _fields_ = (
        ("partial", ctypes.c_void_p),
        ("parts", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("out", ctypes.c_void_p),
    )


class SwigluQuantizeArgs(ctypes.Structure):
    _fields_ = (("gate", Dense), ("up", Dense), ("h", Dense), ("gate_out", Packed), ("up_out", Packed))


class SwigluBackwardArgs(ctypes.Structure):
    _fields_ = (
        ("gate", Packed),
        ("up", Packed),
        ("gate_dtype", ctypes.c_int32),
        ("up_dtype", ctypes.c_int32),
        ("dh", Dense),
        ("dgate", Dense),
        ("dup", Dense),
        ("h", Dense),
    )


class GeluQuantizeArgs(ctypes.Structure):
    _fields_ = (("tanh", ctypes.c_bool), ("x", Dense), ("y", Dense), ("out", Packed))


class GeluBackwardArgs(ctypes.Structure):
    _fields_ = (
        ("tanh", ctypes.c_bool),
        ("in", Packed),
        ("dtype", ctypes.c_int32),
        ("dy", Dense),
        ("dx", Dense),
        ("y", Dense),
    )


class Probe(ctypes.Structure):
    """kernels/plant.h: what the kernels of the emulator's own tests get."""

    _fields_ = (
        ("in", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("n", ctypes.c_int64),
    )
