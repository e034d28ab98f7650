"""A small Llama cut into pipeline stages, run by torch.distributed.pipelining on one rank of a Gloo world."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from agoq_ext.activation.meter import SavedBytesMeter
from agoq_ext.pipeline import compress_stages

HIDDEN, SEQ = 64, 32


class Layers(nn.Module):
    """One decoder layer of the model: hidden states in, hidden states out."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        config = LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=4 * HIDDEN,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_hidden_layers=1,
            vocab_size=16,
        )
        config._attn_implementation = "sdpa"
        self.layers = nn.ModuleList([modeling_llama.LlamaDecoderLayer(config, 0)])
        self.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        tables = self.rotary_emb(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=tables)
        return x


def run_stage(
    rank: int, world: int, name: str, chunks: int, microbatches: int, policy: str | None, **options: Any
) -> dict[str, Any]:
    """The width, the loss, the measured peak of stored bytes and the gradient norm of one step on this rank."""
    indices = [rank + world * i for i in range(chunks)]
    modules = [Layers(i) for i in indices]
    stages = [
        PipelineStage(m, i, world * chunks, torch.device("cpu"))
        for m, i in zip(modules, indices, strict=True)
    ]
    cls = get_schedule_class(name)
    held: Any = stages if chunks > 1 else stages[0]
    schedule = cls(held, microbatches, loss_fn=F.mse_loss)
    if policy is not None:
        report = compress_stages(schedule, policy, **options)
    x = torch.randn(microbatches, SEQ, HIDDEN, generator=torch.Generator().manual_seed(0))
    losses: list[Tensor] = []
    meter = SavedBytesMeter(modules)
    for _ in range(2):  # the first step also finds out shapes
        for module in modules:
            module.zero_grad()
        losses.clear()
        with meter:
            given = (x,) if rank == 0 else ()
            last = {"target": torch.zeros_like(x), "losses": losses} if rank == world - 1 else {}
            schedule.step(*given, **last)
    norm = torch.stack([p.grad.norm() for m in modules for p in m.parameters()]).norm()
    return {
        "bits": None if policy is None else report.bits,
        "stored": None if policy is None else report.stored,
        "fits": None if policy is None else report.fits,
        "peak": meter.peak_bytes,
        "left": meter.live_bytes,
        "loss": float(torch.stack(losses).mean()) if losses else None,
        "norm": float(norm),
    }
