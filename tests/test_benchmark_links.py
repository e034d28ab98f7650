"""The benchmarks over rate-limited links and of replicas: tables follow from what is stored; what a machine lacks."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def load(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    __import__(name)
    return sys.modules[name]


def test_stored_tables_follow_from_stored_times(monkeypatch: pytest.MonkeyPatch) -> None:
    results = BENCHMARKS / "results"
    link = load(monkeypatch, "collectives_link")
    stored = json.loads((results / "collectives_link.json").read_text())
    assert link.table(link.rows(stored["runs"])) == (results / "collectives_link.md").read_text()
    link = load(monkeypatch, "diloco_link")
    stored = json.loads((results / "diloco_link.json").read_text())
    assert link.table(stored["results"]) == (results / "diloco_link.md").read_text()
    runs = load(monkeypatch, "diloco_convergence")
    assert runs.table(runs.rows(results / "diloco", 1500)) == (results / "diloco_convergence.md").read_text()


def test_utilization_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1 s alone before and 0.3 s after; 0.4 s with the exchange."""
    link = load(monkeypatch, "diloco_link")
    (row,) = link.rows({"DiLoCo, FP32": {"alone": [0.1, 0.3], "seconds_a_step": [0.4]}})
    assert row["utilization"] == pytest.approx(0.5) and row["utilization_range"] == [row["utilization"]] * 2


def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    link = load(monkeypatch, "diloco_link")
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    monkeypatch.setattr(sys, "argv", ["diloco_link.py", "--output", str(tmp_path)])
    assert link.main() == 0
    assert capsys.readouterr().out == "diloco_link: not measured: tc is not installed\n"
    assert not list(tmp_path.iterdir())
