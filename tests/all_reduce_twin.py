"""A second writing of all_reduce, in one process and on the reference ops, and the inputs its tests share."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from agoq_ext import layout, reference
from agoq_ext.collectives import Codec


def splitmix(seed: int, *words: int) -> int:
    """mix_seed on Python integers."""
    mask = 2**64 - 1
    for word in words:
        z = (seed + (word + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        seed = z ^ (z >> 31)
    return seed


def seed_of(codec: Codec, seed: int, rank: int, phase: int) -> Tensor | None:
    if codec.rounding == "nearest":
        return None
    mixed = splitmix(seed, rank, phase)
    return torch.tensor([mixed - 2**64 if mixed >= 2**63 else mixed])


def shard_bounds(numel: int, world: int, group_size: int) -> list[tuple[int, int]]:
    groups = math.ceil(math.ceil(numel / world) / group_size)
    edges = [min(rank * groups * group_size, numel) for rank in range(world + 1)]
    return list(zip(edges, edges[1:], strict=False))


def emulate(flats: list[Tensor], op: str, codec: Codec, seeds: list[int]) -> Tensor:
    """What all_reduce of the ranks' flat tensors must give on every rank, FP32 before the cast to their dtype.

    One process, the reference ops, no messages.
    """
    world, numel = len(flats), flats[0].numel()
    name, group = codec.format, codec.group_size
    out = torch.empty(numel)
    for owner, (start, end) in enumerate(shard_bounds(numel, world, group)):
        if start == end:
            continue
        coded = [
            reference.quantize(
                flat[start:end],
                name,
                group,
                codec.scale_dtype,
                codec.rounding,
                seed_of(codec, seeds[rank], rank, 0),
                start,
            )
            for rank, flat in enumerate(flats)
        ]
        packed, scales = (torch.stack(parts) for parts in zip(*coded, strict=True))
        factor = 1 / world if op == "avg" else 1.0
        total = reference.reduce(packed, scales, end - start, name, group, factor, torch.float32)
        seed = seed_of(codec, seeds[owner], owner, 1)
        again = reference.quantize(total, name, group, codec.scale_dtype, codec.rounding, seed, start)
        out[start:end] = reference.dequantize(*again, end - start, name, group, torch.float32)[0]
    return out


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """FP32 values as the decoder writes them: saturated to the finite range of `dtype`."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def error_bound(flats: list[Tensor], op: str, codec: Codec) -> Tensor:
    """Largest |error| of each element against the exact result: one rounding on each rank and one of the result."""
    share = 1.0 if codec.rounding == "stochastic" else 0.5  # of the widest gap between neighbouring codes
    values = reference.code_values(codec.format)
    values = values[torch.isfinite(values)].double().sort().values
    widest = float((values[1:] - values[:-1]).max()) * share
    factor = 1 / len(flats) if op == "avg" else 1.0

    def one(x: Tensor) -> Tensor:
        """Of encoding x: the widest gap times the scale, a little more for the scale's own rounding."""
        numel = x.numel()
        groups = torch.nn.functional.pad(x.double(), (0, -numel % codec.group_size)).reshape(
            -1, codec.group_size
        )
        spread = groups.amax(1) - groups.amin(1) if codec.format == "uint4" else groups.abs().amax(1)
        slack = (
            groups.abs().amax(1) * 2**-7
        )  # uint4: min moves down by up to a bf16 step, and the range with it
        scale = (spread + slack) / layout.FORMATS[codec.format].qmax
        return (scale * widest * 1.02).repeat_interleave(codec.group_size)[:numel]

    sent = sum(one(flat) for flat in flats) * factor
    exact = sum(flat.double() for flat in flats) * factor
    return sent + one(exact.abs() + sent if codec.format != "uint4" else exact) + one(sent) + 1e-30


def random_flat(case: int, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Heavy-tailed values with whole groups of zeros, different on every rank, the same wherever it is called."""
    generator = torch.Generator().manual_seed(1000 * case + rank)
    x = torch.randn(numel, generator=generator) * torch.exp(torch.randn(numel, generator=generator))
    x[(torch.arange(numel) // 512) % 5 == 3] = 0.0
    return x.to(dtype)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
