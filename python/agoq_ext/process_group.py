"""The process group "agoq": Gloo and NCCL, with large float reductions quantized on the wire.

Importing this module registers the backend, so that `init_process_group("agoq")` or "cpu:agoq,cuda:agoq" is all that a
trainer changes. Float all-reduces and reduce-scatters with SUM or AVG of at least `min_bytes` go through
`agoq_ext.collectives`; everything else is handed to Gloo (CPU) or NCCL (CUDA) as it is. docs/collectives.md has the
details.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from . import layout
from ._version import __version__
from .collectives import Codec, Disagreement, all_gather, all_reduce, reduce_scatter
from .collectives.channel import channel_of

NAME = "agoq"
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
_FACTORS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg"}
_MISSING: Any = object()


@dataclass(frozen=True)
class Options:
    """What an "agoq" group quantizes, and how; `pg_options` of `init_process_group` and `new_group`.

    What is not given is taken from the environment (AGOQ_FORMAT, AGOQ_GROUP_SIZE, AGOQ_ROUNDING, AGOQ_MIN_BYTES,
    AGOQ_OPERATIONS with commas), else the default below. A group made without options has those of the default group.

    Attributes:
        format: "int8", or another of `agoq_ext.quantize`.
        group_size: 128; elements that share a scale.
        rounding: "nearest" or "stochastic".
        min_bytes: 2**20; tensors of fewer bytes (of a reduce-scatter the input, of an all-gather the output) pass
            through unquantized.
        operations: ("all_reduce", "reduce_scatter"); "all_gather" may be added.
    """

    format: str = _MISSING
    group_size: int = _MISSING
    rounding: str = _MISSING
    min_bytes: int = _MISSING
    operations: tuple[str, ...] = _MISSING

    def __post_init__(self) -> None:
        defaults = {
            "format": "int8",
            "group_size": 128,
            "rounding": "nearest",
            "min_bytes": 2**20,
            "operations": ("all_reduce", "reduce_scatter"),
        }
        for name in (field.name for field in fields(self)):
            value, default = getattr(self, name), defaults[name]
            if value is _MISSING:
                text = os.environ.get(f"AGOQ_{name.upper()}")
                value = default if text is None else _parse(name, text, type(default))
            object.__setattr__(self, name, tuple(value) if name == "operations" else value)
        self.codec.check("Options")
        if self.min_bytes < 0:
            raise ValueError(f"Options: min_bytes must not be negative; got {self.min_bytes}")
        for operation in self.operations:
            if operation not in OPERATIONS:
                raise ValueError(
                    f"Options: operations must be among {', '.join(OPERATIONS)}; got {operation!r}"
                )

    @property
    def _timeout(self) -> None:
        """What a DeviceMesh's `backend_override` asks options for; None is the default timeout."""

    @property
    def codec(self) -> Codec:
        """How values travel."""
        return Codec(self.format, self.group_size, rounding=self.rounding)


def _parse(name: str, text: str, kind: type) -> Any:
    if kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"Options: AGOQ_{name.upper()} must be {kind.__name__}; got {text!r}") from None


class ProcessGroup(dist.ProcessGroup):
    """A group whose large float reductions are quantized; made by torch.distributed for the backend "agoq".

    Quantized operations of a group run in FIFO order on connections of their own (docs/collectives.md), so they match
    across ranks if every rank issues them in the same order, whatever passes through in between.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, options: Options) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.options = options
        self._store = store
        _compare(store, rank, size, timeout, options)
        kinds = dist.ProcessGroup.BackendType
        # Each kind of backend once: torch takes a second one of a kind for the first.
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu/", store), rank, size, timeout)
        gloo._set_sequence_number_for_group()
        self._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        self._set_default_backend(kinds.GLOO)
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), rank, size, nccl_options)
            nccl._set_sequence_number_for_group()
            self._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
            self._set_default_backend(kinds.NCCL)

    def getBackendName(self) -> str:
        """The name that C++ asks for."""
        return NAME

    def get_group_store(self) -> dist.Store:
        """The store through which the ranks of this group met."""
        return self._store

    # --- reductions ---

    def allreduce(  # type: ignore[override]
        self, tensors: Any, opts: Any = None, *args: Any, **kwargs: Any
    ) -> dist.Work:
        """torch.distributed.all_reduce; quantized where the options say so."""
        own = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        run = self._reduction("all_reduce", own, own, _op_of(opts, kwargs))
        if run is not None:
            return run(all_reduce, own)
        return self._pass("allreduce", tensors, *_given(opts), *args, **kwargs)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Several all-reduces as one."""
        run = self._reduction("all_reduce", list(tensors), list(tensors), _op_of(opts, {}))
        if run is not None:
            return run(all_reduce, list(tensors))
        return self._pass("allreduce_coalesced", tensors, *_given(opts))

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """torch.distributed.reduce_scatter, from a list of tensors to one."""
        outs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        lists = [list(inputs)] if isinstance(inputs[0], Tensor) else [list(each) for each in inputs]
        flat = [tensor for each in lists for tensor in each]
        run = self._reduction("reduce_scatter", outs, flat, _op_of(opts, kwargs))
        if run is not None and all(
            t.numel() == out.numel() for out, each in zip(outs, lists, strict=True) for t in each
        ):
            packed = [torch.cat([t.reshape(-1) for t in each]) for each in lists]
            return run(reduce_scatter, outs, packed)
        return self._pass("reduce_scatter", outputs, inputs, *_given(opts), *args, **kwargs)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        run = self._reduction("reduce_scatter", [output], [input], _op_of(opts, {}))
        if run is not None:
            return run(reduce_scatter, [output], [input])
        return self._pass("_reduce_scatter_base", output, input, *_given(opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """torch.distributed.reduce_scatter_tensor, by its newer name."""
        return self._reduce_scatter_base(output, input, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Several reduce-scatters as one."""
        run = self._reduction("reduce_scatter", list(outputs), list(inputs), _op_of(opts, {}))
        if run is not None:
            return run(reduce_scatter, list(outputs), list(inputs))
        pairs = zip(outputs, inputs, strict=True)
        return _Joined([self._reduce_scatter_base(out, each, opts) for out, each in pairs], list(outputs))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Several reduce-scatters as one, by its newer name."""
        return self.reduce_scatter_tensor_coalesced(outputs, inputs, opts)

    # --- all-gathers, if asked for ---

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        if self._quantizes("all_gather", [output, input], output.nbytes):
            return self._run(all_gather, [output], [input])
        return self._pass("_allgather_base", output, input, *_given(opts))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """torch.distributed.all_gather_into_tensor, by its newer name."""
        return self._allgather_base(output, input, opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Several all-gathers as one."""
        pairs = zip(outputs, inputs, strict=True)
        return _Joined([self._allgather_base(out, each, opts) for out, each in pairs], list(outputs))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Several all-gathers as one, by its newer name."""
        return self.allgather_into_tensor_coalesced(outputs, inputs, opts)

    # --- what passes through ---

    # Called on the backend itself. Through the base class torch would hold the interpreter lock while it waits for
    # Gloo's queue, whose thread may wait for that lock to free a tensor: a deadlock (seen with torch 2.13).

    def _pass(self, name: str, *args: Any, **kwargs: Any) -> Any:
        device = next((each.device for each in _tensors(args)), None)
        return getattr(self._get_backend(device or self._device_types[0]), name)(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass("broadcast", *args, **kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass("reduce", *args, **kwargs)

    def allgather(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass("allgather", *args, **kwargs)

    def allgather_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass("allgather_coalesced", *args, **kwargs)

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass("gather", *args, **kwargs)

    def scatter(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass("scatter", *args, **kwargs)

    def alltoall(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass("alltoall", *args, **kwargs)

    def alltoall_base(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass("alltoall_base", *args, **kwargs)

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass("alltoall_base", *args, **kwargs)

    def send(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass("send", *args, **kwargs)

    def recv(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass("recv", *args, **kwargs)

    def recv_anysource(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass("recv_anysource", *args, **kwargs)

    def barrier(self, opts: Any = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        device = getattr(opts, "device", None)
        kinds = {each.type: each for each in self._device_types}
        chosen = kinds.get(device.type) if device is not None else kinds.get("cuda")
        backend: Any = self._get_backend(chosen or kinds["cpu"])
        return backend.barrier(*_given(opts), *args, **kwargs)

    # --- ends ---

    def abort(self) -> None:
        """Ends what is in flight with an error, quantized operations included, without waiting for peers."""
        channel_of(self).abort()
        for device in self._device_types:
            with contextlib.suppress(RuntimeError):  # Gloo has no abort
                self._get_backend(device).abort()

    def shutdown(self) -> None:
        """What `destroy_process_group` calls; does not wait for what is in flight."""
        channel_of(self).close()
        super().shutdown()

    # --- choosing ---

    def _reduction(self, operation: str, written: list[Tensor], payload: list[Tensor], op: Any) -> Any | None:
        """How to run a reduction here instead of passing it through; None to pass it through."""
        name = next((name for kind, name in _FACTORS.items() if op == kind), None)
        if name is None:
            return None
        nbytes = sum(tensor.nbytes for tensor in payload)
        if self._quantizes(operation, [*written, *payload], nbytes):
            return partial(self._run, op=name)
        on_host = all(tensor.device.type == "cpu" for tensor in payload)
        floats = all(tensor.dtype in layout.FLOAT_DTYPES for tensor in payload)
        if name == "avg" and on_host and floats and _dense(payload):
            # Gloo has no AVG; exact, by the same exchange.
            return partial(self._run, op=name, format="float32")
        return None

    def _quantizes(self, operation: str, tensors: list[Tensor], nbytes: int) -> bool:
        return (
            operation in self.options.operations
            and nbytes >= self.options.min_bytes
            and len({tensor.device for tensor in tensors}) == 1
            and tensors[0].device.type in ("cpu", "cuda")
            and all(tensor.dtype in layout.FLOAT_DTYPES for tensor in tensors)
            and _dense(tensors)
        )

    def _run(self, function: Any, *lists: list[Tensor], **more: Any) -> dist.Work:
        options = self.options
        codec = {"format": options.format, "group_size": options.group_size, "rounding": options.rounding}
        if "format" in more:
            codec["rounding"] = "nearest"
        return function(*lists, **{"group": self, **codec, "async_op": True, **more})


class _Joined(dist.Work):
    """Several operations in flight as one."""

    def __init__(self, works: list[dist.Work], tensors: list[Tensor]) -> None:
        super().__init__()
        self._works, self._tensors = works, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout or timedelta(0))
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        futures = torch.futures.collect_all([work.get_future() for work in self._works])

        def finish(done: Any) -> list[Tensor]:
            for future in done.value():
                future.value()
            return self._tensors

        return futures.then(finish)


def _tensors(nested: Any) -> Iterator[Tensor]:
    """The tensors among arguments and in lists of them."""
    for each in nested:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)


def _dense(tensors: list[Tensor]) -> bool:
    return all(tensor.layout == torch.strided for tensor in tensors)


def _op_of(opts: Any, kwargs: dict[str, Any]) -> Any:
    """The reduction of a call: an options object, the reduction itself, or neither, which means SUM."""
    if opts is None:
        opts = kwargs.get("op", dist.ReduceOp.SUM)
    return getattr(opts, "reduceOp", opts)


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


def _compare(store: dist.Store, rank: int, size: int, timeout: timedelta, options: Options) -> None:
    """Raises Disagreement, on every rank, unless all ranks have this version and these options."""
    own = f"agoq_ext {__version__} {options}"
    store.set(f"agoq_ext/options/{rank}", own)
    keys = [f"agoq_ext/options/{other}" for other in range(size)]
    store.wait(keys, timeout)
    records = [store.get(key).decode() for key in keys]
    if len(set(records)) > 1:
        listed = "; ".join(f"rank {other}: {record}" for other, record in enumerate(records))
        raise Disagreement(f"init_process_group: the ranks of the group disagree: {listed}")


def _create(backend: Any, options: Options | None) -> ProcessGroup:
    if options is None:
        world = dist.group.WORLD if dist.is_initialized() else None
        options = world.options if isinstance(world, ProcessGroup) else Options()
    if not isinstance(options, Options):
        raise TypeError(
            f"init_process_group: pg_options must be agoq_ext.process_group.Options; got {type(options).__name__}"
        )
    return ProcessGroup(backend.store, backend.group_rank, backend.group_size, backend.timeout, options)


def register() -> None:
    """Makes the backend known to torch.distributed, once; importing this module does it."""
    if NAME not in distributed_c10d.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


register()
