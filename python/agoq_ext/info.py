"""What `agoq info` tells: versions, CPU instruction set, CUDA library, formats."""

from __future__ import annotations

import platform
from typing import Any

import torch

from . import _native, layout, ops
from ._version import __version__


def collect() -> dict[str, Any]:
    """Facts about this installation, ready for JSON.

    Returns:
        versions: agoq_ext, torch, python, and the compiler and torch of the build ("unknown" if unrecorded).
        cpu: isa, the instruction set that the CPU kernels use here.
        cuda: loaded; reason, why it is not loaded (empty if it is); architectures and nvcc of the built
            library; torch_cuda, the CUDA release of torch or None.
        formats: a list of {name, bits}.
        group_sizes, scale_dtypes: lists.
    """
    state = _native.load()
    build = state.build_info
    build_cuda = build.get("cuda", {})
    return {
        "versions": {
            "agoq_ext": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "compiler": build.get("compiler", "unknown"),
            "build_torch": build.get("torch", "unknown"),
        },
        "cpu": {"isa": ops.cpu_isa()},
        "cuda": {
            "loaded": state.cuda_loaded,
            "reason": state.cuda_reason,
            "architectures": build_cuda.get("architectures", []),
            "nvcc": build_cuda.get("nvcc") or None,
            "torch_cuda": torch.version.cuda,
        },
        "formats": [{"name": f.name, "bits": f.bits} for f in layout.FORMATS.values()],
        "group_sizes": list(layout.GROUP_SIZES),
        "scale_dtypes": [str(dtype).removeprefix("torch.") for dtype in layout.SCALE_DTYPES],
    }


def render(info: dict[str, Any]) -> str:
    """`collect()`'s facts as lines for a terminal."""
    versions, cuda = info["versions"], info["cuda"]
    built_with = f"{versions['compiler']}, headers of torch {versions['build_torch']}"
    lines = [
        ("agoq_ext", versions["agoq_ext"]),
        ("torch", f"{versions['torch']} (CUDA {cuda['torch_cuda'] or 'none'})"),
        ("python", versions["python"]),
        ("built with", built_with + (f", nvcc {cuda['nvcc']}" if cuda["nvcc"] else "")),
        ("CPU kernels", info["cpu"]["isa"]),
        ("CUDA library", "loaded" if cuda["loaded"] else cuda["reason"]),
    ]
    if cuda["architectures"]:
        lines.append(("CUDA targets", ", ".join(cuda["architectures"])))
    lines += [
        ("formats", ", ".join(f"{f['name']} ({f['bits']} bits)" for f in info["formats"])),
        ("group sizes", ", ".join(map(str, info["group_sizes"]))),
        ("scale dtypes", ", ".join(info["scale_dtypes"])),
    ]
    return "\n".join(f"{name:<13} {value}" for name, value in lines)
