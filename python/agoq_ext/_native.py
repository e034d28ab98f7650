"""Loads the native libraries: the CPU ops always, the CUDA ops where this torch can carry them."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PACKAGE_DIR = Path(__file__).resolve().parent
CPU_LIBRARY = "_C.abi3.so"
CUDA_LIBRARY = "_C_cuda.abi3.so"

# The stable ABI that the libraries are built for starts with this torch.
MINIMUM_TORCH = (2, 11)


@dataclass(frozen=True)
class NativeState:
    """What was loaded.

    Attributes:
        cuda_loaded: whether the CUDA library is in the process.
        cuda_reason: why it is not; empty if it is.
        build_info: what the build recorded: compiler, torch of the headers, CUDA decision and architectures.
    """

    cuda_loaded: bool
    cuda_reason: str
    build_info: dict[str, Any] = field(default_factory=dict)


@functools.cache
def load() -> NativeState:
    """Loads the libraries, once a process, and says what came of it.

    Raises:
        ImportError: the CPU library is missing or cannot be loaded. A CUDA library that cannot be loaded is
            no error: the reason is in the result.
    """
    return _load(PACKAGE_DIR)


def _load(directory: Path) -> NativeState:
    build_info = read_build_info(directory)
    _load_cpu(directory, build_info)
    reason = _load_cuda(directory, build_info)
    return NativeState(cuda_loaded=not reason, cuda_reason=reason, build_info=build_info)


def read_build_info(directory: Path = PACKAGE_DIR) -> dict[str, Any]:
    """The build's record; empty if there is none."""
    try:
        info = json.loads((directory / "_build_info.json").read_text())
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def _load_cpu(directory: Path, build_info: dict[str, Any]) -> None:
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release < MINIMUM_TORCH:
        minimum = ".".join(map(str, MINIMUM_TORCH))
        raise ImportError(f"agoq_ext needs torch >= {minimum}; this is torch {torch.__version__}")
    path = directory / CPU_LIBRARY
    if not path.is_file():
        raise ImportError(f"agoq_ext: the native library {path} is missing; {_rebuild_advice(directory)}")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        built = build_info.get("torch", "an unknown version")
        raise ImportError(
            f"agoq_ext: the native library {path}, built with torch {built}, does not load under torch "
            f"{torch.__version__}: {error}; {_rebuild_advice(directory)}"
        ) from error


def _load_cuda(directory: Path, build_info: dict[str, Any]) -> str:
    """Loads the CUDA library; returns why it was not loaded, or an empty string."""
    path = directory / CUDA_LIBRARY
    if not path.is_file():
        reason = build_info.get("cuda", {}).get("reason")
        return f"not built: {reason}" if reason else "not built"
    if torch.version.cuda is None:
        return f"built, but torch {torch.__version__} has no CUDA"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"built, but it does not load under torch {torch.__version__}: {error}"
    return ""


def _rebuild_advice(directory: Path) -> str:
    if (directory.parents[1] / "CMakeLists.txt").is_file():
        return "build it with `pip install -e . --no-build-isolation` in the source tree"
    return "reinstall it with `pip install --force-reinstall --no-deps agoq-ext`"
