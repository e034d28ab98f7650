"""Finds what a build needs (torch's headers, nvcc, CMake, Ninja) and how many jobs the memory allows.

Imports nothing but the standard library and runs before anything is installed. torch is located, never
imported: under pip's build isolation it lies in the target environment, outside the build's sys.path.
As a script, `python build_backend/toolchain.py nvcc` prints the path of nvcc and fails if there is none.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cuda_choice import Nvcc

MINIMUM_TORCH = (2, 11)
MINIMUM_CMAKE = (3, 25)

# Memory set aside for one compile. A process takes under 0.3 GiB on the present sources (gcc 12, nvcc 13.0), and
# nvcc compiles two architectures at a time; the rest is room for larger kernels and for other compilers.
GIB = 1 << 30
BYTES_PER_CXX_JOB = 2 * GIB
BYTES_PER_NVCC_JOB = 4 * GIB


# --- torch --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Torch:
    """An installed torch: its package directory, its version, and the CUDA release it was built with."""

    path: Path
    version: str
    cuda: str | None

    @property
    def release(self) -> tuple[int, int]:
        return parse_release(self.version)


def parse_release(version: str) -> tuple[int, int]:
    """(major, minor) of a version string such as '2.13.0+cpu'; (0, 0) if it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def read_torch(directory: Path) -> Torch | None:
    """The torch whose package directory is `directory`; None if there is none."""
    try:
        text = (directory / "version.py").read_text()
    except OSError:
        return None
    version = re.search(r"^__version__ *= *['\"]([^'\"]+)['\"]", text, re.M)
    cuda = re.search(r"^cuda\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.M)
    return Torch(directory, version[1], cuda[1] if cuda else None) if version else None


def find_torch(environ: Mapping[str, str] = os.environ) -> Torch | None:
    """The first torch new enough to build with, AGOQ_TORCH_DIR before all others."""
    for directory in _torch_directories(environ):
        torch = read_torch(directory)
        if torch and torch.release >= MINIMUM_TORCH:
            return torch
    return None


def _torch_directories(environ: Mapping[str, str]) -> Iterator[Path]:
    if environ.get("AGOQ_TORCH_DIR"):
        yield Path(environ["AGOQ_TORCH_DIR"])
        return
    for key in ("purelib", "platlib"):
        yield Path(sysconfig.get_path(key)) / "torch"
    yield from _system_site_torch_directories()
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        yield Path(spec.origin).parent


def _system_site_torch_directories() -> Iterator[Path]:
    """Where torch lies if this virtual environment sees the packages of the Python it was made from."""
    try:
        config = (Path(sys.prefix) / "pyvenv.cfg").read_text()
    except OSError:
        return
    if not re.search(r"^include-system-site-packages *= *true", config, re.M | re.I):
        return
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for lib in ("local/lib", "lib"):
        for packages in ("dist-packages", "site-packages"):
            yield Path(sys.base_prefix) / lib / python / packages / "torch"
    yield Path(sys.base_prefix) / "lib" / "python3" / "dist-packages" / "torch"


# --- programs -----------------------------------------------------------------------------------------------


def _version_output(program: str) -> str:
    """What `program --version` prints; empty if it cannot run.

    A console script of the target environment exists but does not run under build isolation, hence the trial.
    """
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def find_nvcc(environ: Mapping[str, str] = os.environ) -> Nvcc | None:
    """nvcc from CUDACXX, CUDA_HOME, CUDA_PATH, /usr/local/cuda or PATH, in this order."""
    candidates = [environ.get("CUDACXX")]
    homes = [environ.get("CUDA_HOME"), environ.get("CUDA_PATH")]
    candidates += [os.path.join(home, "bin", "nvcc") for home in homes if home]
    candidates += ["/usr/local/cuda/bin/nvcc", shutil.which("nvcc", path=environ.get("PATH"))]
    for candidate in candidates:
        if candidate:
            release = re.search(r"release (\d+)\.(\d+)", _version_output(candidate))
            if release:
                return Nvcc(candidate, (int(release[1]), int(release[2])))
    return None


def find_cmake() -> str | None:
    """A CMake that is new enough, from CMAKE, beside this Python, or PATH."""
    for candidate in (os.environ.get("CMAKE"), *_beside_python_or_on_path("cmake")):
        if candidate:
            version = re.search(r"version (\d+\.\d+)", _version_output(candidate))
            if version and parse_release(version[1]) >= MINIMUM_CMAKE:
                return candidate
    return None


def find_ninja() -> str | None:
    """Ninja from beside this Python, or PATH."""
    for candidate in _beside_python_or_on_path("ninja"):
        if _version_output(candidate):
            return candidate
    return None


def _beside_python_or_on_path(name: str) -> Iterator[str]:
    beside = Path(sys.executable).parent / name
    if beside.is_file():
        yield str(beside)
    found = shutil.which(name)
    if found:
        yield found


# --- jobs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Jobs:
    """How many compiles run at once: `total` of all kinds, of which at most `nvcc` are CUDA files."""

    total: int
    nvcc: int


def count_jobs(cpus: int, available_bytes: int | None, environ: Mapping[str, str]) -> Jobs:
    """Jobs bounded by processors and memory; MAX_JOBS or CMAKE_BUILD_PARALLEL_LEVEL set them instead.

    Raises:
        ValueError: one of the two variables is not a positive integer.
    """
    for key in ("MAX_JOBS", "CMAKE_BUILD_PARALLEL_LEVEL"):
        value = environ.get(key)
        if value:
            if not value.isdecimal() or int(value) < 1:
                raise ValueError(f"{key} must be a positive integer; got {value!r}")
            return Jobs(int(value), int(value))
    if available_bytes is None:
        return Jobs(cpus, max(1, cpus // 2))
    return Jobs(
        max(1, min(cpus, available_bytes // BYTES_PER_CXX_JOB)),
        max(1, min(cpus, available_bytes // BYTES_PER_NVCC_JOB)),
    )


def count_cpus() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_available_bytes() -> int | None:
    """Memory that can be had without swapping, within the control group's limit; None where nothing tells."""
    found = []
    try:
        meminfo = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
        if meminfo:
            found.append(int(meminfo[1]) * 1024)
    except OSError:
        pass
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return min(found) if found else None


if __name__ == "__main__":
    if sys.argv[1:] != ["nvcc"]:
        sys.exit("usage: toolchain.py nvcc")
    nvcc = find_nvcc()
    if nvcc is None:
        sys.exit(1)
    print(nvcc.path)
