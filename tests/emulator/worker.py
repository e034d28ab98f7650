"""Carries out a pickled list of calls in a process of its own: `python worker.py LIBRARY < calls > results`.

For the asan flavour, whose runtime must be loaded before everything else and which ends the process at its first
finding. Imports nothing outside the standard library, which starts fast even under Address Sanitizer.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from emulator import build
from emulator.device import Call, Device, Result, Schedule


@dataclass(frozen=True)
class Outcome:
    """The results of the calls that were carried out, and what the sanitizers said if they ended the process."""

    results: list[Result]
    report: str


def run_sanitized(library: Path, calls: list[tuple[Call, Schedule]]) -> Outcome:
    """Runs calls on a library of the asan flavour, up to the first finding of a sanitizer."""
    done = subprocess.run(
        [sys.executable, __file__, str(library)],
        input=pickle.dumps(calls),
        capture_output=True,
        env=build.sanitizer_environment(),
        timeout=240,
    )
    results = pickle.loads(done.stdout) if done.returncode == 0 else []
    return Outcome(results, "" if done.returncode == 0 else done.stderr.decode(errors="replace"))


def main() -> None:
    device = Device(Path(sys.argv[1]))
    calls: list[tuple[Call, Schedule]] = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pickle.dumps([device.run(call, schedule) for call, schedule in calls]))


if __name__ == "__main__":
    main()
