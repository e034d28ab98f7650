"""StreamingDiLoCo: against a twin, between ranks, resumed at any step, in the background, and with what models hold."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diloco_twin import backward, make_model, make_optimizer, train
from distributed import run_world
from torch import Tensor, nn

from agoq_ext.collectives import Disagreement
from agoq_ext.diloco import Fragments, StreamingDiLoCo, streaming

PARTS = [["0.weight", "0.bias", "4.weight", "4.bias"], ["2.weight", "2.bias"], ["scale"]]


def make(**options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer, StreamingDiLoCo]:
    model = make_model()
    inner = make_optimizer(model)
    return model, inner, StreamingDiLoCo(model, inner, **{"sync_every": 4, "fragments": PARTS, **options})


def run_steps(
    model: nn.Module, inner: torch.optim.Optimizer, diloco: StreamingDiLoCo, rank: int, last: int
) -> None:
    for step in range(diloco.steps_done + 1, last + 1):
        backward(model, rank, step)
        inner.step()
        diloco.step()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def outer_values(model: nn.Module, diloco: StreamingDiLoCo) -> list[Tensor]:
    with diloco.outer_parameters():
        return values(model)


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def close(left: list[Tensor], right: list[Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


CASES: dict[str, dict[str, Any]] = {
    "classic": {"fragments": 1, "format": "float32"},
    "streaming": {"format": "float32"},
    "overlapped": {"format": "float32", "overlap": 2, "mixing": 0.5},
    "late": {"format": "float32", "overlap": 3, "mixing": 0.25, "sync_every": 5},
    "warm": {"format": "float32", "overlap": 1, "warmup_steps": 3},
    "4-bit": {"overlap": 1},
    "fed back": {"overlap": 1, "error_feedback": True},
}
STEPS = 15


def check_twin(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    results = {}
    for name in names:
        options = CASES[name]
        model, inner, diloco = make(**options)
        run_steps(model, inner, diloco, rank, STEPS)
        results[name] = values(model), outer_values(model, diloco)
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_like_the_twin(tmp_path: Path, world: int) -> None:
    found = run_world(tmp_path, world, check_twin, list(CASES))
    for name, options in CASES.items():
        every = options.get("sync_every", 4)
        whole = options.get("fragments") == 1
        parts = [[n for part in PARTS for n in part]] if whole else PARTS
        offsets = [0] if whole else [0, 1, 2]
        models, outer = train(
            world, STEPS, every, parts, offsets, options.get("overlap", 0), options.get("mixing", 0.0),
            options.get("format", "fp4_e3m0"), options.get("warmup_steps", 0), "error_feedback" in options,
        )  # fmt: skip
        for rank in range(world):
            own, outers = found[rank][name]
            assert same(outers, found[0][name][1]), "replicas end with other outer parameters"
            close(outers, [outer[n] for n, _ in models[0].named_parameters()])
            close(own, values(models[rank]))
        moved = [outer[n] - p for n, p in make_model().named_parameters()]
        assert all(m.abs().max() > 1e-3 for m in moved), "the case synchronizes nothing"


def check_many(rank: int, world: int) -> list[Tensor]:
    model, inner, diloco = make(gather_up_to=1, overlap=1, error_feedback=True)
    run_steps(model, inner, diloco, rank, 10)
    outers = outer_values(model, diloco)
    exact_model, exact_inner, exact = make(gather_up_to=1, overlap=1, format="float32")
    run_steps(exact_model, exact_inner, exact, rank, 10)
    assert diloco.bytes_sent < exact.bytes_sent / 3
    gathered_model, gathered_inner, gathered = make(overlap=1, format="float32")
    run_steps(gathered_model, gathered_inner, gathered, rank, 10)
    assert same(outer_values(exact_model, exact), outer_values(gathered_model, gathered))
    return outers


def test_many_replicas_go_through_owners(tmp_path: Path) -> None:
    found = run_world(tmp_path, 3, check_many)
    assert same(found[0], found[1]) and same(found[0], found[2])


def check_bytes(rank: int, world: int) -> None:
    model, inner, diloco = make(warmup_steps=2)
    parameters = sum(p.numel() for p in model.parameters())
    assert diloco.start_up_bytes == (4 * parameters if rank == 0 else 0)
    run_steps(model, inner, diloco, rank, 2)
    assert diloco.bytes_sent == 0 and diloco.warmup_bytes >= 2 * 4 * parameters
    run_steps(model, inner, diloco, rank, 6)  # fragment 0's first exchange, with a record of 256 bytes
    first = diloco.bytes_sent
    run_steps(model, inner, diloco, rank, 10)
    # 4 layers on group boundaries: 155 -> 256, 31 -> 128, 27 -> 128, 3 -> 128 elements of 4 bits, BF16 scales
    message = 640 // 2 + 16
    assert first == message + 256
    others = [t.sent for t in diloco.transfers][-3:]
    assert message in others
    assert diloco.peak_bandwidth() >= max(others)


def test_bytes(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_bytes)


# --- saving ------------------------------------------------------------------------------------------------------


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def check_resume(rank: int, world: int, options: dict[str, Any]) -> None:
    model, inner, diloco = make(**options)
    saved, last = {}, 12
    flying = 0
    for step in range(1, last + 1):
        run_steps(model, inner, diloco, rank, step)
        flying += any(fragment.in_flight for fragment in diloco.fragments)
        saved[step] = pickled([model.state_dict(), inner.state_dict(), diloco.state_dict()])
    expected = values(model) + outer_values(model, diloco)
    assert flying >= 4
    for step in range(1, last):
        again, other_inner, other = make(**options)
        states = torch.load(io.BytesIO(saved[step]), weights_only=False)
        for part, state in zip((again, other_inner, other), states, strict=True):
            part.load_state_dict(state)
        run_steps(again, other_inner, other, rank, last)
        assert same(values(again) + outer_values(again, other), expected), f"resumed after step {step}"
        other.state_dict()  # waits for what is in flight
        # Options are compared once a group, so a resumed run may lack some records of 256 bytes.
        for name in ("bytes_sent", "warmup_bytes"):
            missing = getattr(diloco, name) - getattr(other, name)
            assert 0 <= missing <= 3 * 256 and missing % 256 == 0, (step, name, missing)


@pytest.mark.parametrize("world", [1, 2])
def test_resuming_at_any_step_changes_no_bit(tmp_path: Path, world: int) -> None:
    options = {"overlap": 2, "mixing": 0.5, "warmup_steps": 2, "error_feedback": True}
    run_world(tmp_path, world, check_resume, options)


def check_checkpoint(rank: int, world: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, inner, diloco = make(overlap=2)
    run_steps(model, inner, diloco, rank, 5)
    assert diloco.fragments[0].in_flight

    def own(model: nn.Module, inner: torch.optim.Optimizer) -> dict[str, Any]:
        parameters, optimizer = get_state_dict(model, inner)
        return {f"replica{rank}": {"model": parameters, "optimizer": optimizer}}

    dcp.save({"own": own(model, inner), "diloco": diloco}, checkpoint_id=folder)
    run_steps(model, inner, diloco, rank, 9)
    again, other_inner, other = make(overlap=2)
    loaded = {"own": own(again, other_inner), "diloco": other}
    dcp.load(loaded, checkpoint_id=folder)
    mine = loaded["own"][f"replica{rank}"]
    set_state_dict(again, other_inner, model_state_dict=mine["model"], optim_state_dict=mine["optimizer"])
    assert other.steps_done == 5
    run_steps(again, other_inner, other, rank, 9)
    assert same(values(again) + outer_values(again, other), values(model) + outer_values(model, diloco))


def test_distributed_checkpoint(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_checkpoint, str(tmp_path / "checkpoint"))


# --- the background ----------------------------------------------------------------------------------------------


def check_background(rank: int, world: int) -> None:
    original = streaming.mean_over_replicas

    def slow(*args: Any) -> None:
        time.sleep(1.0)
        original(*args)

    streaming.mean_over_replicas = slow
    model, inner, diloco = make(fragments=1, overlap=3)
    run_steps(model, inner, diloco, rank, 3)
    began = time.monotonic()
    run_steps(model, inner, diloco, rank, 6)  # starts after step 4, is applied after step 7
    assert time.monotonic() - began < 0.8 and diloco.blocked_seconds < 0.05
    assert diloco.fragments[0].in_flight and not diloco.transfers
    run_steps(model, inner, diloco, rank, 7)
    assert time.monotonic() - began >= 1.0 and diloco.blocked_seconds > 0.1
    assert not diloco.fragments[0].in_flight and len(diloco.transfers) == 1


def test_only_the_finish_waits(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_background)


# --- models ------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Tied and frozen parameters, buffers, three dtypes, a transposed view and a scalar."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6, bias=False, dtype=torch.bfloat16)])
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(6, 5).half().t())
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("count", torch.tensor(rank))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers[0](self.embed(tokens))
        hidden = self.layers[1](hidden.bfloat16()).float() + hidden + self.narrow.float().sum(0)
        return self.head(hidden) * self.gain


def check_mixed(rank: int, world: int) -> list[Tensor]:
    model = Mixed(rank)
    frozen = {"frozen": model.frozen, "mean": model.mean, "count": model.count}
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with StreamingDiLoCo(model, inner, sync_every=3, fragments=Fragments(1), overlap=1) as diloco:
        assert [f.names for f in diloco.fragments] == [
            ["layers.0.weight", "layers.0.bias"], ["layers.1.weight"], ["narrow", "gain", "embed.weight"],
        ]  # fmt: skip
        start = values(model)
        kept = {name: tensor.clone() for name, tensor in frozen.items()}
        for step in range(8):
            torch.manual_seed(100 * rank + step)
            inner.zero_grad()
            model(torch.randint(7, (5,))).logsumexp(-1).sum().backward()
            inner.step()
            if step == 0:
                model.mean.add_(rank)
    assert diloco.steps_done == 8
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.frozen, kept["frozen"]) and torch.equal(model.mean, kept["mean"] + rank)
    mine = values(model)
    outers = outer_values(model, diloco)
    assert same(mine, values(model)) and not same(mine, outers)
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in start]
    inner.step()  # outside the block nothing follows
    assert diloco.steps_done == 8
    return [kept["frozen"], kept["mean"], kept["count"], *outers]


def test_what_models_hold(tmp_path: Path) -> None:
    first, second = run_world(tmp_path, 2, check_mixed)
    assert same(first, second)
    assert torch.equal(first[0], Mixed(0).frozen) and first[2] == 0


def test_one_replica_without_a_group() -> None:
    assert not dist.is_initialized()
    model, inner, diloco = make(overlap=1, error_feedback=True)
    run_steps(model, inner, diloco, 0, 9)
    models, outer = train(1, 9, 4, PARTS, [0, 1, 2], 1, 0.0, "fp4_e3m0")
    close(values(model), values(models[0]))
    close(outer_values(model, diloco), [outer[n] for n, _ in model.named_parameters()])
    assert diloco.bytes_sent == 0 and diloco.peak_bandwidth() == 0


def test_another_outer_optimizer_and_failure_inside_the_block() -> None:
    model, inner, diloco = make(
        fragments=1, outer_optimizer=lambda ps: torch.optim.SGD(ps, lr=1.0), sync_every=1
    )
    before = values(model)
    run_steps(model, inner, diloco, 0, 3)
    close(outer_values(model, diloco), values(model))  # lr 1, no momentum: the mean of one is itself
    assert not same(before, values(model))
    mine = values(model)
    with pytest.raises(KeyError), diloco.outer_parameters():
        raise KeyError
    assert same(values(model), mine)


def test_a_step_that_failed_is_completed_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inner, diloco = make(overlap=1)
    run_steps(model, inner, diloco, 0, 4)

    def fail(*args: Any) -> None:
        raise RuntimeError("lost")

    backward(model, 0, 5)
    inner.step()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="lost"):
        patch.setattr(diloco, "_wait", fail)
        diloco.step()
    first, second = diloco.fragments[:2]
    started = second.value
    assert started is not None and first.in_flight and diloco.steps_done == 4 and diloco.interrupted
    diloco.step()
    assert second.value is started, "an exchange in flight must not start anew"
    assert not first.in_flight and diloco.steps_done == 5 and not diloco.interrupted


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mixing": 1.5}, ValueError, "StreamingDiLoCo: mixing must be between 0 and 1; got 1.5"),
        ({"overlap": 4}, ValueError, "overlap must be at least 0 and less than sync_every, 4; got 4"),
        ({"format": "int3"}, ValueError, "StreamingDiLoCo: format must be one of .*; got 'int3'"),
        ({"fragments": 9}, ValueError, "fragments must be between 1 and 4 for this model; got 9"),
        ({"group": 3}, TypeError, "StreamingDiLoCo: group must be a process group"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)
    with pytest.raises(TypeError, match="inner_optimizer must be a torch.optim.Optimizer; got list"):
        StreamingDiLoCo(make_model(), [], sync_every=3)  # type: ignore[arg-type]


def check_disagreement(rank: int, world: int) -> None:
    for options in (
        {"sync_every": 5 + rank},
        {"format": ("int8", "int4")[rank]},
        {"fragments": (1, PARTS)[rank]},
        {"fragments": (PARTS, [PARTS[1], PARTS[0], PARTS[2]])[rank]},
        {"overlap": rank},
        {"error_feedback": bool(rank)},
    ):
        before = make_model()
        with pytest.raises(
            Disagreement, match=r"StreamingDiLoCo: the ranks of the group disagree: rank 0: .* H="
        ):
            make(**options)
        assert same(values(before), values(make_model()))
    model, inner, diloco = make()
    run_steps(model, inner, diloco, rank, 3)
    state = diloco.state_dict()
    if rank:
        state["rank1"].content["step"] = 2
    diloco.load_state_dict(state)
    backward(model, rank, 4)
    with pytest.raises(Disagreement, match="resumes after step=3 .*resumes after step=2"):
        diloco.step()


def test_replicas_that_disagree(tmp_path: Path) -> None:
    """On the order of fragments too, which would exchange one's values for another's or wait forever (torchft#206)."""
    run_world(tmp_path, 2, check_disagreement)


def test_state_of_something_else() -> None:
    _, _, diloco = make()
    with pytest.raises(ValueError, match="the state holds nothing for rank 0"):
        diloco.load_state_dict({})
    _, _, other = make(fragments=1)
    with pytest.raises(ValueError, match=r"the state must have fragments of \[640, .*; got \["):
        diloco.load_state_dict(other.state_dict())
