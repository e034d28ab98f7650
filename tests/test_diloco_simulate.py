"""The bandwidth simulator: the paper's table, limits that are known exactly, and what lies beyond the paper."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agoq_ext.cli import main
from agoq_ext.diloco import cli
from agoq_ext.diloco.simulate import (
    GRID,
    METHODS,
    PAPER_CLUSTERS,
    PAPER_TABLE,
    Cluster,
    needed,
    table,
    utilization,
    wire_bits,
)
from agoq_ext.errors import UserError

SMALL = Cluster(1e9, 24, 0.1)


@pytest.mark.parametrize("name", PAPER_CLUSTERS)
def test_papers_table(name: str) -> None:
    found = table(PAPER_CLUSTERS[name])
    for method in METHODS:
        for ours, papers in zip(found[method], PAPER_TABLE[name][method], strict=True):
            assert ours is not None and papers / 1.5 <= ours <= papers * 1.5, (method, ours, papers)


def test_grid() -> None:
    assert len(GRID) == 50
    assert (GRID[0], GRID[-1]) == pytest.approx((0.1, 1000))


def test_one_layer_by_hand() -> None:
    """Nothing can start before the step's end: data parallel adds the transfer and the latency to every step."""
    cluster = Cluster(1e9, 1, 0.1, latency=0.02)
    assert utilization(cluster, "data parallel", 160) == pytest.approx(0.1 / (0.1 + 0.1 + 0.02))
    assert utilization(cluster, "DiLoCo", 160) == pytest.approx(10 / (10 + 0.1 + 0.02))
    # Started at one step's end, used at the next one's: hidden as long as it takes less than a step.
    assert utilization(cluster, "+ overlap", 250) == 1.0
    assert utilization(cluster, "+ overlap", 100) < 1.0


def test_bits_by_replicas() -> None:
    assert wire_bits(SMALL, "data parallel") == 16  # 2 (M - 1) / M
    assert wire_bits(replace(SMALL, replicas=8), "DiLoCo") == 28
    assert wire_bits(replace(SMALL, replicas=3), "+ 4-bit") == pytest.approx(2 * 4.125)
    assert wire_bits(replace(SMALL, replicas=8), "+ 4-bit") == pytest.approx(7 / 8 * (4.125 + 8.125))
    assert utilization(replace(SMALL, replicas=1), "data parallel", 0.1) == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_more_bandwidth_and_fewer_replicas_never_hurt(method: str) -> None:
    shares = [utilization(SMALL, method, gbits) for gbits in GRID[::7]]
    assert shares == sorted(shares)
    assert utilization(replace(SMALL, replicas=4), method, 5) <= utilization(SMALL, method, 5)


@pytest.mark.parametrize("method", METHODS)
def test_jitter_and_stragglers_cost(method: str) -> None:
    calm = utilization(SMALL, method, 1000)
    jittery = utilization(replace(SMALL, jitter=0.2), method, 1000)
    straggling = utilization(replace(SMALL, straggler=1.5), method, 1000)
    assert jittery < calm and straggling < calm
    assert jittery == utilization(replace(SMALL, jitter=0.2), method, 1000)
    # Meeting at every step, the replicas wait for the slowest of each; meeting rarely, they wait for the sum's.
    if method == "DiLoCo":
        assert jittery > utilization(replace(SMALL, jitter=0.2), "data parallel", 1000) + 0.05
    if method == "data parallel":
        assert straggling == pytest.approx(2.5 / 3, abs=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "Cluster: layers must be positive; got 0"),
        ({"jitter": -1.0}, "Cluster: jitter must not be negative; got -1.0"),
        ({"overlap": 100}, "overlap must be at least 0 and less than sync_every"),
    ],
)
def test_wrong_clusters(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_out_of_reach() -> None:
    assert needed(replace(SMALL, latency=1.0), "data parallel", 0.5) is None


def plan(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(["--diloco", *arguments]))


def test_plan_prints_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    model = ["--parameters", "1e8", "--layers", "6", "--step-time", "0.2", "--sync-every", "30"]
    assert plan(*model, "--plot", str(path)) == 0
    text = capsys.readouterr().out
    assert all(method in text for method in METHODS)
    assert path.read_bytes()[1:4] == b"PNG"
    assert plan(*model, "--json", "--replicas", "4") == 0
    result = json.loads(capsys.readouterr().out)["models"]
    (only,) = result.values()
    assert only["cluster"]["replicas"] == 4 and only["cluster"]["sync_every"] == 30
    assert only["gbits_needed"]["DiLoCo"][0] == needed(Cluster(1e8, 6, 0.2, 4, 30), "DiLoCo", 0.5)


def test_plan_refuses() -> None:
    with pytest.raises(UserError, match="plan --diloco: --layers or --paper is needed"):
        plan("--parameters", "1e8", "--step-time", "0.1")
    with pytest.raises(UserError, match="plan --diloco: Cluster: step_time must be positive; got 0.0"):
        plan("--parameters", "1e8", "--layers", "2", "--step-time", "0")
    with pytest.raises(UserError, match="--plot: cannot write"):
        plan("--parameters", "1e8", "--layers", "2", "--step-time", "0.1", "--plot", "/nowhere/a.png")
    assert cli.is_asked(["plan", "--diloco"]) and not cli.is_asked(["plan", "--model", "x"])


def test_the_command_offers_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--diloco", "--paper"]) == 0
    assert "data parallel" in capsys.readouterr().out
