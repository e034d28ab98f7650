"""What the examples share: a small LLaMA, bytes of Python's own sources as text, and the process group."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


def arguments(**defaults: int) -> argparse.Namespace:
    """`--steps N` and what the example adds."""
    parser = argparse.ArgumentParser()
    for name, value in {"steps": 50, **defaults}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser.parse_args()


def make_model() -> LlamaForCausalLM:
    """0.4 M parameters over bytes, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def batches(steps: int, rank: int = 0, size: int = 4, length: int = 128) -> Iterator[Tensor]:
    """int64 [size, length], different on every rank."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (size,), generator=generator)
        yield torch.stack([text[start : start + length] for start in starts])


def join_group() -> tuple[int, int, torch.device]:
    """(rank, world, device) under torchrun: NCCL where there are GPUs, else Gloo."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    return dist.get_rank(), dist.get_world_size(), device
