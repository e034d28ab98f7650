"""The conversion of blocks that a `BlockMap` describes, and of attention that calls transformers' interface."""

from __future__ import annotations

from typing import Any

from torch import nn

from . import blocks
from .blocks import BlockMap, Reader, function_of
from .conversion import ConversionReport, full_name, join, swap
from .policy import ATTENTION_KINDS


def convert_block(report: ConversionReport, name: str, block: nn.Module, block_map: BlockMap) -> None:
    """Changes the classes of the modules that `block_map` names, where the policy stores their inputs."""
    if block_map.attention is not None:
        place, output = block_map.attention
        attention = block.get_submodule(place)
        stand_in = blocks.stand_in(type(attention))
        if stand_in is None:
            report.skipped[join(name, place)] = f"no attention is known as {full_name(type(attention))}"
        else:
            convert_attention(report, join(name, place), attention, stand_in, output)
    for linear, kind in block_map.linears.items():
        module, full = block.get_submodule(linear), join(name, linear)
        stored = report.stored(kind, full, module)
        if stored is not None and _make_reader(report, full, module):
            vars(module).update(agoq_format=stored)
            report.converted[full] = kind
    for norm, readers in block_map.norms.items():
        _convert_norm(report, name, block, norm, readers)
    for activation, reader in block_map.activations.items():
        _convert_activation(report, name, block, activation, reader)


def convert_attention(
    report: ConversionReport, name: str, attention: Any, stand_in: type[nn.Module], output: str
) -> bool:
    """Stores q, k and v quantized, and the output where the projection called `output` stores it too."""
    formats = [report.stored(kind, name, attention) for kind in ATTENTION_KINDS]
    if not any(formats):
        return False
    from .decoder import ATTENTION

    config = attention.config
    before = config._attn_implementation
    # Layers share a configuration: all but the first find it changed.
    if before not in ("sdpa", ATTENTION):
        report.skipped[name] = f"the attention implementation must be sdpa; it is {before}"
        return False
    projection = getattr(attention, output)
    out_format = report.stored("attention_output", f"{name}.{output}", projection)
    config._attn_implementation = ATTENTION
    swap(
        attention,
        stand_in,
        agoq_formats=(*formats, out_format),
        agoq_output=output,
        agoq_implementation="sdpa",
    )
    report.converted[name] = ", ".join(k for k, f in zip(ATTENTION_KINDS, formats, strict=True) if f)
    return True


def _convert_norm(
    report: ConversionReport, name: str, block: nn.Module, norm: str, readers: tuple[str, ...]
) -> None:
    module, full = block.get_submodule(norm), join(name, norm)
    stored = report.stored("norm_input", full, module)
    if stored is None:
        return
    if type(module) not in (nn.LayerNorm, nn.RMSNorm) or len(vars(module)["normalized_shape"]) != 1:
        report.skipped[full] = (
            f"must be a LayerNorm or nn.RMSNorm over the last dimension; it is a {full_name(type(module))}"
        )
        return
    if not all(_make_reader(report, join(name, r), block.get_submodule(r)) for r in readers):
        readers = ()
    for reader in readers:
        vars(block.get_submodule(reader)).update(agoq_name=reader)
    swap(
        module,
        blocks.stand_in(type(module)),
        agoq_format=stored,
        agoq_readers=tuple(_parent_and_name(block, r) for r in readers),
        agoq_path=tuple({id(m): m for r in readers for m in _between(block, norm, r)}.values()),
        agoq_names=readers,
    )
    report.converted[full] = "norm_input"


def _convert_activation(
    report: ConversionReport, name: str, block: nn.Module, activation: str, reader: str
) -> None:
    module, full = block.get_submodule(activation), join(name, activation)
    stored = report.stored("gelu_input", full, module)
    if stored is None:
        return
    function, stand_in = function_of(module), blocks.stand_in(type(module))
    if function is None or stand_in is None:
        report.skipped[full] = f"the activation must be GELU or SiLU; it is {full_name(type(module))}"
        return
    if not _make_reader(report, join(name, reader), block.get_submodule(reader)):
        return
    swap(
        module,
        stand_in,
        agoq_format=stored,
        agoq_function=function,
        agoq_readers=(_parent_and_name(block, reader),),
        agoq_path=tuple(_between(block, activation, reader)),
    )
    report.converted[full] = "gelu_input"


def _make_reader(report: ConversionReport, name: str, module: nn.Module) -> bool:
    """Makes a linear layer one that takes more than tensors; False, with a reason, where it is no linear layer."""
    if isinstance(module, Reader):
        return True
    stand_in = blocks.stand_in(type(module))
    if stand_in is None or not issubclass(stand_in, Reader):
        report.skipped[name] = f"must be a linear layer; it is a {full_name(type(module))}"
        return False
    swap(module, stand_in, agoq_name=name, agoq_format=None)
    return True


def _parent_and_name(block: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, last = name.rpartition(".")
    return block.get_submodule(parent), last


def _between(block: nn.Module, source: str, reader: str) -> list[nn.Module]:
    """The modules that are called with what `source` returns before `reader` is: its parents without those of both."""
    outer, inner = source.split(".")[:-1], reader.split(".")[:-1]
    common = 0
    while common < min(len(outer), len(inner)) and outer[common] == inner[common]:
        common += 1
    return [block.get_submodule(".".join(inner[: i + 1])) for i in range(common, len(inner))]
