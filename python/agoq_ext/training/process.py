"""What the operating system counts for this process: memory held, bytes written."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_IO = Path("/proc/self/io")


def resident_bytes() -> int:
    """Resident set size now; the peak where the system does not tell."""
    return _status("VmRSS") or _max_rss()


def peak_resident_bytes() -> int:
    """Largest resident set size since the process began, or since `reset_peak`.

    Read from /proc where it exists: getrusage also counts what the parent held when it started this process.
    """
    return _status("VmHWM") or _max_rss()


def reset_peak() -> None:
    """Starts the measurement of the peak anew; does nothing where the system does not allow it."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        pass


def written_bytes() -> int:
    """Bytes this process has handed to the kernel to write, to files and to Gloo's sockets; 0 where not told."""
    return _field(_IO, "wchar")


def _status(name: str) -> int:
    return _field(_STATUS, name) * 1024


def _field(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0


def _max_rss() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
