"""Decides whether the CUDA library is built, and says why not.

A pure function of what was found on the machine, so that every message can be tested without the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("AUTO", "ON", "OFF")

# The first nvcc that knows sm_100a and sm_120a and has --compress-mode.
MINIMUM_NVCC = (12, 8)

# Real code for the data-centre parts and PTX for what comes later; never probed from the GPU at hand.
DEFAULT_ARCHITECTURES = "80-real;90a-real;100a-real;120a-real;90-virtual"


class CudaChoiceError(Exception):
    """The CUDA build that was asked for cannot be made; the message says what to change."""


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler: its path and its release as (major, minor)."""

    path: str
    release: tuple[int, int]

    def __str__(self) -> str:
        return f"nvcc {self.release[0]}.{self.release[1]} ({self.path})"


@dataclass(frozen=True)
class CudaChoice:
    """Whether to build the CUDA library, and one sentence that says why or why not."""

    build: bool
    reason: str


def choose_cuda(mode: str, nvcc: Nvcc | None, torch_version: str, torch_cuda: str | None) -> CudaChoice:
    """The choice for AGOQ_CUDA=`mode`.

    Args:
        mode: "AUTO", "ON" or "OFF", in any case.
        nvcc: the CUDA compiler found, if any.
        torch_version: version of the torch whose headers are used, e.g. "2.13.0+cpu".
        torch_cuda: the CUDA release that torch was built with, e.g. "13.0"; None for a torch without CUDA.

    Raises:
        CudaChoiceError: `mode` is none of the three, or "ON" cannot be done.
    """
    if mode.upper() not in MODES:
        raise CudaChoiceError(f"AGOQ_CUDA must be AUTO, ON or OFF; got {mode!r}")
    mode = mode.upper()
    if mode == "OFF":
        return CudaChoice(False, "AGOQ_CUDA=OFF was set for the build")

    refusal = _nvcc_refusal(nvcc)
    if mode == "ON":
        if refusal:
            raise CudaChoiceError(f"AGOQ_CUDA=ON, but {refusal}")
        return CudaChoice(True, f"AGOQ_CUDA=ON was set for the build; {nvcc}")

    # AUTO: torch is asked first, since without CUDA in it the library could never be loaded.
    if torch_cuda is None:
        return CudaChoice(
            False, f"torch {torch_version} was built without CUDA (AGOQ_CUDA=ON builds it all the same)"
        )
    if refusal or nvcc is None:
        return CudaChoice(False, refusal)
    if nvcc.release[0] != int(torch_cuda.split(".")[0]):
        return CudaChoice(
            False,
            f"{nvcc} and torch {torch_version} (CUDA {torch_cuda}) are of different CUDA majors; "
            "point CUDA_HOME to a matching toolkit, or set AGOQ_CUDA=ON to build anyway",
        )
    return CudaChoice(True, f"{nvcc} matches torch {torch_version} (CUDA {torch_cuda})")


def _nvcc_refusal(nvcc: Nvcc | None) -> str:
    """Why `nvcc` cannot build the library; empty if it can."""
    if nvcc is None:
        return "no nvcc was found in CUDACXX, CUDA_HOME, CUDA_PATH, /usr/local/cuda or PATH"
    if nvcc.release < MINIMUM_NVCC:
        return f"{nvcc} is older than {MINIMUM_NVCC[0]}.{MINIMUM_NVCC[1]}, which the architecture list needs"
    return ""
