"""BF16 matrix products and attention at FP32 speed, on CPUs that have no BF16 instructions.

There (AVX2 and older) torch multiplies BF16 matrices 8 to 50 times slower than FP32 ones. `enable` replaces the CPU
kernels of mm, addmm, bmm and flash attention for BF16 operands: they are widened to FP32, which is exact, multiplied
and summed in FP32, and the result is rounded to BF16 once. That is what BF16 instructions compute, up to the order
of the sum. Autograd and autocast sit above these kernels and do not notice: dtypes and saved tensors stay BF16.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_PRODUCTS = ("mm", "addmm", "bmm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
_library: torch.library.Library | None = None  # kernels live as long as it does


def native() -> bool:
    """Whether this CPU multiplies BF16 matrices with instructions of its own."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a build without oneDNN
        return False


def enable() -> str:
    """Replaces the kernels in this process where the CPU needs it; says what BF16 products run on."""
    if native():
        return "BF16 instructions"
    replace_kernels()
    return "FP32 products of BF16 operands, rounded to BF16 (this CPU has no BF16 instructions)"


def replace_kernels() -> None:
    """Replaces the kernels in this process, whatever its CPU; for good."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid")  # overriding is the purpose
        for name in _PRODUCTS + _ATTENTION:
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            _library.impl(name, _through_fp32(kernel), "CPU")


def _through_fp32(kernel: Any) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def call(*args: Any, **kwargs: Any) -> Any:
        if args[0].dtype is not torch.bfloat16:
            return kernel.call_boxed(keys, *args, **kwargs)
        wide = [_widen(arg) for arg in args]
        result = kernel.call_boxed(keys, *wide, **{name: _widen(value) for name, value in kwargs.items()})
        if isinstance(result, Tensor):
            return result.bfloat16()
        return tuple(_narrow(index, part, len(result)) for index, part in enumerate(result))

    return call


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.bfloat16 else value


def _narrow(index: int, part: Tensor, count: int) -> Tensor:
    # Attention's forward returns (output, log-sum-exp): the latter is FP32 whatever the operands are.
    return part if count == 2 and index == 1 else part.bfloat16()
