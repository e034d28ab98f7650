"""What the CUDA compiler made of every kernel: registers, shared memory, spills, and the widths of global accesses.

    python benchmarks/cuda_report.py LIBRARY [--json FILE] [--cuobjdump PROGRAM]

LIBRARY is what `make cuda` builds; no GPU is needed. The table has a line for each kernel and architecture with the
extremes over its instantiations; the JSON file has every instantiation. Exits with 1 if one uses local memory (spilled
registers, or arrays that stayed on the stack), if a vector instantiation has fewer 128-bit global accesses than its
source asks for, or if a kernel uses generic addresses without a reason.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")

# Vector accesses of dense elements in the source of a kernel: loads, stores. An octet of FP32 is two of 16 bytes, one
# of 16-bit elements is one, and the dtype is a run-time value: three for each place that loads or stores an octet.
# Kernels with a template parameter `Vec` (the last one) have them where it is true, the others always, behind a
# run-time branch. Codes have 8 bytes an octet or fewer and are not among them.
OCTET = 3
WIDE_ACCESSES = {
    "quantize_kernel": (OCTET, 0),
    "dequantize_kernel": (0, OCTET),
    "accumulate_kernel": (OCTET, 0),
    "reduce_kernel": (0, OCTET),
    "row_norm_quantize_kernel": (3 * OCTET, OCTET),  # x, weight, bias; y
    "row_norm_backward_kernel": (4 * OCTET, 2 * OCTET),  # dy and weight, in both passes; dx, y
    "swiglu_quantize_kernel": (2 * OCTET, OCTET),  # gate, up; h
    "swiglu_backward_kernel": (OCTET, 3 * OCTET),  # dh; h, dup, dgate
    "gelu_quantize_kernel": (OCTET, OCTET),  # x; y
    "gelu_backward_kernel": (OCTET, 2 * OCTET),  # dy; y, dx
}
HAVE_VEC = {"quantize_kernel", "dequantize_kernel", "accumulate_kernel", "reduce_kernel"}
# Its sums of dweight and dbias are in shared memory or, for long rows, in the output, behind one pointer.
MAY_BE_GENERIC = {"row_norm_backward_kernel"}
# Kernels that read and write codes and sums alone.
NO_DENSE = {"reduce_quantize_kernel", "norm_kernel", "norm_total_kernel", "part_sum_kernel"}


@dataclass
class Instantiation:
    """One compiled kernel.

    Attributes:
        symbol: its mangled name.  architecture: such as "sm_90a".
        registers: of a thread.  shared: static shared memory of a block, bytes.
        local: bytes of stack and local memory of a thread; spilled registers are part of it.
        local_accesses: instructions that read or write it.
        loads, stores: global accesses in the code by their width in bits.
        generic: accesses by generic addresses.
    """

    symbol: str
    architecture: str
    registers: int = 0
    shared: int = 0
    local: int = 0
    local_accesses: int = 0
    loads: dict[int, int] = field(default_factory=dict)
    stores: dict[int, int] = field(default_factory=dict)
    generic: int = 0
    name: str = ""  # demangled, with template arguments

    @property
    def kernel(self) -> str:
        return self.name.partition("<")[0]

    def complaints(self) -> list[str]:
        """What is wrong with it."""
        found = []
        if self.local or self.local_accesses:
            found.append(f"{self.local} bytes of local memory, {self.local_accesses} accesses to it")
        if self.kernel not in NO_DENSE and self.kernel not in WIDE_ACCESSES:
            found.append("not in the table of wide accesses (benchmarks/cuda_report.py)")
        if self.is_vector:
            for what, counts, needed in zip(
                ("loads", "stores"), (self.loads, self.stores), WIDE_ACCESSES[self.kernel], strict=True
            ):
                wide = counts.get(128, 0)
                if wide < needed:
                    found.append(f"{wide} of {needed} global {what} are 128 bits wide")
        if self.generic and self.kernel not in MAY_BE_GENERIC:
            found.append(f"{self.generic} accesses by generic addresses")
        return found

    @property
    def is_vector(self) -> bool:
        if self.kernel in HAVE_VEC:
            return bool(re.search(r"(true|\(bool\)1)>$", self.name))
        return self.kernel in WIDE_ACCESSES


# --- what cuobjdump prints ------------------------------------------------------------------------------------

_ARCHITECTURE = re.compile(r"^\s*(?:arch = |code for )(sm_\w+)$")
_FUNCTION = re.compile(r"^\s*Function\s*:?\s*(\w+):?$")
_RESOURCES = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)((?:\.\w+)*)")
_SUFFIX_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}


def parse_resources(lines: Iterable[str]) -> Iterator[Instantiation]:
    """Registers and memory of every function in the output of `cuobjdump --dump-resource-usage`."""
    architecture, symbol = "", ""
    for line in lines:
        if match := _ARCHITECTURE.match(line):
            architecture = match[1]
        elif match := _FUNCTION.match(line):
            symbol = match[1]
        elif symbol and "REG:" in line:
            values = {key: int(value) for key, value in _RESOURCES.findall(line)}
            local = values["STACK"] + values["LOCAL"]
            yield Instantiation(symbol, architecture, values["REG"], values["SHARED"], local)
            symbol = ""


def parse_sass(lines: Iterable[str], kernels: dict[tuple[str, str], Instantiation]) -> None:
    """Counts the memory accesses in the output of `cuobjdump -sass`, into `kernels` by (architecture, symbol)."""
    architecture, current = "", None
    for line in lines:
        if match := _INSTRUCTION.match(line):
            if current is not None:
                count_instruction(current, match[1], match[2].split(".")[1:])
        elif match := _ARCHITECTURE.match(line):
            architecture = match[1]
        elif match := _FUNCTION.match(line):
            current = kernels.get((architecture, match[1]))


def count_instruction(kernel: Instantiation, opcode: str, suffixes: list[str]) -> None:
    if opcode in ("LDL", "STL"):
        kernel.local_accesses += 1
    elif opcode in ("LD", "ST"):
        kernel.generic += 1
    elif opcode in ("LDG", "STG"):
        bits = next((_SUFFIX_BITS[s] for s in suffixes if s in _SUFFIX_BITS), 32)
        counts = kernel.loads if opcode == "LDG" else kernel.stores
        counts[bits] = counts.get(bits, 0) + 1


def short_name(demangled: str) -> str:
    """`kernel<arguments>` of a demangled kernel, without namespaces, return type and parameters."""
    match = re.search(r"(\w+_kernel)(<.*>)?\(", demangled)
    name = match[1] + (match[2] or "") if match else demangled
    return re.sub(r"agoq::(?:cuda::)?(?:\(anonymous namespace\)::)?", "", name)


# --- the report -----------------------------------------------------------------------------------------------


def run(*command: str, stdin: str | None = None) -> list[str]:
    done = subprocess.run(command, input=stdin, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


def find_cuobjdump() -> str | None:
    """Beside nvcc, on PATH, or from PyPI's nvidia-cuda-cuobjdump, which needs nvidia-cuda-nvdisasm beside it."""
    installed = [
        str(path)
        for root in map(Path, sys.path)
        for path in sorted(root.glob("nvidia/*/bin/cuobjdump"))
        if path.is_file()
    ]
    return (
        next(iter(installed), None)
        or shutil.which("cuobjdump")
        or shutil.which("/usr/local/cuda/bin/cuobjdump")
    )


def read_library(library: Path, cuobjdump: str) -> list[Instantiation]:
    """Every kernel of the reported architectures."""
    found: dict[tuple[str, str], Instantiation] = {}
    for architecture in ARCHITECTURES:
        select = ("-arch", architecture, str(library))
        for kernel in parse_resources(run(cuobjdump, "--dump-resource-usage", *select)):
            found[kernel.architecture, kernel.symbol] = kernel
        parse_sass(run(cuobjdump, "-sass", *select), found)
    kernels = [found[key] for key in sorted(found)]
    names = run("c++filt", stdin="\n".join(kernel.symbol for kernel in kernels) + "\n")
    for kernel, name in zip(kernels, names, strict=True):
        kernel.name = short_name(name)
    return kernels


def extremes(values: Iterable[int]) -> str:
    low, high = min(all_values := list(values)), max(all_values)
    return str(low) if low == high else f"{low}-{high}"


def table(kernels: list[Instantiation]) -> list[str]:
    """One line a kernel and architecture."""
    form = "{:<26} {:<8} {:>5} {:>10} {:>12} {:>7} {:>11} {:>11} {:>10}"
    lines = [
        form.format(
            "kernel", "arch", "count", "registers", "shared", "spills", "LDG.128", "STG.128", "verdict"
        )
    ]
    for key in dict.fromkeys((k.kernel, k.architecture) for k in kernels):
        group = [k for k in kernels if (k.kernel, k.architecture) == key]
        vector = [k for k in group if k.is_vector]
        bad = sum(bool(k.complaints()) for k in group)
        lines.append(
            form.format(
                *key,
                len(group),
                extremes(k.registers for k in group),
                extremes(k.shared for k in group),
                extremes(k.local + k.local_accesses for k in group),
                extremes(k.loads.get(128, 0) for k in vector) if vector else "-",
                extremes(k.stores.get(128, 0) for k in vector) if vector else "-",
                f"{bad} bad" if bad else "ok",
            )
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--json", type=Path, help="write every instantiation here")
    parser.add_argument(
        "--cuobjdump", default=find_cuobjdump(), help="the program; needs nvdisasm beside it or on PATH"
    )
    options = parser.parse_args()
    if options.cuobjdump is None:
        print(
            "cuda_report: needs cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm",
            file=sys.stderr,
        )
        return 2
    kernels = read_library(options.library, options.cuobjdump)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([asdict(kernel) for kernel in kernels], indent=1) + "\n")
    print("\n".join(table(kernels)))
    missing = set(ARCHITECTURES) - {kernel.architecture for kernel in kernels}
    complaints = [f"{k.name} {k.architecture}: {text}" for k in kernels for text in k.complaints()]
    complaints += [f"{architecture}: the library has no kernels for it" for architecture in sorted(missing)]
    print(f"\n{len(kernels)} kernels, {len(complaints)} complaints", *complaints, sep="\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
