"""The fused kernels of the table: norms and activations, each with its packed input (see cases.py).

Results come from `agoq_ext.reference_fused`. Packed ones have equal bits. The others are near, for three reasons:

- FP32 sums in another order, and exp, erf and tanh in another last place: an error of a few FP32 roundings of the
  largest term of the sum, not of the result. Terms cancel: GELU's 1 + erf for negative x, a norm's dx in short rows.
- A rounding to a 16-bit dtype, of the output or on the way to it, that falls to the other side of a midpoint.
- The same in FP32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agoq_ext import layout, reference, reference_fused

from . import structs
from .cases import (
    _CODEC,
    ALIGNMENTS,
    Case,
    Expected,
    Fields,
    Op,
    Trial,
    dense_array,
    dtype_index,
    generator,
    make_dense,
    packed_fields,
    to_bytes,
)
from .device import Array, Call, Pointer

EPS = 1e-5


def near(
    array: Array,
    x: Tensor,
    roundings: int = 2,
    through: torch.dtype | None = None,
    terms: float = 0.0,
    flips: Tensor | None = None,
) -> Expected:
    """`x` as `array` holds it, up to errors of roundings and of FP32 sums.

    Args:
        roundings: how many there are on the way, in x's dtype or in `through`, whichever is coarser.
        terms: the largest term that cancels in a sum; FP32 errors are relative to it and to the largest of x.
        flips: for each element, what the terms of its sum may differ by where they are rounded to 16 bits.
    """
    eps = max(torch.finfo(dtype).eps for dtype in (x.dtype, through or x.dtype))
    atol = 4e-6 * max(largest(x), terms)
    if flips is None:
        return Expected(array.data, x.dtype, rtol=roundings * eps, atol=atol)
    return Expected(
        array.data, x.dtype, rtol=roundings * eps, atol=atol + flips.double().nan_to_num().flatten()
    )


def largest(x: Tensor) -> float:
    """The largest magnitude of a finite element."""
    finite = x.double().nan_to_num(0.0, 0.0, 0.0).abs()
    return float(finite.max()) if x.numel() else 0.0


class Launch:
    """Collects the buffers of a call, its fields and its expected results."""

    def __init__(self, case: Case):
        self.case, self.arrays, self.expected = case, [], {}  # type: ignore[var-annotated]

    def input(self, name: str, x: Tensor, alignment: str | None = None) -> Fields:
        array, fields = dense_array(name, "input", x, alignment or self.case["alignment"])
        self.arrays.append(array)
        return fields

    def output(self, name: str, x: Tensor | None, roundings: int = 2, **how: Any) -> Fields:
        if x is None:
            return absent(torch.float32)
        array, fields = dense_array(name, "output", x, self.case["alignment"])
        self.arrays.append(array)
        self.expected[name] = near(array, x, roundings, **how)
        return fields

    def vector(self, name: str, x: Tensor | None) -> Fields:
        return absent(torch.float32) if x is None else self.input(name, x[None], self.case["vectors"])

    def sums(self, name: str, parts: Tensor | None, **how: Any) -> Pointer | None:
        if parts is None:
            return None
        array = Array(name, "output", to_bytes(parts))
        self.arrays.append(array)
        self.expected[name] = near(array, parts, **how)
        return Pointer(name)

    def packed(self, name: str, role: str, codes: Tensor | None, scales: Tensor | None) -> Fields:
        if codes is None or scales is None:
            return {**packed_fields(self.case, None, None)}  # type: ignore[arg-type]
        for part, content, at in (("codes", codes, 16), ("scales", scales, 48)):
            array = Array(f"{name}.{part}", role, to_bytes(content), misalignment=at)
            self.arrays.append(array)
            if role == "output":
                self.expected[array.name] = Expected(array.data)
        return packed_fields(self.case, Pointer(f"{name}.codes"), Pointer(f"{name}.scales"))

    def trial(self, kernel: str, struct: Any, fields: Fields) -> Trial:
        return Trial(Call(kernel, struct, fields, tuple(self.arrays)), self.expected)


def absent(dtype: torch.dtype) -> Fields:
    return {"data": None, "dtype": dtype_index(dtype), "row_stride": 0}


def make_input(case: Case, g: torch.Generator, dtype: torch.dtype) -> Tensor:
    """make_dense's special groups, within a range where squares and products neither over- nor underflow."""
    x = make_dense(case, g, torch.float32)
    return torch.where(x.isfinite(), x.clamp(-100, 100), x).to(dtype)


def random(shape: tuple[int, ...], g: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=g).to(dtype)


def saved(case: Case, x: Tensor) -> tuple[Tensor, Tensor]:
    return reference.quantize(x, case["format"], case["group_size"], case["scale_dtype"], "nearest", None)


# --- norms ----------------------------------------------------------------------------------------------------


def norm_of(case: Case) -> str:
    return "layer_norm" if case["centered"] else "rms_norm"


def norm_parameters(case: Case, g: torch.Generator) -> tuple[Tensor | None, Tensor | None]:
    shape = (case["cols"],)
    weight, bias = random(shape, g, case["weight_dtype"]), random(shape, g, case["weight_dtype"])
    if not case["centered"]:
        return weight, None
    return (weight, bias) if case["affine"] else (None, None)


def rounded_inside(case: Case) -> torch.dtype | None:
    """RMS norm rounds the normalized x to its dtype before the weight, which may be finer, multiplies it."""
    return None if case["centered"] else case["dtype"]


def norm_fields(case: Case, launch: Launch, weight: Tensor | None, bias: Tensor | None) -> Fields:
    return {
        "centered": case["centered"],
        "weight": launch.vector("weight", weight),
        "bias": launch.vector("bias", bias),
        "eps": EPS,
    }


def build_row_norm_quantize(case: Case) -> Trial:
    g = generator(case)
    x = make_input(case, g, case["dtype"])
    weight, bias = norm_parameters(case, g)
    parameters = (weight, bias) if case["centered"] else (weight,)
    quantize = getattr(reference_fused, f"{norm_of(case)}_quantize")
    y, codes, scales = quantize(x, *parameters, EPS, case["format"], case["group_size"], case["scale_dtype"])
    launch = Launch(case)
    fields = {
        "x": launch.input("x", x),
        "norm": norm_fields(case, launch, weight, bias),
        "y": launch.output("y", y, through=rounded_inside(case)),
        "out": launch.packed("out", "output", codes, scales),
    }
    return launch.trial("row_norm_quantize", structs.RowNormQuantizeArgs, fields)


def build_row_norm_backward(case: Case) -> Trial:
    g = generator(case)
    codes, scales = saved(case, make_input(case, g, case["dtype"]))
    weight, bias = norm_parameters(case, g)
    rows, cols, codec = case["rows"], case["cols"], (case["format"], case["group_size"])
    wants, centered = case["wants"], case["centered"]
    parameters = (weight, bias) if centered else (weight,)
    dequantize = getattr(reference_fused, f"{norm_of(case)}_dequantize")
    backward = getattr(reference_fused, f"{norm_of(case)}_backward")
    y = dequantize(codes, scales, cols, *parameters, EPS, *codec, case["dtype"])
    dy = random((rows, cols), g, y.dtype)
    # One row, or two, a part.
    parts = -(-rows // 2) if case["parts"] == "pairs" else rows
    height = -(-rows // parts)
    dx = backward(dy, codes, scales, weight, EPS, *codec, case["dtype"])[0]
    pieces = [[x[r : r + height] for x in (dy, codes, scales)] for r in range(0, rows, height)]
    sums = [backward(*piece, weight, EPS, *codec, case["dtype"])[1:] for piece in pieces]
    wanted_sums = [torch.stack(s) if wants in ("all", "sums") else None for s in zip(*sums, strict=True)]
    # Of dx = rstd (h - ...): |h| and rstd at most.
    x = reference.dequantize(codes, scales, cols, *codec, torch.float32)
    variance = (x - x.mean(-1, keepdim=True) if centered else x).square().mean(-1, keepdim=True)
    h = dy.float() if weight is None else dy.float() * weight.float()
    rstd = (variance + EPS).rsqrt()
    terms = largest(h * rstd)
    how: dict[str, Any] = {"through": rounded_inside(case)}
    products = (dy.float() * x * rstd).abs()
    sizes = torch.stack([products[r : r + height].sum(0) for r in range(0, rows, height)])
    flips = None if centered else torch.finfo(case["dtype"]).eps * sizes
    launch = Launch(case)
    fields = {
        "in": launch.packed("in", "input", codes, scales),
        "dtype": dtype_index(case["dtype"]),
        "norm": norm_fields(case, launch, weight, bias),
        "dy": launch.input("dy", dy) if wants != "y" else absent(dy.dtype),
        "dx": launch.output("dx", dx if wants in ("all", "dx") else None, 3, **how, terms=terms),
        "y": launch.output("y", y if wants in ("all", "y") else None, **how),
        "dweight": launch.sums("dweight", wanted_sums[0], **how, flips=flips),
        "dbias": launch.sums("dbias", wanted_sums[1] if centered else None),
        "parts": parts,
    }
    return launch.trial("row_norm_backward", structs.RowNormBackwardArgs, fields)


def build_part_sum(case: Case) -> Trial:
    partial = torch.randn(case["parts"], case["cols"], generator=generator(case))
    fields = {
        "partial": Pointer("partial"),
        "parts": case["parts"],
        "cols": case["cols"],
        "out": Pointer("out"),
    }
    out = Array("out", "output", to_bytes(partial.sum(0)))
    call = Call("part_sum", structs.PartSumArgs, fields, (Array("partial", "input", to_bytes(partial)), out))
    terms = largest(partial.abs().sum(0))
    return Trial(call, {"out": near(out, partial.sum(0), terms=terms)})


# --- activations ----------------------------------------------------------------------------------------------


def build_swiglu_quantize(case: Case) -> Trial:
    g = generator(case)
    gate, up = make_input(case, g, case["dtype"]), make_input(case, g, case["up_dtype"])
    codec = (case["format"], case["group_size"], case["scale_dtype"])
    h, *kept = reference_fused.swiglu_quantize(gate, up, *codec, keep_up=case["keep_up"])
    launch = Launch(case)
    fields = {
        "gate": launch.input("gate", gate),
        "up": launch.input("up", up),
        "h": launch.output("h", h, through=case["dtype"]),
        "gate_out": launch.packed("gate_out", "output", *kept[:2]),
        "up_out": launch.packed("up_out", "output", *kept[2:]),
    }
    return launch.trial("swiglu_quantize", structs.SwigluQuantizeArgs, fields)


def build_swiglu_backward(case: Case) -> Trial:
    g = generator(case)
    gate, up = make_input(case, g, case["dtype"]), make_input(case, g, case["up_dtype"])
    h, *kept = reference_fused.swiglu_quantize(
        gate, up, case["format"], case["group_size"], case["scale_dtype"]
    )
    dh, wants = random(tuple(h.shape), g, h.dtype), case["wants"]
    dtypes = (case["dtype"], case["up_dtype"])
    dgate, dup, h = reference_fused.swiglu_backward(
        dh, *kept, case["format"], case["group_size"], *dtypes, need_h=True
    )
    how = {"through": case["dtype"]}
    launch = Launch(case)
    fields = {
        "gate": launch.packed("gate", "input", *kept[:2]),
        "up": launch.packed("up", "input", *(kept[2:] if wants != "dup" else (None, None))),
        "gate_dtype": dtype_index(dtypes[0]),
        "up_dtype": dtype_index(dtypes[1]),
        "dh": launch.input("dh", dh) if wants != "h" else absent(dh.dtype),
        "dgate": launch.output("dgate", dgate if wants == "all" else None, **how),
        "dup": launch.output("dup", dup if wants in ("all", "dup") else None, **how),
        "h": launch.output("h", h if wants in ("all", "h") else None, **how),
    }
    return launch.trial("swiglu_backward", structs.SwigluBackwardArgs, fields)


def build_gelu_quantize(case: Case) -> Trial:
    x = make_input(case, generator(case), case["dtype"])
    y, codes, scales = reference_fused.gelu_quantize(
        x, case["approximate"], case["format"], case["group_size"], case["scale_dtype"]
    )
    launch = Launch(case)
    fields = {
        "tanh": case["approximate"] == "tanh",
        "x": launch.input("x", x),
        "y": launch.output("y", y, terms=largest(x)),  # x (1 + erf) / 2
        "out": launch.packed("out", "output", codes, scales),
    }
    return launch.trial("gelu_quantize", structs.GeluQuantizeArgs, fields)


def build_gelu_backward(case: Case) -> Trial:
    g = generator(case)
    codes, scales = saved(case, make_input(case, g, case["dtype"]))
    dy, wants = random((case["rows"], case["cols"]), g, case["dtype"]), case["wants"]
    dx, y = reference_fused.gelu_backward(
        dy, codes, scales, case["approximate"], case["format"], case["group_size"], case["dtype"], need_y=True
    )
    x = largest(
        reference.dequantize(codes, scales, case["cols"], case["format"], case["group_size"], case["dtype"])
    )
    launch = Launch(case)
    fields = {
        "tanh": case["approximate"] == "tanh",
        "in": launch.packed("in", "input", codes, scales),
        "dtype": dtype_index(case["dtype"]),
        "dy": launch.input("dy", dy) if wants != "y" else absent(dy.dtype),
        "dx": launch.output("dx", dx if wants != "y" else None, terms=largest(dy)),
        "y": launch.output("y", y if wants != "dx" else None, terms=x),
    }
    return launch.trial("gelu_backward", structs.GeluBackwardArgs, fields)


# --- the table ------------------------------------------------------------------------------------------------

_FUSED: dict[str, tuple[Any, ...]] = {
    **_CODEC,
    "rows": (1, 3),
    "dtype": layout.FLOAT_DTYPES,
    "alignment": tuple(ALIGNMENTS),
}
# Rows of more octets than a block has threads.
_NORM: dict[str, tuple[Any, ...]] = {
    **_FUSED,
    "cols": (1, 33, 100, 256, 300, 2080),
    "weight_dtype": layout.FLOAT_DTYPES,
    "vectors": ("aligned", "offset"),
    "centered": (False, True),
    "affine": (True, False),
}
_BACKWARD = {**_NORM, "wants": ("all", "dx", "sums", "y"), "parts": ("rows", "pairs")}
_UP: dict[str, tuple[Any, ...]] = {"up_dtype": layout.FLOAT_DTYPES}
_GELU: dict[str, tuple[Any, ...]] = {"approximate": ("none", "tanh")}
_FIXED = {"rows": 3, "scale_dtype": torch.bfloat16}

FUSED_OPS = {
    "row_norm_quantize": Op(_NORM, build_row_norm_quantize, {**_FIXED, "affine": True, "vectors": "aligned"}),
    "row_norm_backward": Op(
        _BACKWARD,
        build_row_norm_backward,
        {**_FIXED, "affine": True, "vectors": "aligned", "wants": "all", "parts": "pairs"},
    ),
    "part_sum": Op({"format": ("int8",), "parts": (1, 7, 40), "cols": (1, 32, 100)}, build_part_sum, {}),
    "swiglu_quantize": Op({**_FUSED, **_UP, "keep_up": (True, False)}, build_swiglu_quantize, _FIXED),
    "swiglu_backward": Op({**_FUSED, **_UP, "wants": ("all", "dup", "h")}, build_swiglu_backward, _FIXED),
    "gelu_quantize": Op({**_FUSED, **_GELU}, build_gelu_quantize, _FIXED),
    "gelu_backward": Op({**_FUSED, **_GELU, "wants": ("all", "dx", "y")}, build_gelu_backward, _FIXED),
}
