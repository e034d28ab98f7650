"""FSDP2 with quantized comms beside plain FSDP2, HSDP and DDP on the same data."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import agoq_ext.process_group
from agoq_ext.fsdp import _reduction, quantize_comms


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 301), nn.GELU(), nn.Linear(301, 130), nn.GELU(), nn.Linear(130, 7))


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(8, 96, generator=torch.Generator().manual_seed(rank + 10 * step))


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module, rank: int) -> Tensor:
    model.zero_grad()
    model(batch(rank)).float().square().mean().backward()
    return torch.cat([whole(p.grad).reshape(-1).float() for p in model.parameters()])


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def force_sum(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no AVG


def check_gradients(rank: int, world: int) -> None:
    plain = shard(make_model())
    force_sum(plain)
    want = gradients(plain, rank)
    ddp = gradients(DistributedDataParallel(make_model()), rank)
    torch.testing.assert_close(want, ddp, rtol=1e-4, atol=1e-6)
    for format, bound in (("int8", 0.01), ("int4", 0.15), ("fp8_e4m3", 0.04)):
        model = shard(make_model())
        assert quantize_comms(model, format) == 4
        agoq_ext.collectives.reset_bytes_sent()
        error = relative_error(gradients(model, rank), want)
        assert 1e-4 < error < bound, f"{format}: {error}"
        assert agoq_ext.collectives.bytes_sent() > 0
    model = shard(make_model())
    quantize_comms(model, "int8", all_gather="int8")
    assert 1e-4 < relative_error(gradients(model, rank), want) < 0.05
    exact = shard(make_model())  # the shards themselves are not rounded
    assert all(
        torch.equal(a.to_local(), b.to_local())
        for a, b in zip(model.parameters(), exact.parameters(), strict=True)
    )
    # Without averaging over ranks, and with another divisor: FSDP's PREMUL_SUM.
    model = shard(make_model())
    quantize_comms(model, "int8")
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(4.0 * world)
    assert relative_error(gradients(model, rank) * 4, want) < 0.01


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_fsdps_within_the_formats_error(tmp_path: Path, world: int) -> None:
    run_world(tmp_path, world, check_gradients)


def check_hsdp(rank: int, world: int) -> None:
    want = gradients(DistributedDataParallel(make_model()), rank)
    options = agoq_ext.process_group.Options(min_bytes=0)
    for backend in (None, {"replicate": ("agoq", options)}):
        mesh = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("replicate", "shard"), backend_override=backend
        )
        model = shard(make_model(), mesh=mesh)
        quantize_comms(model, "int8")
        replicas = mesh.get_group("replicate")
        before = agoq_ext.collectives.bytes_sent(replicas)
        error = relative_error(gradients(model, rank), want)
        assert 1e-4 < error < 0.015, error
        assert (agoq_ext.collectives.bytes_sent(replicas) > before) == (backend is not None)


def test_hsdp_agrees_with_ddp(tmp_path: Path) -> None:
    run_world(tmp_path, 4, check_hsdp)


def check_precision(rank: int, world: int) -> None:
    want = gradients(DistributedDataParallel(make_model()), rank)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(make_model(), mp_policy=policy)
    quantize_comms(model, "int8", all_gather="int8")
    assert relative_error(gradients(model, rank), want) < 0.06
    # Frozen parameters of another dtype in a module are gathered as bytes.
    model = make_model()
    model[0].weight = nn.Parameter(model[0].weight.detach().bfloat16(), requires_grad=False)
    model[0].forward = lambda x: x @ model[0].weight.float().T + model[0].bias  # type: ignore[method-assign]
    fully_shard(model[0], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    quantize_comms(model, None, all_gather="int8")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batch(rank))
    assert any("travels as bytes" in str(w.message) for w in caught)


def test_mixed_precision_and_mixed_dtypes(tmp_path: Path) -> None:
    run_world(tmp_path, 2, check_precision)


def check_training(rank: int, world: int, quantized: bool) -> float:
    model = shard(make_model())
    force_sum(model)
    if quantized:
        quantize_comms(model, "int8", all_gather="int8")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    x, y = batch(50 + rank), torch.randn(8, 7, generator=torch.Generator().manual_seed(rank))
    for _ in range(40):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / world


def test_training_follows_plain_fsdp(tmp_path: Path) -> None:
    plain, quantized = (run_world(tmp_path, 2, check_training, q)[0] for q in (False, True))
    assert plain < 0.5 and quantized == pytest.approx(plain, rel=0.1, abs=0.01)


def test_refused() -> None:
    with pytest.raises(ValueError, match="quantize_comms: model must contain modules that fully_shard"):
        quantize_comms(make_model())
    with pytest.raises(
        ValueError, match="quantize_comms: reduce_scatter must be one of int8, .*; got 'int7'"
    ):
        quantize_comms(make_model(), "int7")
    with pytest.raises(ValueError, match="quantize_comms: all_gather must be one of int8, .*; got 'int7'"):
        quantize_comms(make_model(), "int8", "int7")
    with pytest.raises(ValueError, match="op must be SUM, AVG or PREMUL_SUM by a number"):
        _reduction(dist.ReduceOp.MAX)
    assert _reduction(dist.ReduceOp.PREMUL_SUM(0.25)) == ("sum", 0.25)
