"""Launches kernels on the emulator: buffers, argument structs, schedules and findings.

A `Call` is plain data (names, bytes, numbers), so the process that carries it out needs ctypes and nothing else;
the flavour with Address Sanitizer runs in a process of its own (worker.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROLES = ("input", "output", "inout")
ORDERS = ("forward", "reverse", "random")
UNWRITTEN = 0xFF  # what fresh buffers hold
_FIELDS = ("kind", "kernel", "file", "line", "block", "thread", "buffer", "message", "callers")


@dataclass(frozen=True)
class Array:
    """A buffer of device memory.

    Attributes:
        role: an "input" must not be written, an "output" must be written in full, an "inout" is free.
        data: what it holds before the launch; of an output, only its length counts.
        misalignment: address of the first byte modulo 256.
        gaps: [start, stop) byte ranges that belong to somebody else, such as those between the rows of a view.
    """

    name: str
    role: str
    data: bytes
    misalignment: int = 0
    gaps: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Pointer:
    """The address of an array's byte, in an argument struct."""

    array: str
    offset: int = 0


@dataclass(frozen=True)
class Call:
    """One launch: the kernel's registered name, its argument struct's fields, and the buffers they point to."""

    kernel: str
    struct: type[ctypes.Structure]
    fields: Mapping[str, Any]
    arrays: tuple[Array, ...]


@dataclass(frozen=True)
class Schedule:
    """In which order threads, blocks and asynchronous copies run."""

    order: str = "forward"
    seed: int = 0

    def __str__(self) -> str:
        return f"random{self.seed}" if self.order == "random" else self.order


def schedules(random: int = 1) -> list[Schedule]:
    """Both fixed orders and `random` seeded ones."""
    return [Schedule("forward"), Schedule("reverse")] + [
        Schedule("random", seed) for seed in range(1, random + 1)
    ]


@dataclass(frozen=True)
class Finding:
    """One thing that the emulator found wrong.

    Attributes:
        kind: "race", "out-of-bounds", ...; docs/testing-cuda.md lists them.
        kernel: the kernel function with its template arguments.
        file, line: the place in the source; callers: the places that this code was inlined into, innermost first.
        block, thread: indices "x,y,z"; empty where no thread is to blame.
        buffer: name of the buffer or shared array; empty where none is involved.
    """

    kind: str
    kernel: str
    file: str
    line: int
    block: str
    thread: str
    buffer: str
    message: str
    callers: str = ""

    def __str__(self) -> str:
        who = f" block {self.block} thread {self.thread}" if self.thread else ""
        where = f" at {self.file}:{self.line}" if self.file else ""
        callers = f" (in {self.callers})" if self.callers else ""
        return f"{self.kind}: {self.message} [{self.kernel}{who}]{where}{callers}"


@dataclass(frozen=True)
class Result:
    """What a launch left behind: its status (0 is success), findings, and every output and inout buffer's bytes."""

    status: int
    findings: list[Finding]
    arrays: dict[str, bytes] = field(default_factory=dict)


class Device:
    """One library of the emulator, loaded into this process. Its state is global: use one at a time."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        declare(self._library)
        self.flavour = self._library.emulator_flavour().decode()
        self.kernels = self._library.emulator_kernels().decode().split()

    def set_step_limit(self, steps: int) -> None:
        """Accesses and waits after which a launch counts as endless."""
        self._library.emulator_step_limit(steps)

    def run(self, call: Call, schedule: Schedule | None = None) -> Result:
        """Carries out a launch in fresh memory.

        Raises:
            ValueError: no kernel has the call's name, or its struct differs in size from the compiler's.
        """
        library, schedule = self._library, schedule or Schedule()
        library.emulator_clear()
        library.emulator_schedule(ORDERS.index(schedule.order), schedule.seed)
        addresses = {array.name: self._allocate(array) for array in call.arrays}
        args = pack(call.struct, call.fields, addresses)
        status = library.emulator_launch(call.kernel.encode(), ctypes.byref(args), ctypes.sizeof(args))
        if status == -1:
            raise ValueError(
                f"no kernel {call.kernel!r} in {library._name}; it has {', '.join(self.kernels)}"
            )
        if status == -2:
            size = ctypes.sizeof(args)
            raise ValueError(
                f"{call.kernel}: {call.struct.__name__} has another size than its mirror's {size} bytes"
            )
        if status == 0:
            library.emulator_check_outputs()
        arrays = {
            array.name: self._read(array, addresses[array.name])
            for array in call.arrays
            if array.role != "input"
        }
        return Result(status, self._findings(), arrays)

    def _allocate(self, array: Array) -> int:
        size, role = len(array.data), ROLES.index(array.role)
        address = self._library.emulator_allocate(array.name.encode(), size, array.misalignment, role)
        if not address:
            raise MemoryError(f"the emulator's memory is too small for {array.name!r} of {size} bytes")
        if array.role != "output":
            ctypes.memmove(address, array.data, size)
        for start, stop in array.gaps:
            self._library.emulator_forbid(address + start, stop - start)
        return address

    def _read(self, array: Array, address: int) -> bytes:
        """The array's bytes, with gaps as UNWRITTEN: they may not be touched, nor read here."""
        pieces, at = [], 0
        for start, stop in sorted(array.gaps):
            pieces += [ctypes.string_at(address + at, start - at), bytes([UNWRITTEN]) * (stop - start)]
            at = stop
        return b"".join([*pieces, ctypes.string_at(address + at, len(array.data) - at)])

    def _findings(self) -> list[Finding]:
        lines = self._library.emulator_findings().decode().splitlines()
        rows = [dict(zip(_FIELDS, line.split("\x1f"), strict=True)) for line in lines]
        return [Finding(**{**row, "line": int(row["line"])}) for row in rows]


def declare(library: ctypes.CDLL) -> None:
    """Sets the argument and result types of runtime/api.cpp."""
    size, text, pointer = ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "flavour": (text, ()),
        "kernels": (text, ()),
        "schedule": (None, (ctypes.c_int, ctypes.c_uint64)),
        "step_limit": (None, (ctypes.c_uint64,)),
        "allocate": (pointer, (text, size, size, ctypes.c_int)),
        "forbid": (None, (pointer, size)),
        "launch": (ctypes.c_int, (text, pointer, size)),
        "check_outputs": (None, ()),
        "findings": (text, ()),
        "clear": (None, ()),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"emulator_{name}")
        function.restype, function.argtypes = result, arguments


def pack(
    struct: type[ctypes.Structure], fields: Mapping[str, Any], addresses: Mapping[str, int]
) -> ctypes.Structure:
    """An argument struct from a mapping with a value for each of its fields; Pointers become addresses."""
    names = [field[0] for field in struct._fields_]
    if set(names) != set(fields):
        raise ValueError(f"{struct.__name__} has the fields {', '.join(names)}; got {', '.join(fields)}")
    result = struct()
    for name, kind, *_ in struct._fields_:
        value = fields[name]
        if isinstance(value, Mapping):
            assert issubclass(kind, ctypes.Structure)
            value = pack(kind, value, addresses)
        elif isinstance(value, Pointer):
            value = addresses[value.array] + value.offset
        setattr(result, name, value)
    return result
