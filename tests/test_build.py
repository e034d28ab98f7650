"""The build: the CUDA decision and its messages, finding tools, job counts, and what the archives hold."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "build_backend").is_dir():
    pytest.skip("the build is tested in a source tree", allow_module_level=True)
sys.path.insert(0, str(ROOT / "build_backend"))

import toolchain  # noqa: E402
from cuda_choice import CudaChoiceError, Nvcc, choose_cuda  # noqa: E402

NVCC_13 = Nvcc("/cuda/bin/nvcc", (13, 0))
NVCC_12 = Nvcc("/cuda/bin/nvcc", (12, 8))
NVCC_OLD = Nvcc("/cuda/bin/nvcc", (12, 6))


# --- the CUDA decision --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "nvcc", "torch_version", "torch_cuda", "build", "reason"),
    [
        ("AUTO", NVCC_13, "2.14.1", "13.0", True, "nvcc 13.0 (/cuda/bin/nvcc) matches torch 2.14.1"),
        ("auto", NVCC_13, "2.14.1+cu132", "13.2", True, "matches torch 2.14.1+cu132 (CUDA 13.2)"),
        ("AUTO", NVCC_12, "2.14.1+cu130", "13.0", False, "are of different CUDA majors; point CUDA_HOME"),
        ("AUTO", NVCC_13, "2.13.0+cu128", "12.8", False, "are of different CUDA majors; point CUDA_HOME"),
        ("AUTO", NVCC_OLD, "2.13.0+cu128", "12.8", False, "nvcc 12.6 (/cuda/bin/nvcc) is older than 12.8"),
        ("AUTO", NVCC_13, "2.13.0+cpu", None, False, "torch 2.13.0+cpu was built without CUDA (AGOQ_CUDA=ON"),
        ("AUTO", None, "2.13.0+cpu", None, False, "torch 2.13.0+cpu was built without CUDA"),
        ("AUTO", None, "2.14.1+cu130", "13.0", False, "no nvcc was found in CUDACXX, CUDA_HOME"),
        ("OFF", NVCC_13, "2.14.1+cu130", "13.0", False, "AGOQ_CUDA=OFF was set for the build"),
        ("ON", NVCC_13, "2.13.0+cpu", None, True, "AGOQ_CUDA=ON was set for the build; nvcc 13.0"),
        ("on", NVCC_12, "2.14.1+cu130", "13.0", True, "AGOQ_CUDA=ON was set for the build; nvcc 12.8"),
    ],
)
def test_cuda_choice(
    mode: str, nvcc: Nvcc | None, torch_version: str, torch_cuda: str | None, build: bool, reason: str
) -> None:
    choice = choose_cuda(mode, nvcc, torch_version, torch_cuda)
    assert choice.build is build
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("mode", "nvcc", "message"),
    [
        ("ON", None, "AGOQ_CUDA=ON, but no nvcc was found in CUDACXX, CUDA_HOME"),
        ("ON", NVCC_OLD, "AGOQ_CUDA=ON, but nvcc 12.6 (/cuda/bin/nvcc) is older than 12.8"),
        ("yes", NVCC_13, "AGOQ_CUDA must be AUTO, ON or OFF; got 'yes'"),
        ("", NVCC_13, "AGOQ_CUDA must be AUTO, ON or OFF; got ''"),
    ],
)
def test_cuda_choice_refuses(mode: str, nvcc: Nvcc | None, message: str) -> None:
    with pytest.raises(CudaChoiceError) as caught:
        choose_cuda(mode, nvcc, "2.14.1+cu130", "13.0")
    assert str(caught.value).startswith(message)


# --- finding torch and nvcc ---------------------------------------------------------------------------------


def make_torch(directory: Path, version: str, cuda: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "version.py").write_text(
        f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = {cuda}\n"
        "hip: Optional[str] = '6.1'\n"
    )
    return directory


def test_torch_is_read_without_being_imported(tmp_path: Path) -> None:
    cpu = toolchain.read_torch(make_torch(tmp_path / "cpu", "2.13.0+cpu", "None"))
    assert cpu == toolchain.Torch(tmp_path / "cpu", "2.13.0+cpu", None)
    cuda = toolchain.read_torch(make_torch(tmp_path / "cuda", "2.14.1+cu130", "'13.0'"))
    assert cuda is not None and cuda.cuda == "13.0" and cuda.release == (2, 14)
    assert toolchain.read_torch(tmp_path / "absent") is None


def test_torch_directory_of_the_environment_wins(tmp_path: Path) -> None:
    named = make_torch(tmp_path / "torch", "2.12.0", "None")
    assert toolchain.find_torch({"AGOQ_TORCH_DIR": str(named)}) == toolchain.Torch(named, "2.12.0", None)
    old = make_torch(tmp_path / "old" / "torch", "2.10.1", "None")
    assert toolchain.find_torch({"AGOQ_TORCH_DIR": str(old)}) is None


def make_nvcc(path: Path, release: str, *, works: bool = True) -> Path:
    path.parent.mkdir(parents=True)
    answer = f"echo 'Cuda compilation tools, release {release}, V{release}.88'" if works else "exit 1"
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return path


def test_nvcc_is_searched_in_order(tmp_path: Path) -> None:
    by_name = make_nvcc(tmp_path / "a" / "my-nvcc", "13.1")
    by_home = make_nvcc(tmp_path / "b" / "bin" / "nvcc", "12.9")
    broken = make_nvcc(tmp_path / "c" / "bin" / "nvcc", "13.0", works=False)
    environ = {"CUDACXX": str(by_name), "CUDA_HOME": str(tmp_path / "b"), "PATH": os.environ["PATH"]}
    assert toolchain.find_nvcc(environ) == Nvcc(str(by_name), (13, 1))
    del environ["CUDACXX"]
    assert toolchain.find_nvcc(environ) == Nvcc(str(by_home), (12, 9))
    # One that does not run is passed over.
    environ["CUDA_HOME"], environ["CUDA_PATH"] = str(broken.parents[1]), str(tmp_path / "b")
    assert toolchain.find_nvcc(environ) == Nvcc(str(by_home), (12, 9))


# --- jobs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpus", "gib", "environ", "expected"),
    [
        (64, 256, {}, (64, 64)),
        (64, 32, {}, (16, 8)),
        (2, 24, {}, (2, 2)),
        (8, 1, {}, (1, 1)),
        (8, None, {}, (8, 4)),
        (1, None, {}, (1, 1)),
        (64, 8, {"MAX_JOBS": "3"}, (3, 3)),
        (64, 8, {"CMAKE_BUILD_PARALLEL_LEVEL": "12"}, (12, 12)),
        (64, 8, {"MAX_JOBS": "3", "CMAKE_BUILD_PARALLEL_LEVEL": "12"}, (3, 3)),
        (4, 8, {"MAX_JOBS": ""}, (4, 2)),
    ],
)
def test_jobs_are_bounded_by_memory(
    cpus: int, gib: int | None, environ: dict[str, str], expected: tuple[int, int]
) -> None:
    available = None if gib is None else gib * toolchain.GIB
    assert toolchain.count_jobs(cpus, available, environ) == toolchain.Jobs(*expected)


@pytest.mark.parametrize("value", ["0", "-1", "many", "2.5"])
def test_wrong_job_count_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=rf"MAX_JOBS must be a positive integer; got '{value}'"):
        toolchain.count_jobs(4, None, {"MAX_JOBS": value})


def test_this_machine_has_cpus_and_memory() -> None:
    assert toolchain.count_cpus() >= 1
    available = toolchain.read_available_bytes()
    assert available is None or available > 0


# --- archives -----------------------------------------------------------------------------------------------

NEEDED_TO_BUILD = ("setuptools", "pybind11")
PACKAGE_FILES = ("__init__.py", "_version.py", "cli.py", "layout.py", "ops.py", "py.typed", "reference.py")


def run_backend(tree: Path, call: str, **environ: str) -> None:
    """Calls the PEP 517 backend in a source tree, as pip does without isolation."""
    script = f"import sys; sys.path.insert(0, 'build_backend'); import agoq_backend; agoq_backend.{call}"
    environ = {**os.environ, **environ}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr


def copy_sources(destination: Path) -> Path:
    """The source tree without what builds and tools leave in it."""
    left_out = ".git .venv* build dist *.egg-info *.so __pycache__ .*_cache .hypothesis demo-out".split()
    return Path(shutil.copytree(ROOT, destination, ignore=shutil.ignore_patterns(*left_out)))


def make_sdist(tmp_path: Path) -> Path:
    pytest.importorskip("setuptools", "77")
    tree = copy_sources(tmp_path / "tree")
    # Left by an editable build; must stay out of the archive.
    (tree / "python/agoq_ext/_C.abi3.so").write_bytes(b"")
    (tree / "python/agoq_ext/_build_info.json").write_text("{}")
    (tree / "python/agoq_ext/include/agoq/core").mkdir(parents=True, exist_ok=True)
    (tree / "python/agoq_ext/include/agoq/core/stale.h").write_text("")
    run_backend(tree, f"build_sdist({str(tmp_path / 'dist')!r})")
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    return archive


def test_sdist_holds_the_sources_and_nothing_built(tmp_path: Path) -> None:
    with tarfile.open(make_sdist(tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for directory in ("src", "build_backend", "python/agoq_ext", "tests", "docs", "examples", "benchmarks"):
        for path in (ROOT / directory).rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            built = path.suffix in (".so", ".pyc") or path.name == "_build_info.json"
            if path.is_file() and not built and "__pycache__" not in name and "/include/" not in name:
                assert name in names
    assert {"CMakeLists.txt", "Makefile", "LICENSE", "pyproject.toml", "setup.py", ".ci/run"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc", "_build_info.json", "stale.h"))]


@pytest.mark.slow
def test_wheel_from_the_sdist_works(tmp_path: Path) -> None:
    for module in NEEDED_TO_BUILD:
        pytest.importorskip(module)
    with tarfile.open(make_sdist(tmp_path)) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (tree,) = (tmp_path / "unpacked").iterdir()
    # Debug compiles faster; what lies in the wheel does not depend on it.
    environ = {"AGOQ_CUDA": "OFF", "AGOQ_BUILD_TYPE": "Debug"}
    run_backend(tree, f"build_wheel({str(tmp_path / 'dist')!r})", **environ)
    (wheel,) = (tmp_path / "dist").glob("*.whl")

    # `_host` is tied to this Python, so the wheel is too.
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.startswith(f"agoq_ext-0.1.0-{python}-{python}-")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(installed)
    assert {f"agoq_ext/{name}" for name in PACKAGE_FILES} <= names
    assert {"agoq_ext/_C.abi3.so", "agoq_ext/_build_info.json"} <= names
    assert any(name.startswith("agoq_ext/_host.") for name in names)
    headers = {path.name for path in (ROOT / "src/cpp/core").glob("*.h")}
    assert headers and {f"agoq_ext/include/agoq/core/{name}" for name in headers} <= names
    assert not [name for name in names if name.startswith(("tests/", "src/")) or "_C_cuda" in name]

    script = (
        "import agoq_ext, torch; from agoq_ext import _native; "
        f"assert agoq_ext.__file__.startswith({str(installed)!r}), agoq_ext.__file__; "
        "assert _native.load().cuda_reason == 'not built: AGOQ_CUDA=OFF was set for the build'; "
        "x = torch.ones(3, 40); assert torch.equal(agoq_ext.quantize(x, 'nf4').dequantize(), x)"
    )
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
