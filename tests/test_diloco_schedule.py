"""Streaming DiLoCo's fragments and steps, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from agoq_ext.diloco.schedule import Fragments, Schedule, layer_of, offsets, split, split_layers

SIZES = {
    "embed.weight": 100,
    **{f"layers.{i}.{part}": 10 for i in range(5) for part in ("w", "b")},
    "norm.weight": 3,
    "head.weight": 100,
}


def layers_in(parts: list[list[str]]) -> list[Any]:
    """Each fragment as the layers it holds and the names outside layers."""
    return [
        sorted({int(n.split(".")[1]) for n in part if layer_of(n)}) + [n for n in part if not layer_of(n)]
        for part in parts
    ]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.7.mlp.up.weight", "model.layers.7"),
        ("0.weight", "0"),
        ("h.10.experts.3.w", "h.10"),
        ("embed2.weight", None),
    ],
)
def test_layer_of(name: str, layer: str | None) -> None:
    assert layer_of(name) == layer


@pytest.mark.parametrize(
    ("layers", "size", "pattern", "expected"),
    [
        (6, 3, "strided", [[0, 2, 4], [1, 3, 5]]),
        (6, 3, "sequential", [[0, 1, 2], [3, 4, 5]]),
        (7, 3, "strided", [[0, 3, 6], [1, 4], [2, 5]]),
        (7, 3, "sequential", [[0, 1, 2], [3, 4, 5], [6]]),
        (2, 3, "strided", [[0, 1]]),
        (0, 3, "strided", []),
    ],
)
def test_split_layers(layers: int, size: int, pattern: str, expected: list[list[int]]) -> None:
    assert split_layers(layers, size, pattern) == expected


OTHERS = ["embed.weight", "norm.weight", "head.weight"]


@pytest.mark.parametrize(
    ("fragments", "expected"),
    [
        (1, [[0, 1, 2, 3, 4, *OTHERS]]),
        (2, [[0, 1, 2, 3, 4], OTHERS]),
        (3, [[0, 2, 4], [1, 3], OTHERS]),
        (6, [[0], [1], [2], [3], [4], OTHERS]),
        (Fragments(), [[0, 2, 4], [1, 3], OTHERS]),
        (Fragments(2, "sequential"), [[0, 1], [2, 3], [4], OTHERS]),
        # The large ones go to the smallest fragments: 60 and 40 elements, then 60 and 140, then 160 and 140.
        (
            Fragments(others="shared"),
            [[0, 2, 4, "head.weight"], [1, 3, "embed.weight", "norm.weight"]],
        ),
    ],
)
def test_split(fragments: Any, expected: list[Any]) -> None:
    parts = split(SIZES, fragments)
    assert layers_in(parts) == expected
    assert sorted(name for part in parts for name in part) == sorted(SIZES)


def test_split_by_names_and_without_layers() -> None:
    assert split({"a": 1, "b": 2}, [["b"], ["a"]]) == [["b"], ["a"]]
    assert split({"a": 1, "b": 2}, Fragments()) == [["a", "b"]]
    assert split({"a": 1, "b": 2}, Fragments(others="shared")) == [["a", "b"]]
    assert split({"0.w": 1, "1.w": 2}, 2) == [["0.w"], ["1.w"]]
    assert split({}, 1) == []


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        (0, "fragments must be between 1 and 6 for this model; got 0"),
        (7, "fragments must be between 1 and 6 for this model; got 7"),
        ([["embed.weight"]], "leaves out: head.weight"),
        ([list(SIZES), ["norm.weight"]], "names twice: norm.weight"),
        ([list(SIZES), ["lost"]], "does not know: lost"),
        ([list(SIZES), []], "must not be empty"),
    ],
)
def test_split_refuses(fragments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(SIZES, fragments)


@pytest.mark.parametrize(
    ("sync_every", "fragments", "expected"),
    [
        (100, 9, [0, 11, 22, 33, 44, 55, 66, 77, 88]),
        (30, 1, [0]),
        (10, 4, [0, 2, 4, 6]),
        (3, 5, [0, 1, 2, 0, 1]),
        (1, 3, [0, 0, 0]),
    ],
)
def test_offsets(sync_every: int, fragments: int, expected: list[int]) -> None:
    assert offsets(sync_every, fragments) == expected


# (H, fragments, tau, warm-up, early) -> {step: (fragments that start, fragments that finish)} of steps 1 to 16
STEPS: list[tuple[tuple[int, int, int, int, bool], dict[int, tuple[list[int], list[int]]]]] = [
    ((5, 1, 0, 0, False), {5: ([0], [0]), 10: ([0], [0]), 15: ([0], [0])}),
    (
        (5, 2, 1, 0, False),
        {5: ([0], []), 6: ([], [0]), 7: ([1], []), 8: ([], [1]), 10: ([0], []), 11: ([], [0]),
         12: ([1], []), 13: ([], [1]), 15: ([0], []), 16: ([], [0])},
    ),
    (
        (7, 3, 6, 0, False),  # 7 is no multiple of 3, and fragments overlap each other
        {7: ([0], []), 9: ([1], []), 11: ([2], []), 13: ([], [0]), 14: ([0], []), 15: ([], [1]), 16: ([1], [])},
    ),
    (
        (2, 3, 1, 0, False),  # more fragments than steps
        {2: ([0, 2], []), 3: ([1], [0, 2])} | {
            t: ([0, 2], [1]) if t % 2 == 0 else ([1], [0, 2]) for t in range(4, 17)
        },
    ),
    ((5, 1, 2, 4, False), {9: ([0], []), 11: ([], [0]), 14: ([0], []), 16: ([], [0])}),
    (
        (6, 2, 1, 0, True),
        {3: ([1], []), 4: ([], [1]), 6: ([0], []), 7: ([], [0]), 9: ([1], []), 10: ([], [1]), 12: ([0], []),
         13: ([], [0]), 15: ([1], []), 16: ([], [1])},
    ),
    ((1, 2, 0, 0, False), {t: ([0, 1], [0, 1]) for t in range(1, 17)}),
]  # fmt: skip


@pytest.mark.parametrize(("options", "expected"), STEPS)
def test_steps(options: tuple[int, int, int, int, bool], expected: dict[int, Any]) -> None:
    schedule = Schedule(*options)
    found = {t: (schedule.starts(t), schedule.finishes(t)) for t in range(1, 17)}
    assert {t: both for t, both in found.items() if both != ([], [])} == expected


def test_every_start_finishes_before_the_next() -> None:
    for every in range(1, 9):
        for count in range(1, 6):
            for tau in range(every):
                schedule, flying = Schedule(every, count, tau, warmup_steps=3), set()
                for t in range(1, 60):
                    for p in schedule.starts(t):
                        assert p not in flying and t - 3 >= every
                        flying.add(p)
                    flying -= set(schedule.finishes(t))
                    assert tau > 0 or not flying


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "Schedule: sync_every must be at least 1; got 0"),
        ((5, 1, 5), "Schedule: overlap must be at least 0 and less than sync_every, 5; got 5"),
        ((5, 1, -1), "got -1"),
        ((5, 1, 0, -2), "Schedule: warmup_steps must not be negative; got -2"),
    ],
)
def test_schedule_refuses(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 0}, "layers must be at least 1; got 0"),
        ({"pattern": "random"}, "pattern must be one of strided, sequential; got 'random'"),
        ({"others": "none"}, "others must be one of own, shared; got 'none'"),
    ],
)
def test_fragments_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fragments(**arguments)
