"""The collectives: what each takes, checks and computes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .. import layout, ops
from . import wire
from .channel import channel_of, resolve_group
from .transport import Transport
from .wire import Codec, Shards
from .work import Work

OPS = ("avg", "sum")

# Words that set the noise of the two encodings of an exchange apart (docs/formats.md, "Seeds").
PHASE_SEND = 0
PHASE_REDUCED = 1


def all_reduce(
    tensor: Tensor,
    op: str = "avg",
    group: dist.ProcessGroup | None = None,
    format: str = "int8",
    group_size: int = 128,
    scale_dtype: torch.dtype = torch.bfloat16,
    rounding: str = "nearest",
    seed: int | Tensor | None = None,
    async_op: bool = False,
) -> Work | None:
    """Replaces `tensor` on every rank by the mean or sum over all ranks, exchanged in a quantized format.

    Codes go to the owners of the shards, are summed there in FP32 in rank order, and the encoded result is
    gathered (AGoQ, arXiv 2605.00539, QuanGrad). All ranks, owners included, decode what was gathered, so all end
    with identical bits. With one rank nothing is exchanged and `tensor` stays as it is, unquantized.

    The call is a collective: every rank makes its calls on a group in the same order, with the same number of
    elements and the same options. The first call of a kind compares them. Ranks may differ in the tensor's dtype,
    shape and strides; elements are numbered in row-major order.

    Args:
        tensor: float32, float16 or bfloat16, any shape and strides; changed in place. Not to be touched before an
            asynchronous call is over.
        op: "avg" (the FP32 sum times 1/world) or "sum".
        group: the process group; None is the default one.
        format, group_size, scale_dtype, rounding: as for `agoq_ext.quantize`.
        seed: for stochastic rounding: an int, an int64 tensor of one element on the tensor's device, or None to
            draw one from torch's generator. Rank and phase are mixed into it.
        async_op: return a Work at once instead of waiting.

    Returns:
        None, or a Work if `async_op`.

    Raises:
        ValueError, TypeError: an argument is not one of the above. Nothing has been sent.
        Disagreement: the ranks do not make the same call. (From `wait()` if `async_op`, as the next.)
        RuntimeError: a peer has died, or has not answered within the group's timeout. `tensor` is unchanged.
    """
    name = "all_reduce"
    codec = Codec(format, group_size, scale_dtype, rounding)
    codec.check(name)
    _check_tensor(name, tensor)
    if op not in OPS:
        raise ValueError(f"{name}: op must be 'avg' or 'sum'; got {op!r}")
    seed = ops.seed_tensor(name, rounding, seed, tensor.device)
    group = resolve_group(name, group)
    channel = channel_of(group)
    if channel.world == 1:
        if not async_op:
            return None
        work = Work(name, [tensor])
        work.finish()
        return work

    seeds: tuple[Tensor | None, Tensor | None] = (None, None)
    if seed is not None:
        send, reduced = (wire.mix_seed(seed, channel.rank, phase) for phase in (PHASE_SEND, PHASE_REDUCED))
        seeds = send, reduced
    factor = 1.0 / channel.world if op == "avg" else 1.0
    call = f"{name} op={op} numel={tensor.numel()} {codec}"

    def body(transport: Transport) -> None:
        channel.agree(transport, name, call)
        if tensor.numel():
            target = tensor.detach()
            flat = target.contiguous().view(-1)
            _all_reduce_flat(transport, flat, codec, factor, seeds)
            if not target.is_contiguous():
                target.copy_(flat.view(target.shape))

    if not tensor.is_inference():
        # Custom ops leave the version alone; autograd must learn that a tensor it saved is overwritten.
        torch.autograd.graph.increment_version(tensor)
    inputs = [s for s in seeds if s is not None]
    if async_op:
        return channel.run(name, body, tensor, group, inputs)
    channel.run_now(name, body, tensor, group, inputs)
    return None


def _all_reduce_flat(
    transport: Transport,
    flat: Tensor,
    codec: Codec,
    factor: float,
    seeds: tuple[Tensor | None, Tensor | None],
) -> None:
    """all_reduce of a contiguous float [numel] tensor, in place."""
    shards = Shards.cut(flat.numel(), transport.world, codec.group_size)
    slot = wire.slot_bytes(shards, codec)
    slots = torch.empty(transport.world, slot, dtype=torch.uint8, device=flat.device)
    wire.encode(flat, slots, shards, codec, seeds[PHASE_SEND])

    # The copies below are none where the messages lie on the tensor's own device already.
    slots = slots.to(transport.device)
    received = torch.empty_like(slots)
    transport.all_to_all(received, slots)
    reduced = received.new_empty(slot)
    seed = seeds[PHASE_REDUCED]
    seed = None if seed is None else seed.to(transport.device)
    wire.reduce(received, reduced, shards, transport.rank, codec, factor, seed)
    del received
    transport.all_gather(slots, reduced)
    wire.decode(slots.to(flat.device), flat, shards, codec)


def setup(
    group: dist.ProcessGroup | None = None,
    format: str = "int8",
    group_size: int = 128,
    scale_dtype: torch.dtype = torch.bfloat16,
    rounding: str = "nearest",
    device: torch.device | str = "cpu",
) -> None:
    """Connects the ranks of a group for tensors of `device` and compares version and options. Optional.

    The first collective on a group does this by itself. Calling it apart puts the cost, and the error if ranks
    disagree, in a place of one's choosing. A collective: all ranks of the group call it.

    Raises:
        ValueError, TypeError: an argument is not one that `all_reduce` takes.
        Disagreement, RuntimeError: as for `all_reduce`.
    """
    name = "setup"
    codec = Codec(format, group_size, scale_dtype, rounding)
    codec.check(name)
    group = resolve_group(name, group)
    channel = channel_of(group)
    if channel.world > 1:
        empty = torch.empty(0, device=device)
        channel.run_now(
            name, lambda transport: channel.agree(transport, name, f"{name} {codec}"), empty, group
        )


def bytes_sent(group: dist.ProcessGroup | None = None) -> int:
    """Bytes that this process has handed to the network for other ranks of `group`, through this package.

    Messages with their padding, and the records that ranks compare; not what a rank sends to itself, and not what
    the transport adds (TCP, Gloo and NCCL headers, connecting). An all-gather to W ranks counts W - 1 copies, which
    is what direct and ring algorithms both send. An operation counts once it is over.
    """
    return channel_of(resolve_group("bytes_sent", group)).bytes_sent


def reset_bytes_sent(group: dist.ProcessGroup | None = None) -> None:
    """Sets `bytes_sent` of `group` to zero."""
    channel_of(resolve_group("reset_bytes_sent", group)).reset_bytes()


def add_bytes_sent(count: int, group: dist.ProcessGroup | None = None) -> None:
    """Adds to `bytes_sent` what the caller has sent by other means, so that one number holds all."""
    if count < 0:
        raise ValueError(f"add_bytes_sent: count must not be negative; got {count}")
    channel_of(resolve_group("add_bytes_sent", group)).add_bytes(count)


def plain_all_reduce_bytes(nbytes: int, world: int) -> int:
    """Bytes that a rank sends in an unquantized all-reduce of `nbytes`: 2 (world - 1) / world of them, rounded up.

    A convention, not a measurement: it is what ring and halving-doubling algorithms send, the least that any can.
    """
    return -(-2 * (world - 1) * nbytes // world)


def _check_tensor(op: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: tensor must be a torch.Tensor; got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{op}: tensor must be a dense (strided) tensor; got layout {tensor.layout}")
    layout.check_float_dtype(op, tensor.dtype, argument="tensor's dtype")
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(
            f"{op}: tensor must not overlap itself, since it is written in place; got shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )
