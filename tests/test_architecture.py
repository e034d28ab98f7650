"""Who may use whom: the rooms of the native sources and the modules of the Python package.

The rules are docs/design.md's. They are read from the files' include directives and import statements, so
nothing has to be compiled or imported. Each rule is also tried on a small tree that breaks it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NATIVE_SUFFIXES = {".h", ".hpp", ".cuh", ".cpp", ".cu"}

# Each room's directory below src/, the rooms it may include besides itself, and the foreign headers.
ROOM_DIRECTORIES = {
    "core": "cpp/core",
    "cpu": "cpp/cpu",
    "ops": "cpp/ops",
    "host": "cpp/host",
    "cuda": "cuda",
}
ROOMS_USED = {
    "core": set(),
    "cpu": {"core"},
    "cuda": {"core"},
    "ops": {"core", "cpu", "cuda"},
    "host": {"core"},
}
FOREIGN_USED = {"core": set(), "cpu": set(), "cuda": {"cuda"}, "ops": {"torch", "cuda"}, "host": {"python"}}
FOREIGN_HEADERS = {
    "torch": re.compile(r"^(torch|ATen|c10|caffe2)/"),
    "python": re.compile(r"^(Python\.h$|pybind11/|numpy/)"),
    "cuda": re.compile(r"^(cuda|cooperative_groups|cub/|thrust/|nvrtc|device_launch_parameters|mma\.h$|nv/)"),
}

# The parts of the Python package and the parts each may import besides itself. A sub-package is one part.
BASE = {"_version", "errors"}
TENSORS = {"layout", "ops", "fused_ops", "tensor"}
AUTOGRAD = TENSORS | {"autograd", "autograd_layers", "attention", "head", "nn"}
COLLECTIVES = TENSORS | {"collectives"}
MODULES_USED = {
    "_version": set(),
    "errors": set(),
    "_native": BASE,
    "layout": BASE,
    "reference": BASE | {"layout"},
    "ops": BASE | {"_native", "layout"},
    "reference_fused": BASE | {"layout", "reference"},
    "fused_ops": BASE | {"layout", "ops"},
    "tensor": BASE | {"layout", "ops"},
    "autograd": BASE | TENSORS,
    "autograd_layers": BASE | TENSORS | {"autograd"},
    "attention": BASE | TENSORS | {"autograd"},
    "head": BASE | TENSORS | {"autograd"},
    "nn": BASE | AUTOGRAD,
    "activation": BASE | AUTOGRAD,
    "pipeline": BASE | AUTOGRAD | {"activation"},
    "collectives": BASE | TENSORS,
    "ddp": BASE | COLLECTIVES,
    "process_group": BASE | COLLECTIVES,
    "comm_hook": BASE | COLLECTIVES,
    "fsdp": BASE | COLLECTIVES,
    "gradients": BASE | COLLECTIVES,
    "diloco": BASE | COLLECTIVES,
    "plan": BASE | {"layout", "activation", "head", "pipeline"},
    "jit": BASE,
    "info": BASE | {"_native", "layout", "ops"},
    "training": BASE | AUTOGRAD | COLLECTIVES | {"activation", "ddp", "gradients", "diloco", "fsdp", "info"},
    "cli": BASE | {"diloco", "info", "plan", "training"},
}
# The package's own __init__ gathers the public names, whatever part they come from.
GATHERING = "__init__"

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)


# --- native sources -----------------------------------------------------------------------------------------


def room_of(path: Path, source_root: Path) -> str | None:
    for room, directory in ROOM_DIRECTORIES.items():
        if path.is_relative_to(source_root / directory):
            return room
    return None


def resolve_include(name: str, includer: Path, source_root: Path) -> Path | None:
    """The file that an include names, relative to the including one; None for a foreign header."""
    candidate = (includer.parent / name).resolve()
    return candidate if candidate.is_file() and candidate.is_relative_to(source_root) else None


def native_violations(source_root: Path) -> list[str]:
    """Includes under `source_root` (a `src` directory) that break the rules, one line each."""
    source_root = source_root.resolve()
    found = []
    for path in sorted(source_root.rglob("*")):
        if path.suffix not in NATIVE_SUFFIXES:
            continue
        where = path.relative_to(source_root)
        room = room_of(path, source_root)
        if room is None:
            found.append(f"{where}: lies in no room")
            continue
        for quote, name in _INCLUDE.findall(path.read_text()):
            target = resolve_include(name, path, source_root)
            if target is not None:
                used = room_of(target, source_root)
                if used != room and used not in ROOMS_USED[room]:
                    found.append(f"{where}: {room} must not include {used} ({name})")
                continue
            kinds = [kind for kind, pattern in FOREIGN_HEADERS.items() if pattern.search(name)]
            found += [f"{where}: {room} must not include {kind} headers ({name})"
                      for kind in kinds if kind not in FOREIGN_USED[room]]  # fmt: skip
            if quote == '"' and not kinds:
                found.append(f"{where}: {name} is not a file of the source tree")
    return found


def test_native_rooms() -> None:
    assert list((ROOT / "src").rglob("*.h")), "no native sources found"
    assert native_violations(ROOT / "src") == []


@pytest.mark.parametrize(
    ("path", "line", "complaint"),
    [
        ("cpp/core/a.h", "#include <torch/csrc/stable/tensor.h>", "core must not include torch headers"),
        ("cpp/core/a.h", "#include <Python.h>", "core must not include python headers"),
        ("cpp/core/a.h", "#include <cuda_runtime.h>", "core must not include cuda headers"),
        ("cpp/core/a.h", '#include "../cpu/k.h"', "core must not include cpu"),
        ("cpp/cpu/a.cpp", '#include "../../cuda/k.h"', "cpu must not include cuda"),
        ("cpp/cpu/a.cpp", "  #  include <../../cuda/k.h>", "cpu must not include cuda"),
        (
            "cpp/cpu/a.cpp",
            "#include <torch/headeronly/macros/Macros.h>",
            "cpu must not include torch headers",
        ),
        ("cuda/a.cu", '#include "../cpp/cpu/k.h"', "cuda must not include cpu"),
        ("cuda/a.cu", "#include <ATen/ATen.h>", "cuda must not include torch headers"),
        ("cpp/host/a.cpp", '#include "../cpu/k.h"', "host must not include cpu"),
        ("cpp/host/a.cpp", "#include <torch/extension.h>", "host must not include torch headers"),
        ("cpp/ops/a.cpp", "#include <pybind11/pybind11.h>", "ops must not include python headers"),
        ("cpp/ops/a.cpp", '#include "../core/gone.h"', "../core/gone.h is not a file of the source tree"),
        ("cpp/a.cpp", "", "lies in no room"),
    ],
)
def test_native_violation_is_found(tmp_path: Path, path: str, line: str, complaint: str) -> None:
    allowed = {
        "cpp/core/k.h": "#include <cstdint>\n",
        "cpp/cpu/k.h": '#include "../core/k.h"\n#include <immintrin.h>\n',
        "cuda/k.h": '#include "../cpp/core/k.h"\n#include <cuda_runtime.h>\n',
        "cpp/ops/k.cpp": '#include "../cpu/k.h"\n#include "../../cuda/k.h"\n#include <torch/csrc/stable/library.h>\n',
        "cpp/host/k.cpp": '#include "../core/k.h"\n#include <pybind11/pybind11.h>\n',
    }
    for name, text in allowed.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert native_violations(tmp_path) == []

    (tmp_path / path).write_text(f"// a planted violation\n{line}\n")
    violations = native_violations(tmp_path)
    assert len(violations) == 1
    assert violations[0].startswith(path) and complaint in violations[0]


# --- Python modules -----------------------------------------------------------------------------------------


def part_of(path: Path, package: Path) -> str:
    return path.relative_to(package).with_suffix("").parts[0]


def imported_parts(path: Path, package: Path) -> set[str]:
    """The parts of `package` that a file imports anywhere in it, in functions and type checks too."""
    module = (package.name, *path.relative_to(package).with_suffix("").parts)
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # One leading dot is the package that the module lies in, each further one its parent.
            base = module[: len(module) - node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            targets = [(*base, alias.name) for alias in node.names]
        else:
            continue
        for target in targets:
            if target[0] == package.name:
                parts.add(target[1] if len(target) > 1 else GATHERING)
    return parts


def is_part(name: str, package: Path) -> bool:
    return (package / f"{name}.py").is_file() or (package / name).is_dir() or name == "_host"


def python_violations(package: Path) -> list[str]:
    """Imports inside `package` that break the rules, one line each."""
    found = []
    for path in sorted(package.rglob("*.py")):
        part = part_of(path, package)
        if part == GATHERING:
            continue
        where = path.relative_to(package)
        if part not in MODULES_USED:
            found.append(f"{where}: {part} is not in MODULES_USED; say there what it may import")
            continue
        for used in sorted(imported_parts(path, package)):
            if used == "_host" and part in ("reference", "layout"):
                found.append(f"{where}: {part} must not import the native module _host")
            elif not is_part(used, package):
                # A public name imported from the package itself: allowed to nobody, since it hides the part.
                found.append(f"{where}: {part} must import {used} from the module that defines it")
            elif used not in (part, "_host") and used not in MODULES_USED[part]:
                found.append(f"{where}: {part} must not import {used}")
    return found


def test_python_modules() -> None:
    assert (ROOT / "python/agoq_ext/reference.py").is_file()
    assert python_violations(ROOT / "python" / "agoq_ext") == []


@pytest.mark.parametrize(
    ("path", "line", "complaint"),
    [
        ("reference.py", "from . import _native", "reference must not import _native"),
        ("reference.py", "from .ops import quantize", "reference must not import ops"),
        ("reference.py", "def f():\n    import agoq_ext.tensor", "reference must not import tensor"),
        ("reference.py", "from . import _host", "reference must not import the native module _host"),
        ("layout.py", "from agoq_ext import ops", "layout must not import ops"),
        ("ops.py", "from .nn import functional", "ops must not import nn"),
        ("nn/functional.py", "from ..activation.convert import x", "nn must not import activation"),
        ("nn/functional.py", "from .. import collectives", "nn must not import collectives"),
        ("collectives.py", "from . import ddp", "collectives must not import ddp"),
        ("collectives.py", "from .autograd import f", "collectives must not import autograd"),
        (
            "ddp.py",
            "from agoq_ext import quantize",
            "ddp must import quantize from the module that defines it",
        ),
        ("surprise.py", "", "surprise is not in MODULES_USED"),
    ],
)
def test_python_violation_is_found(tmp_path: Path, path: str, line: str, complaint: str) -> None:
    package = tmp_path / "agoq_ext"
    allowed = {
        "__init__.py": "from .ops import quantize\n",
        "_native.py": "import torch\n",
        "_version.py": "",
        "layout.py": "import math\n",
        "reference.py": "from . import layout\nfrom .layout import FORMATS\n",
        "ops.py": "from . import _host, _native, layout\n",
        "tensor.py": "from agoq_ext import ops\n",
        "autograd.py": "from .tensor import QuantizedTensor\n",
        "nn/__init__.py": "from . import functional\n",
        "nn/functional.py": "from .. import autograd\nfrom ..ops import quantize\n",
        "activation/convert.py": "from ..nn.functional import linear\nfrom . import report\n",
        "collectives.py": "import torch.distributed as dist\nfrom . import ops\n",
        "ddp.py": "from .collectives import all_reduce\n",
    }
    for name, text in allowed.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert python_violations(package) == []

    (package / path).write_text(f"{line}\n")
    violations = python_violations(package)
    assert len(violations) == 1
    assert violations[0].startswith(path) and complaint in violations[0]
