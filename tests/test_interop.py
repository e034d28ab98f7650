"""Arrays of NumPy and CuPy, and users' kernels over the package's headers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import agoq_ext
from agoq_ext import jit

SOURCE = """
#include "agoq/core/codec.h"
#include "agoq/core/layout.h"
#include "agoq/core/philox.h"
#include "agoq/core/scale.h"
extern "C" __global__ void squares(const float* x, unsigned char* codes, float scale, long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) codes[i] = static_cast<unsigned char>(agoq::encode_nearest<agoq::Format::FORMAT>(x[i] * x[i] / scale));
}
"""


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_numpy_in_and_out(dtype: type) -> None:
    x = np.random.default_rng(0).standard_normal((5, 96)).astype(dtype)
    for array in (x, x[:, ::2], x.T):
        q = agoq_ext.quantize(array, "int8", group_size=32)
        want = agoq_ext.quantize(torch.from_numpy(np.ascontiguousarray(array)), "int8", group_size=32)
        assert torch.equal(q.packed, want.packed) and torch.equal(q.scales.float(), want.scales.float())
        back = np.from_dlpack(q.dequantize())
        assert back.dtype == dtype and back.shape == array.shape and np.abs(back - array).max() < 0.03


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_read_only_array() -> None:
    x = np.ones((2, 64), np.float32)
    x.setflags(write=False)
    torch.testing.assert_close(
        agoq_ext.quantize(x, "int8").dequantize(), torch.ones(2, 64), rtol=0.01, atol=0
    )


def test_what_is_no_array_is_named() -> None:
    with pytest.raises(
        TypeError, match="quantize: x must be a torch.Tensor or an array with DLPack; got list"
    ):
        agoq_ext.quantize([1.0, 2.0])


def test_headers_are_where_get_include_says() -> None:
    assert (Path(agoq_ext.get_include()) / "agoq/core/codec.h").is_file()


def have_nvrtc() -> bool:
    try:
        jit._nvrtc()
    except ImportError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not have_nvrtc(), reason="CuPy or NVRTC is not installed")


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("format", ["int8", "nf4", "fp4_e3m0", "fp8_e4m3"])
def test_a_users_kernel_compiles(architecture: str, format: str) -> None:
    cubin = jit.compile(SOURCE.replace("FORMAT", format), architecture)
    assert cubin[:4] == b"\x7fELF" and b"squares" in cubin


@needs_nvrtc
def test_errors_of_the_source_are_shown() -> None:
    with pytest.raises(jit.CompileError, match=r"(?s)sm_90: .*undefined_thing"):
        jit.compile(SOURCE.replace("FORMAT", "int8") + "undefined_thing", "sm_90")
    with pytest.raises(jit.CompileError, match="sm_1"):
        jit.compile(SOURCE.replace("FORMAT", "int8"), "sm_1")
