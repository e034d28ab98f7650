"""A user's own CUDA kernels over this package's headers: codecs, scales, Philox and layout, compiled by NVRTC.

    source = '''
    #include "agoq/core/codec.h"
    extern "C" __global__ void squares(const float* x, signed char* codes, float scale, long long n) {
      const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
      if (i < n) codes[i] = agoq::encode_nearest<agoq::Format::int8>(x[i] * x[i] / scale);
    }
    '''
    cubin = jit.compile(source, "sm_90")      # needs no GPU
    squares = jit.kernel(source, "squares")   # a cupy.RawKernel: squares((blocks,), (threads,), (x, codes, scale, n))

CuPy and NVRTC come with `pip install 'agoq-ext[cupy]'`. The headers are those that the package's own kernels are
compiled from, so codes have the same bits. `kernel` has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_STANDARD = "--std=c++20"


class CompileError(RuntimeError):
    """NVRTC refused the source; the message is its log."""


def get_include() -> str:
    """The folder to give to a compiler, so that `#include "agoq/core/codec.h"` is found."""
    return str(Path(__file__).parent / "include")


def compile(source: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """The machine code of a CUDA source.

    Args:
        source: CUDA C++; may include this package's headers.
        architecture: such as "sm_80", "sm_90" or "sm_100".
        options: further options of NVRTC.

    Returns:
        A cubin.

    Raises:
        ImportError: CuPy or NVRTC is not installed.
        CompileError: the source does not compile.
    """
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(source, "agoq_user_kernel.cu", [], [])
    try:
        nvrtc.compileProgram(program, (*_options(options), f"-arch={architecture}"))
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(f"jit.compile: {architecture}: {nvrtc.getProgramLog(program) or error}") from error
    finally:
        nvrtc.destroyProgram(program)


def kernel(source: str, name: str, options: Sequence[str] = ()) -> Any:
    """A cupy.RawKernel of the `extern "C"` kernel called `name`; compiled for the current device when first launched.

    Raises:
        ImportError: CuPy is not installed.
    """
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"jit.kernel: needs CuPy: pip install 'agoq-ext[cupy]' ({error})") from error
    return cupy.RawKernel(source, name, options=_options(options))


def _options(options: Sequence[str]) -> tuple[str, ...]:
    return (_STANDARD, f"-I{get_include()}", *options)


def _nvrtc() -> Any:
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()  # loads the library
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"jit.compile: needs CuPy and NVRTC: pip install 'agoq-ext[cupy]' ({error})"
        ) from error
    return nvrtc
