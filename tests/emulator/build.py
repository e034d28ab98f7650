"""Builds the emulator's libraries on first use, into build/emulator; Ninja rebuilds what has changed since."""

from __future__ import annotations

import fcntl
import functools
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "emulator"
FLAVOURS = ("fast", "check", "asan")


def find_program(name: str) -> str | None:
    """A build tool beside this Python, where pip puts it, or on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.is_file() else shutil.which(name)


def reason_not_to_run() -> str | None:
    """Why the emulator cannot run on this machine; None if it can."""
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in ("x86_64", "AMD64"):
        return f"the emulator runs on x86-64 Linux only, not on {platform.system()} {machine}"
    missing = [name for name in ("g++", "cmake", "ninja", "addr2line") if find_program(name) is None]
    return f"the emulator needs {', '.join(missing)}" if missing else None


@contextmanager
def lock() -> Iterator[None]:
    """One build at a time, whichever processes ask for it."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def library(name: str, flavour: str) -> Path:
    """The library `name` ("package" or "bugs") in a flavour, built if it is missing or out of date.

    Raises:
        RuntimeError: the build failed; the message holds the compiler's output.
    """
    if flavour not in FLAVOURS:
        raise ValueError(f"flavour must be one of {', '.join(FLAVOURS)}; got {flavour!r}")
    target = f"{name}_{flavour}"
    cmake = str(find_program("cmake"))
    with lock():
        if not (BUILD / "build.ninja").is_file():
            # Neither CXX nor CXXFLAGS of the environment: the checker depends on g++ and on its exact flags.
            configure = [cmake, "-S", str(SOURCE), "-B", str(BUILD), "-G", "Ninja",
                         f"-DCMAKE_MAKE_PROGRAM={find_program('ninja')}",
                         f"-DCMAKE_CXX_COMPILER={find_program('g++')}", "-DCMAKE_CXX_FLAGS="]  # fmt: skip
            run(configure)
        run([cmake, "--build", str(BUILD), "--target", target])
    return BUILD / f"{target}.so"


def run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-8000:]}")


def sanitizer_environment() -> dict[str, str]:
    """Environment of a process that loads the asan flavour: the sanitizer's runtime has to come first."""
    found = subprocess.run(
        [str(find_program("g++")), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    # Python keeps memory until it ends, and fibers move between stacks.
    options = "detect_leaks=0:detect_stack_use_after_return=0"
    return {**os.environ, "LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": options}
