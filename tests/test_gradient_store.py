"""GradientStore in one process: what is stored, what the optimizer gets, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import agoq_ext
from agoq_ext import reference
from agoq_ext.gradients.buckets import FORMATS, make_buckets
from agoq_ext.gradients.store import GradientStore


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(96, 200), nn.GELU(), nn.Linear(200, 130, bias=False), nn.LayerNorm(130))


def batch(index: int, rows: int = 16, cols: int = 96) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(index))


def backward(model: nn.Module, index: int) -> None:
    model(batch(index)).square().mean().backward()


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_accumulates_as_the_codec_does(format: str, rounding: str) -> None:
    """Each parameter: quantize the first gradient, then decode, add, encode, exactly."""
    model = make_model()
    twin = copy.deepcopy(model)
    store = GradientStore(model, format=format, rounding=rounding, group_size=32, bucket_bytes=4096, seed=5)
    seeds = iter(range(1, 100))
    expected: dict[str, tuple[Tensor, Tensor]] = {}
    entries = {entry.name: entry for entry in store._entries.values()}
    order: list[str] = []
    for name, parameter in twin.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    for micro in range(3):
        order.clear()
        backward(model, micro)
        backward(twin, micro)
        for name in order:
            parameter = twin.get_parameter(name)
            gradient, parameter.grad = parameter.grad, None
            flat, entry = gradient.reshape(1, -1), entries[name]
            seed = None
            if rounding == "stochastic":
                seed = agoq_ext.collectives.mix_seed(torch.tensor([5]), 0, 0, next(seeds))
            if name in expected:
                flat = reference.dequantize(*expected[name], flat.shape[1], format, 32, torch.float32) + flat
            expected[name] = reference.quantize(flat, format, 32, torch.bfloat16, rounding, seed, entry.base)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        want = reference.dequantize(*expected[name], parameter.numel(), format, 32, torch.float32)
        assert torch.equal(store.gradient(parameter).reshape(1, -1), want), name


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw for each": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_is_the_optimizers_with_the_decoded_gradients(name: str) -> None:
    """Bucket by bucket, bit for bit what one step with all decoded and clipped gradients does; hooks run once."""
    model = make_model()
    twin = copy.deepcopy(model)
    store = GradientStore(model, bucket_bytes=2048)
    assert len(store.buckets) > 3
    optimizer, plain = OPTIMIZERS[name](list(model.parameters())), OPTIMIZERS[name](list(twin.parameters()))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(3):
        calls.clear()
        for micro in range(2):
            backward(model, 2 * step + micro)
        gradients = [store.gradient(p) for p in model.parameters()]
        norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().item()
        limit = 0.5 * norm
        result = store.step(optimizer, max_norm=limit)
        assert calls == ["before", "after"]
        assert result.stepped and result.norm == pytest.approx(norm, rel=1e-12)
        for group in plain.param_groups:
            group["lr"] = schedule.get_last_lr()[0]
        for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
            parameter.grad = gradient * (limit / (norm + 1e-6))
        plain.step()
        schedule.step()  # would warn if it had seen no step
        for (key, got), want in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-7, msg=key)
        assert all(p.grad is None for p in model.parameters())


def test_without_clipping_the_step_has_the_same_bits() -> None:
    model = make_model()
    twin = copy.deepcopy(model)
    store = GradientStore(model, bucket_bytes=2048)
    optimizer, plain = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(twin.parameters())
    for step in range(3):
        backward(model, step)
        for parameter, gradient in zip(
            twin.parameters(), map(store.gradient, model.parameters()), strict=True
        ):
            parameter.grad = gradient
        store.step(optimizer)
        plain.step()
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_tied_frozen_unused_and_mixed_dtypes() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(50, 64),
            "frozen": nn.Linear(64, 64),
            "narrow": nn.Linear(64, 64).bfloat16(),
            "unused": nn.Linear(3, 5),
            "head": nn.Linear(64, 50, bias=False),
        }
    )
    model["head"].weight = model["embedding"].weight
    model["frozen"].requires_grad_(False)
    store = GradientStore(model)
    twin = copy.deepcopy(model)

    def run(model: nn.Module) -> None:
        x = model["frozen"](model["embedding"](torch.arange(40)))
        model["head"](model["narrow"](x.bfloat16()).float()).square().mean().backward()

    run(model)
    run(twin)
    assert {entry.bucket.dtype for entry in store._entries.values()} == {torch.float32, torch.bfloat16}
    for name in ("embedding.weight", "narrow.weight", "narrow.bias"):
        got, want = store.gradient(model.get_parameter(name)), twin.get_parameter(name).grad
        assert relative_error(got, want) < 0.02, name
    before = model["unused"].weight.clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert store.step(optimizer).stepped
    assert torch.equal(model["unused"].weight, before)
    # What an earlier step has left is not taken for a gradient of this one.
    assert store.step(optimizer).norm == 0.0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_skips_the_step_and_says_so(value: float) -> None:
    model = make_model()
    store = GradientStore(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = copy.deepcopy(model.state_dict())
    backward(model, 0)
    (model(batch(1)).square().mean() * value).backward()
    backward(model, 2)  # later gradients do not hide it
    result = store.step(optimizer, max_norm=1.0)
    assert not result.stepped and not torch.tensor(result.norm).isfinite()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    backward(model, 3)
    assert store.step(optimizer).stepped


def test_grad_scaler() -> None:
    model = make_model()
    twin = copy.deepcopy(model)
    store = GradientStore(model)
    optimizer, plain = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(twin.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    scaler.scale(model(batch(0)).square().mean()).backward()
    store.unscale_(scaler)
    with pytest.raises(RuntimeError, match="unscaled already"):
        store.unscale_(scaler)
    result = store.step(optimizer, max_norm=100.0, scaler=scaler)
    scaler.update()
    assert result.stepped and scaler.get_scale() == 2048.0
    backward(twin, 0)
    norm = nn.utils.get_total_norm([p.grad for p in twin.parameters()]).item()
    assert result.norm == pytest.approx(norm, rel=1e-3)
    plain.step()
    for got, want in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    (scaler.scale(model(batch(1)).square().mean()) * torch.inf).backward()
    assert not store.step(optimizer, scaler=scaler).stepped
    scaler.update()
    assert scaler.get_scale() == 1024.0


def test_state_in_the_middle_of_accumulation(tmp_path) -> None:
    def run(resume: bool) -> list[Tensor]:
        model = make_model()
        store = GradientStore(model, rounding="stochastic", seed=3, bucket_bytes=2048)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        backward(model, 0)
        store.step(optimizer)
        backward(model, 1)
        if resume:
            dcp.save({"store": store}, checkpoint_id=tmp_path)
            weights = copy.deepcopy(model.state_dict())
            model = make_model(seed=1)
            store = GradientStore(model, rounding="stochastic", seed=3, bucket_bytes=2048)
            dcp.load({"store": store}, checkpoint_id=tmp_path)
            model.load_state_dict(weights)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        backward(model, 2)
        store.step(optimizer)
        return list(model.parameters())

    assert all(map(torch.equal, run(False), run(True)))


def test_state_of_another_store_is_refused() -> None:
    state = GradientStore(make_model()).state_dict()
    with pytest.raises(ValueError, match=r"load_state_dict: state must be of rank 0 of .*group_size=64"):
        GradientStore(make_model(), group_size=64).load_state_dict(state)
    with pytest.raises(ValueError, match="got none for it"):
        GradientStore(make_model()).load_state_dict({})


def test_sink_writes_what_backward_would() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 70, bias=False)
    twin = copy.deepcopy(layer)
    x, dy = torch.randn(40, 256), torch.randn(40, 70)
    store, other = GradientStore(layer), GradientStore(twin)
    sink = store.sink(layer.weight)
    assert sink is not None
    for _ in range(2):
        for first in (32, 0, 64):  # in any order
            rows = dy[:, first : first + 32].T @ x
            sink.add(first, rows)
        sink.done()
        other._add(twin.weight, torch.cat([dy[:, i : i + 32].T @ x for i in (0, 32, 64)]), 0)
    assert torch.equal(store.gradient(layer.weight), other.gradient(twin.weight))
    with pytest.raises(ValueError, match=r"first_row must be in \[0, 68\] for 2 rows; got 69"):
        sink.add(69, torch.zeros(2, 256))
    with pytest.raises(ValueError, match=r"rows must have shape \[n, 256\]; got \(2, 3\)"):
        sink.add(0, torch.zeros(2, 3))
    assert GradientStore(nn.Linear(100, 4)).sink is not None
    narrow = nn.Linear(100, 4)
    assert GradientStore(narrow).sink(narrow.weight) is None


def test_bytes_and_the_freed_gradient() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    store = GradientStore(model)
    parameters = sum(p.numel() for p in model.parameters())
    assert store.nbytes <= 1.02 * parameters
    alive: list[int] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: alive.append(sum(q.grad is not None for q in model.parameters()))
        )
    model(torch.randn(4, 512)).sum().backward()
    assert alive == [0, 0, 0, 0]  # the store's hook came first and has freed it


class WithGroupCounter(torch.optim.SGD):
    def step(self, closure=None):  # type: ignore[no-untyped-def]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


class Prodigy(torch.optim.SGD):
    """Has the name of one that cannot be stepped in parts."""


def test_refused() -> None:
    model = make_model()
    store = GradientStore(model, bucket_bytes=2048)
    with pytest.raises(ValueError, match="got LBFGS: its line search"):
        store.step(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="got Prodigy: its step size"):
        store.step(Prodigy(model.parameters()))
    with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer; got int"):
        store.step(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="WithGroupCounter changes settings of its groups"):
        store.step(WithGroupCounter(model.parameters(), 0.1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="max_norm must be positive and finite, or None; got -1"):
        store.step(optimizer, max_norm=-1)
    with pytest.raises(TypeError, match="scaler must be a torch.amp.GradScaler; got str"):
        store.step(optimizer, scaler="scaler")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer must hold all 5 parameters of the store; 4 are missing"):
        store.step(torch.optim.SGD([model[0].weight], 0.1))
    model.append(nn.Linear(3, 4))  # added later
    with pytest.raises(ValueError, match=r"it holds 2 others, of shapes \((4, 3|4,)\)"):
        store.step(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError, match="parameter must be one that the model had when the store was made"):
        store.sink(model[-1].weight)
    with pytest.raises(RuntimeError, match="the store is not sharded"):
        store.local(model.parameters())
    with pytest.raises(ValueError, match="model must have parameters that require gradients"):
        GradientStore(nn.ReLU())
    with pytest.raises(ValueError, match="gradients must be dense; 0 has sparse=True"):
        GradientStore(nn.Sequential(nn.Embedding(3, 4, sparse=True)))
    with pytest.raises(ValueError, match=r"format must be one of int8, .*; got 'int6'"):
        GradientStore(model, format="int6")
    with pytest.raises(ValueError, match="bucket_bytes must be positive; got 0"):
        GradientStore(model, bucket_bytes=0)
    with pytest.raises(ValueError, match="gather needs sharded=True"):
        GradientStore(model, gather="int8")
    with pytest.raises(
        TypeError, match=r"dtype of 0\.weight must be float32, float16 or bfloat16; got torch.float64"
    ):
        GradientStore(nn.Sequential(nn.Linear(3, 4).double()))
    with pytest.raises(TypeError, match="model must be a torch.nn.Module; got int"):
        GradientStore(3)  # type: ignore[arg-type]


def test_closed_store_lets_gradients_be() -> None:
    model = make_model()
    GradientStore(model).close()
    backward(model, 0)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("world", [1, 3])
def test_pieces_tile_every_parameter(world: int) -> None:
    from agoq_ext.collectives import Codec

    named = [(str(i), nn.Parameter(torch.zeros(n))) for i, n in enumerate((1, 130, 4096, 31, 2**21 + 5))]
    for bucket in make_buckets(named, Codec(), 2**20, world):
        for entry in bucket.entries:
            at = 0
            for first, numel, packed, scales in sorted(bucket.pieces(entry), key=lambda piece: piece[0]):
                assert (
                    first == at
                    and packed.shape[1] == -(-numel // 32) * 32
                    and scales.shape[1] == -(-numel // 128)
                )
                at += numel
            assert at == entry.numel
