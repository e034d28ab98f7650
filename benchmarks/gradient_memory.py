"""Peak memory that gradients take: stored in 8 bits, against `.grad` in FP32 and BF16 under DistributedDataParallel.

    python benchmarks/gradient_memory.py [--layers 24] [--width 2048] [--output benchmarks/results]

Two Gloo ranks train a stack of linear layers for three steps of four micro-batches, each way in a process of its own.
Measured is how far the steps raise a rank's resident memory above what it was before the first backward, by the
kernel's high-water mark. Expected of the store: 1.02 bytes a parameter, the largest single gradient in full precision,
and two buckets. Writes gradient_memory.json and .md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import peak_memory
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from agoq_ext import GradientStore, __version__
from agoq_ext.gradients.store import BUCKET_BYTES

WORLD = 2
MIB = 2**20
WAYS = ("store", "store, sharded", "FP32 .grad, DDP", "FP32 .grad, DDP, bucket views", "BF16 model, DDP")


def train(way: str, layers: int, width: int) -> int:
    """Trains for three steps; how many bytes their peak is above what was resident before."""
    dtype = torch.bfloat16 if way.startswith("BF16") else torch.float32
    model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(layers)))
    x = torch.ones(2, width, dtype=dtype)
    before = peak_memory.begin()
    store = None
    parameters = model.parameters()
    if way.startswith("store"):
        store = GradientStore(model, sharded="sharded" in way)
        parameters = store.local(parameters) if store.sharded else parameters
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view="views" in way)
    optimizer = torch.optim.SGD(parameters, 1e-4)
    for _ in range(3):
        with (store or model).no_sync():
            for _ in range(3):
                model(x).sum().backward()
        model(x).sum().backward()
        if store is not None:
            store.step(optimizer)
        else:
            optimizer.step()
            optimizer.zero_grad()
    return peak_memory.high_water() - before


def measure(rank: int, directory: str, way: str, layers: int, width: int) -> None:
    torch.set_num_threads(1)
    store_file = dist.FileStore(f"{directory}/store", WORLD)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", store=store_file, rank=rank, world_size=WORLD, timeout=limit)
    train(way, 2, 64)  # what libraries load and allocate once
    peak = train(way, layers, width)
    if rank == 0:
        Path(directory, "peak").write_text(str(peak))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    largest = args.width**2
    parameters = args.layers * largest
    bound = 1.02 * parameters + 4 * largest + 2 * BUCKET_BYTES
    found = {}
    # Otherwise glibc keeps freed memory for later, and the peak shows what it keeps.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "131072"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for way in WAYS:
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(measure, (directory, way, args.layers, args.width), nprocs=WORLD)
            found[way] = int(Path(directory, "peak").read_text())
    lines = [
        f"{parameters / 1e6:.1f} M parameters in {args.layers} matrices, {WORLD} ranks, 4 micro-batches a step. The "
        f"store's bound, 1.02 bytes a parameter + the largest gradient + two buckets, is {bound / MIB:.0f} MiB.",
        "",
        "| gradients | peak above before, MiB | bytes a parameter |",
        "|---|---:|---:|",
    ]
    lines += [f"| {way} | {peak / MIB:.0f} | {peak / parameters:.2f} |" for way, peak in found.items()]
    text = "\n".join(lines) + "\n"
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "gradient_memory.md").write_text(text)
    record = {"agoq_ext": __version__, "torch": torch.__version__, "parameters": parameters, "bound": bound}
    (args.output / "gradient_memory.json").write_text(
        json.dumps(record | {"peak_bytes": found}, indent=1) + "\n"
    )
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
