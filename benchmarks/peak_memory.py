"""What Linux says of this process's memory: resident bytes, and their high-water mark, which can begin anew."""

from __future__ import annotations

import os
from pathlib import Path


def resident() -> int:
    """Resident bytes now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def high_water() -> int:
    """The most resident bytes since the last `begin`, or ever."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def begin() -> int:
    """Starts the high-water mark anew; resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident()
