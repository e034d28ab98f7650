"""Drives CMake and Ninja; everything about the compilation itself is in CMakeLists.txt.

Environment variables (docs/building.md): AGOQ_CUDA, AGOQ_CUDA_ARCHS, AGOQ_TORCH_DIR, AGOQ_BUILD_TYPE,
AGOQ_SANITIZE, AGOQ_CMAKE_TARGET, CMAKE_ARGS, MAX_JOBS.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "build_backend"))

import toolchain  # noqa: E402
from cuda_choice import DEFAULT_ARCHITECTURES, CudaChoiceError, choose_cuda  # noqa: E402


def say(message: str) -> None:
    print(f"[agoq_ext] {message}", file=sys.stderr, flush=True)


def fail(message: str) -> NoReturn:
    sys.exit(f"[agoq_ext] error: {message}")


class CleanBuild(build):
    """Starts from an empty build/lib: a module or library that no longer exists must not reach a wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Builds and installs the native libraries, headers and _build_info.json into the package directory."""

    def run(self) -> None:
        try:
            jobs = toolchain.count_jobs(toolchain.count_cpus(), toolchain.read_available_bytes(), os.environ)
        except ValueError as error:
            fail(str(error))
        configure, build_dir = self.configure_command(jobs.nvcc)
        build_dir.mkdir(parents=True, exist_ok=True)
        target = os.environ.get("AGOQ_CMAKE_TARGET", "install")
        compile_ = [configure[0], "--build", str(build_dir), "--target", target, "-j", str(jobs.total)]
        for command in (configure, compile_):
            if subprocess.run(command).returncode != 0:
                fail(f"the native build failed in: {shlex.join(command)}")

    def configure_command(self, nvcc_jobs: int) -> tuple[list[str], Path]:
        """CMake's command line, and the directory that it configures."""
        torch = toolchain.find_torch()
        if torch is None:
            fail(
                "no torch >= {}.{} was found in {}; install one first, or point AGOQ_TORCH_DIR to the "
                "package directory of one".format(*toolchain.MINIMUM_TORCH, sys.prefix)
            )
        cmake, ninja = toolchain.find_cmake(), toolchain.find_ninja()
        if cmake is None:
            fail("no CMake >= {}.{} was found; `pip install cmake` has one".format(*toolchain.MINIMUM_CMAKE))
        if ninja is None:
            fail("no Ninja was found; `pip install ninja` has one")
        try:
            import pybind11
        except ImportError:
            fail("pybind11 is not installed; `pip install pybind11`, or build without --no-build-isolation")

        nvcc = toolchain.find_nvcc()
        try:
            cuda = choose_cuda(os.environ.get("AGOQ_CUDA", "AUTO"), nvcc, torch.version, torch.cuda)
        except CudaChoiceError as error:
            fail(str(error))
        say(f"headers of torch {torch.version} in {torch.path}")
        say(f"CUDA library: {'built' if cuda.build else 'left out'}: {cuda.reason}")

        in_place = self.editable_mode or self.inplace
        build_dir = HERE / "build" / "editable" if in_place else Path(self.build_temp).resolve() / "cmake"
        prefix = HERE / "python" if in_place else Path(self.build_lib).resolve()
        options = {
            "CMAKE_BUILD_TYPE": os.environ.get("AGOQ_BUILD_TYPE", "Release"),
            "CMAKE_INSTALL_PREFIX": prefix,
            # Given anew each time: under build isolation these paths differ from one build to the next.
            "CMAKE_MAKE_PROGRAM": ninja,
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "AGOQ_TORCH_DIR": torch.path,
            "AGOQ_TORCH_VERSION": torch.version,
            "AGOQ_SANITIZE": os.environ.get("AGOQ_SANITIZE", ""),
            "AGOQ_CUDA": "ON" if cuda.build else "OFF",
            "AGOQ_CUDA_REASON": cuda.reason,
            "AGOQ_CUDA_ARCHS": os.environ.get("AGOQ_CUDA_ARCHS") or DEFAULT_ARCHITECTURES,
            "AGOQ_NVCC_JOBS": nvcc_jobs,
        }
        if cuda.build and nvcc is not None:
            options["CMAKE_CUDA_COMPILER"] = nvcc.path
        command = [cmake, "-S", str(HERE), "-B", str(build_dir), "-G", "Ninja"]
        command += [f"-D{name}={value}" for name, value in options.items()]
        return command + shlex.split(os.environ.get("CMAKE_ARGS", "")), build_dir

    # CMake installs the outputs; setuptools has none of its own to list or copy.
    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


# The extension stands for all native libraries: it makes the wheel one of a platform and of a Python version.
setup(
    ext_modules=[Extension("agoq_ext._C", [])],
    cmdclass={"build": CleanBuild, "build_ext": CMakeBuild},
)
