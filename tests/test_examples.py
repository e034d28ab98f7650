"""Every example runs as it stands, for a few steps, and the table that lists them is complete."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "common.py")
NEEDS = {"lora.py": "peft", "trainer.py": "accelerate", "cuda_kernel.py": "cupy"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_runs(script: str) -> None:
    needed = NEEDS.get(script)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    table = (FOLDER / "README.md").read_text()
    command = next(m for m in re.findall(r"`((?:python|torchrun) [^`]*)`", table) if m.endswith(f"/{script}"))
    words = command.split()[1:-1]
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", *words] if command.startswith("torchrun") else words
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, str(FOLDER / script), "--steps", "3"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loss" in done.stdout or "machine code" in done.stdout


def test_the_table_lists_every_example() -> None:
    listed = re.findall(r"^\| (\w+\.py) \|", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(listed) == SCRIPTS
