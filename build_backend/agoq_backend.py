"""The PEP 517 backend: setuptools, with build requirements that depend on what is already installed.

A fixed requirement on torch would make pip download a second torch into the isolated build environment,
often another one than the user runs. Headers of the torch that is already installed serve as well, since the
libraries use its stable ABI. CMake and Ninja are asked for only where the system has none.
"""

from __future__ import annotations

import os
from typing import Any

import toolchain
from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def missing_requirements() -> list[str]:
    """What has to be installed into the build environment beside pyproject.toml's fixed list."""
    missing = []
    if toolchain.find_torch() is None and not os.environ.get("AGOQ_TORCH_DIR"):
        missing.append("torch>={}.{}".format(*toolchain.MINIMUM_TORCH))
    if toolchain.find_cmake() is None:
        missing.append("cmake>={}.{}".format(*toolchain.MINIMUM_CMAKE))
    if toolchain.find_ninja() is None:
        missing.append("ninja")
    return missing


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + missing_requirements()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + missing_requirements()
