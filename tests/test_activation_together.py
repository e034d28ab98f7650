"""Conversion together with what training loops do: compiling, checkpointing some layers, data parallel wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_activation_families import IDS, build, step
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from agoq_ext.activation import SavedBytesMeter, activation_report, compress_activations


def live_bytes(model: Any) -> int:
    """Kept by the decoder without its head."""
    with SavedBytesMeter(model) as meter:
        out = model.model(input_ids=IDS).last_hidden_state
        kept = meter.live_bytes
    del out
    return kept


def test_a_compiled_layer_keeps_the_bytes_of_an_eager_one():
    """The second layer's share; outside the layers the compiler keeps more copies of the rotary tables."""
    shares = []
    for compiled in (False, True):
        kept = []
        for layers in (1, 2):
            model = build("llama", num_hidden_layers=layers)
            compress_activations(model)
            torch._dynamo.reset()
            if compiled:
                model.model.compile(backend="aot_eager_decomp_partition", fullgraph=True)
            kept.append(live_bytes(model))
        shares.append(kept[1] - kept[0])
    assert shares[0] == shares[1] > 0


def test_some_layers_checkpointed_and_the_others_compressed():
    model = build("llama").train()
    compress_activations(model)
    _, expected = step(model)
    before = activation_report(model, {"input_ids": IDS}).by_layer
    layer = model.model.layers[0]
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = lambda f, *args: torch.utils.checkpoint.checkpoint(
        f, *args, use_reentrant=False
    )
    assert torch.equal(step(model)[1], expected)
    after = activation_report(model, {"input_ids": IDS}).by_layer
    assert after["1"] <= before["1"] + IDS.numel() * 64 * 4 + 2 * 24 * 16 * 4  # and what layer 0 saved first
    assert after.get("0", 0) < before["0"]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_chunked_loss_under_data_parallel_wrappers(tmp_path, wrapper):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        bare, model = build("llama").train(), build("llama").train()
        for m in (bare, model):
            compress_activations(m, chunked_loss=True)
        loss, expected = step(bare)
        inner = model
        if wrapper == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        out = model(input_ids=IDS, labels=IDS)
        out.loss.backward()
        assert out.logits is None and torch.equal(out.loss, loss)
        grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in inner.parameters()]
        assert torch.equal(torch.cat([g.flatten() for g in grads]), expected)
    finally:
        torch.distributed.destroy_process_group()
