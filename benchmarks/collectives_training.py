"""Validation loss after training with gradients exchanged in FP32, exchanged as codes, and stored as codes.

    python benchmarks/collectives_training.py [--seeds 0,1,2] [--steps 600] [--output benchmarks/results]

A small LLaMA over the bytes of the standard library's sources, two Gloo ranks on this machine. Runs of one seed see the
same initial weights and the same batches. Every finished run is written to collectives_training.json at once; runs that
are there already are not repeated. Writes collectives_training.md too. "fsdp2" reduce-scatters and all-gathers int8.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from agoq_ext import GradientStore, ddp
from agoq_ext.fsdp import quantize_comms
from agoq_ext.training.config import TrainConfig
from agoq_ext.training.data import load_corpus
from agoq_ext.training.model import build_model, learning_rate, loss_inputs, make_optimizer

WORLD = 2
MODEL = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
# How, with which options, and how far the validation loss may be from FP32's, as a share of it.
VARIANTS: dict[str, tuple[str, dict[str, Any], float]] = {
    "fp32": ("ddp", {}, 0.0),
    "int8": ("ddp", {"format": "int8"}, 0.005),
    "int4 + feedback": ("ddp", {"format": "int4", "error_feedback": True}, 0.01),
    "int4": ("ddp", {"format": "int4"}, math.inf),
    "store": ("store", {}, 0.005),
    "store, sharded": ("store", {"sharded": True}, 0.005),
    "fsdp2": ("fsdp2", {"reduce_scatter": "int8", "all_gather": "int8"}, 0.005),
}
ACCUMULATE = 2


def train(rank: int, directory: str, variant: str, config: TrainConfig) -> None:
    """One run; rank 0 writes its validation loss, after a check that the ranks' parameters are equal."""
    torch.set_num_threads(1)
    store_file = dist.FileStore(f"{directory}/store", WORLD)
    limit = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", store=store_file, rank=rank, world_size=WORLD, timeout=limit)
    corpus = load_corpus(())
    plain = build_model(config)
    how, options, _ = VARIANTS[variant]
    model: Any = plain
    store = None
    if how == "store":
        store = GradientStore(plain, **options)
    elif how == "fsdp2":
        for layer in plain.model.layers:
            fully_shard(layer)
        model = fully_shard(plain)
        quantize_comms(model, **options)
    else:
        model = DistributedDataParallel(plain)
        if options:
            ddp.register(model, **options)
    optimizer = make_optimizer(plain.parameters(), config)
    if store is not None and store.sharded:
        optimizer = torch.optim.AdamW(store.local(optimizer.param_groups))
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        for micro in range(ACCUMULATE):
            first = ((step * ACCUMULATE + micro) * WORLD + rank) * config.batch
            batch = corpus.train_batch(first, config.batch, config.seq, config.seed)
            last = micro == ACCUMULATE - 1
            if how == "fsdp2":
                model.set_requires_gradient_sync(last)
            with nullcontext() if last or how == "fsdp2" else (store or model).no_sync():
                (model(**loss_inputs(*batch)).loss / ACCUMULATE).backward()
        if store is not None:
            store.step(optimizer, max_norm=1.0)
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    plain.eval()
    losses = []
    with torch.no_grad():
        for batch in corpus.validation_batches(config.seq, 1024, 64):
            losses.append(model(**loss_inputs(*batch)).loss.item())
    parameters = [p.full_tensor() if isinstance(p, DTensor) else p for p in plain.parameters()]
    total = torch.stack([p.detach().double().sum() for p in parameters]).sum().reshape(1)
    sums = [torch.empty(1, dtype=torch.float64) for _ in range(WORLD)]
    dist.all_gather(sums, total)
    assert all(torch.equal(each, total) for each in sums), "the ranks differ"
    if rank == 0:
        Path(directory, "loss.json").write_text(json.dumps(statistics.fmean(losses)))
    dist.destroy_process_group()


def run(variant: str, seed: int, steps: int) -> float:
    config = TrainConfig(
        out="",
        model_config=MODEL,
        ranks=WORLD,
        activations="none",
        precision="fp32",
        steps=steps,
        batch=8,
        seq=64,
        lr=3e-3,
        seed=seed,
    )
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(train, (directory, variant, config), nprocs=WORLD)
        return float(json.loads(Path(directory, "loss.json").read_text()))


def table(found: dict[str, dict[str, float]]) -> str:
    lines = [
        "| gradients | seeds | validation loss | against FP32 of the same seed, mean (worst) | required |",
        "|---|---:|---:|---:|---:|",
    ]
    for variant, (_, _, limit) in VARIANTS.items():
        seeds = [s for s in found.get(variant, {}) if s in found.get("fp32", {})]
        if not seeds:
            continue
        shares = [found[variant][s] / found["fp32"][s] - 1 for s in seeds]
        worst = max(shares, key=abs)
        required = "" if variant == "fp32" or math.isinf(limit) else f"{limit:.1%}"
        mean = statistics.fmean(found[variant][s] for s in seeds)
        lines.append(
            f"| {variant} | {len(seeds)} | {mean:.4f} | {statistics.fmean(shares):+.2%} ({worst:+.2%}) | {required} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    path = args.output / "collectives_training.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if stored.get("steps") != args.steps:
        stored = {"steps": args.steps, "torch": torch.__version__, "model": MODEL, "val_loss": {}}
    for seed in args.seeds.split(","):
        for variant in VARIANTS:
            losses = stored["val_loss"].setdefault(variant, {})
            if seed not in losses:
                losses[seed] = run(variant, int(seed), args.steps)
                print(f"seed {seed} {variant}: {losses[seed]:.5f}", flush=True)
                args.output.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(stored, indent=1) + "\n")
    text = table(stored["val_loss"])
    (args.output / "collectives_training.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
