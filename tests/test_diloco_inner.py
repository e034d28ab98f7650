"""Replicas that are themselves DDP or FSDP2, over a two-dimensional DeviceMesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diloco_twin import backward, make_model, make_optimizer
from distributed import run_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from agoq_ext.diloco import StreamingDiLoCo

STEPS = 11
OPTIONS: dict[str, Any] = {"sync_every": 4, "fragments": 3, "overlap": 1, "warmup_steps": 1}


def full(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def check_inner(rank: int, world: int, kind: str, format: str) -> tuple[dict[str, Tensor], list[str]]:
    """Two replicas of two ranks; both ranks of a replica see its data, so that it trains like one rank would."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "inner"))
    replica = mesh.get_local_rank("replica")
    plain = make_model()
    plain.scale.requires_grad_(False)  # FSDP2 does not run the hooks of a parameter that the root alone uses
    if kind == "ddp":
        model: nn.Module = DistributedDataParallel(plain, process_group=mesh.get_group("inner"))
        model.scale = plain.scale
    else:
        for layer in (plain[0], plain[2], plain[4]):
            fully_shard(layer, mesh=mesh["inner"])
        model = plain
    inner = make_optimizer(model)
    diloco = StreamingDiLoCo(model, inner, **OPTIONS, format=format, group=mesh.get_group("replica"))
    assert diloco.replicas == 2
    for step in range(1, STEPS + 1):
        backward(model, replica, step)
        inner.step()
        diloco.step()
    with diloco.outer_parameters():
        return full(plain), [type(p).__name__ for p in model.parameters()]


def check_plain(rank: int, world: int, format: str) -> dict[str, Tensor]:
    model = make_model()
    model.scale.requires_grad_(False)
    inner = make_optimizer(model)
    diloco = StreamingDiLoCo(model, inner, **OPTIONS, format=format)
    for step in range(1, STEPS + 1):
        backward(model, rank, step)
        inner.step()
        diloco.step()
    with diloco.outer_parameters():
        return full(model)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_inner_replicas(tmp_path: Path, kind: str) -> None:
    expected = run_world(tmp_path, 2, check_plain, "float32")[0]
    found = run_world(tmp_path, 4, check_inner, kind, "float32")
    for outer, types in found:
        assert ("DTensor" in types) == (kind == "fsdp2")
        for name, value in outer.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    coded = run_world(tmp_path, 4, check_inner, kind, "fp4_e3m0")
    for outer, _ in coded[1:]:
        assert all(torch.equal(outer[name], coded[0][0][name]) for name in outer)
