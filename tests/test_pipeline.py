"""Widths along a pipeline: counts, rounding, and what four stages really store."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_world
from torch.distributed.pipelining import schedules

from agoq_ext.pipeline import (
    WIDTHS,
    fitting_bits,
    free_memory,
    peak_in_flight,
    stage_bits,
    stored_microbatches,
)

pytest.importorskip("transformers")
PAPER = [11, 9, 7, 5]


def test_the_papers_case():
    assert stored_microbatches("interleaved_1f1b", 4, 2, 8) == PAPER
    assert stage_bits(PAPER) == [4, 4, 6, 8]
    assert stage_bits(PAPER, rounding="nearest") == [4, 5, 6, 8]
    assert [b * n for b, n in zip(stage_bits(PAPER, rounding="nearest"), PAPER, strict=True)] == [
        44,
        45,
        42,
        40,
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize(
    ("formula", "name", "chunks"),
    [
        ("gpipe", "GPipe", 1),
        ("1f1b", "1F1B", 1),
        *(("interleaved_1f1b", "Interleaved1F1B", v) for v in (2, 3)),
    ],
)
def test_formulas_equal_the_counted_actions(formula, name, chunks, stages, rounds):
    """Micro-batches in multiples of the stages, as the interleaved schedule wants them."""
    microbatches = stages * rounds
    counted = stored_microbatches(name, stages, chunks, microbatches)
    assert stored_microbatches(formula, stages, chunks, microbatches) == counted
    assert stored_microbatches(schedules.get_schedule_class(name), stages, chunks, microbatches) == counted


def test_few_microbatches_cap_the_count():
    assert stored_microbatches("1f1b", 4, 1, 2) == [2, 2, 2, 1]
    assert stored_microbatches("interleaved_1f1b", 4, 2, 4) == [8, 8, 7, 5]
    assert stored_microbatches("gpipe", 3, 1, 5) == [5, 5, 5]


def test_schedules_that_split_the_backward_free_at_the_weights_gradient():
    """Zero-bubble schedules keep a micro-batch until W: more than from F to I."""
    until_input = peak_in_flight([(0, "F"), (0, "I"), (0, "F"), (0, "W"), (0, "I"), (0, "W")])
    assert until_input == 2
    assert stored_microbatches("ZBVZeroBubble", 4, 2, 8) == [8, 8, 8, 8]
    assert stored_microbatches("LoopedBFS", 4, 2, 8) == [16] * 4
    assert len(stored_microbatches("DualPipeV", 4, 2, 8)) == 4  # overlapped forwards and backwards


@pytest.mark.parametrize("base_bits", WIDTHS)
def test_rounding_down_never_exceeds_the_fullest_stage_and_wastes_no_width(base_bits):
    for stored in (PAPER, [8, 8, 8, 8], [4, 3, 2, 1], [16, 12, 11, 2], [1], [5, 7]):
        bits = stage_bits(stored, base_bits=base_bits)
        limit = base_bits * max(stored)
        for b, n in zip(bits, stored, strict=True):
            assert b >= base_bits and b * n <= limit
            assert not [w for w in WIDTHS if w > b and w * n <= limit]


def test_widths_that_fit_into_memory():
    actions = [(0, "F"), (4, "F"), (0, "F"), (4, "B"), (0, "B"), (0, "B")]
    cost = {w: {0: 100 * w, 4: 10 * w} for w in WIDTHS}
    peaks = {w: peak_in_flight(actions, cost[w]) for w in WIDTHS}
    assert peaks == {w: 210 * w for w in WIDTHS}
    assert fitting_bits(actions, cost, 210 * 8) == 8
    assert fitting_bits(actions, cost, 210 * 8 - 1) == 6
    assert fitting_bits(actions, cost, 0) == 4
    assert free_memory() > 2**20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: stored_microbatches("2f2b", 4, 1, 8),
            "schedule must be one of gpipe, 1f1b, interleaved_1f1b",
        ),
        (lambda: stored_microbatches("1f1b", 4, 2, 8), "chunks must be 1 for 1f1b; got 2"),
        (lambda: stored_microbatches("1F1B", 4, 2, 8), "chunks must be 1 for Schedule1F1B; got 2"),
        (lambda: stored_microbatches("gpipe", 0, 1, 8), "stages must be at least 1; got 0"),
        (lambda: stored_microbatches("gpipe"), "stages and microbatches must be given"),
        (lambda: stage_bits([3], rounding="up"), "rounding must be 'down' or 'nearest'; got 'up'"),
        (lambda: stage_bits([3], base_bits=7), "base_bits must be one of 4, 5, 6, 8; got 7"),
        (lambda: stage_bits([3, 0]), r"at least one micro-batch a stage; got \[3, 0\]"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_object_without_an_order_is_named():
    with pytest.raises(
        TypeError, match="schedule must be one of torch.distributed.pipelining .*; got Linear"
    ):
        stored_microbatches(torch.nn.Linear(1, 1))


# --- four stages over Gloo -----------------------------------------------------------------------------------


def all_runs(rank: int, world: int) -> dict[str, dict[str, Any]]:
    """Interleaved 1F1B without and with compression, then 1F1B with widths fitted to what stage 0 needs at 4 bits."""
    from pipeline_stages import HIDDEN, SEQ, run_stage

    runs = {
        "exact": run_stage(rank, world, "Interleaved1F1B", 2, 8, None),
        "paper": run_stage(rank, world, "Interleaved1F1B", 2, 8, "paper"),
        "1f1b": run_stage(rank, world, "1F1B", 1, 4, "paper"),
    }
    limit = torch.tensor([runs["1f1b"]["peak"]])
    torch.distributed.broadcast(limit, 0)
    one = torch.zeros(1, SEQ, HIDDEN, requires_grad=True)
    runs["fitted"] = run_stage(rank, world, "1F1B", 1, 4, "paper", inputs=[one], free_bytes=int(limit))
    return runs


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_world(tmp_path_factory.mktemp("pipeline"), 4, all_runs)


def test_four_interleaved_stages_store_no_more_than_the_first(ranks):
    exact, got = ([r[run] for r in ranks] for run in ("exact", "paper"))
    assert [g["stored"] for g in got] == [PAPER] * 4
    assert [g["bits"] for g in got] == [4, 4, 6, 8]
    peaks = [g["peak"] for g in got]
    assert all(0 < p <= peaks[0] for p in peaks)
    assert all(g["left"] == 0 for g in got)
    assert got[3]["loss"] == pytest.approx(exact[3]["loss"], rel=1e-6)
    for g, e in zip(got, exact, strict=True):
        assert g["peak"] < 0.5 * e["peak"]
        assert g["norm"] == pytest.approx(e["norm"], rel=0.05)


def test_widths_fitted_to_the_memory_rise_along_the_pipe(ranks):
    """4, 3, 2, 1 micro-batches in 1F1B and the same memory on every stage."""
    limit = ranks[0]["1f1b"]["peak"]
    got = [r["fitted"] for r in ranks]
    assert [g["bits"] for g in got] == sorted(g["bits"] for g in got)
    assert got[0]["bits"] == 4 and got[3]["bits"] == 8
    assert all(g["fits"] and g["peak"] <= limit for g in got)
