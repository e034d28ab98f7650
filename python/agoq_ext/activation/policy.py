"""ActivationPolicy: which code stores which kind of saved tensor, in which module."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from .. import layout
from ..autograd import Codec
from ..nn.functional import DEFAULT_FORMAT, DEFAULT_GROUP_SIZE
from .names import layer_of

if TYPE_CHECKING:
    from .calibrate import Calibration

_SCALE_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in layout.SCALE_DTYPES}
# The code that takes so many bits and wastes none of them, for widening (method of AGoQ's DBCA-PP).
_CODE_OF_BITS = {5: "int5", 6: "int6", 8: "int8"}


# --- checks --------------------------------------------------------------------------------------------------


def _tuple_of(kind: type, argument: str, values: Any) -> tuple[Any, ...]:
    """`values` as a tuple; TypeError unless it is a list or tuple of `kind`."""
    if not isinstance(values, (list, tuple)) or not all(type(v) is kind for v in values):
        raise TypeError(f"ActivationPolicy: {argument} must be a sequence of {kind.__name__}; got {values!r}")
    return tuple(values)


def _check_keys(what: str, data: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in data:
        if key not in known:
            raise ValueError(f"{what}: keys must be among {', '.join(known)}; got {key!r}")


def _format_of(kind: str, value: Any) -> TensorFormat | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"ActivationPolicy: {kind} must be a JSON object or null; got {value!r}")
    unknown = set(value) - {field.name for field in fields(TensorFormat)}
    if unknown:
        raise ValueError(f"ActivationPolicy: {kind} has unknown keys {', '.join(sorted(unknown))}")
    return TensorFormat(**value)


def _override_of(entry: dict[str, Any]) -> Override:
    _check_keys("ActivationPolicy: overrides", entry, [field.name for field in fields(Override)])
    if "format" not in entry:
        raise ValueError(f"ActivationPolicy: an override must have a format or null; got {entry!r}")
    try:
        return Override(**{**entry, "format": _format_of("format", entry["format"])})
    except TypeError as error:
        raise ValueError(str(error)) from None


# --- policies ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorFormat:
    """How one kind of saved tensor is stored.

    Attributes:
        format: name of the code, e.g. "nf4".
        group_size: 32, 64, 128 or 256 elements that share one scale.
        scale_dtype: "bfloat16" or "float32".
    """

    format: str = DEFAULT_FORMAT
    group_size: int = DEFAULT_GROUP_SIZE
    scale_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        layout.check_format("TensorFormat", self.format)
        layout.check_group_size("TensorFormat", self.group_size)
        if self.scale_dtype not in _SCALE_DTYPES:
            raise ValueError(
                f"TensorFormat: scale_dtype must be one of {', '.join(_SCALE_DTYPES)}; got {self.scale_dtype!r}"
            )

    @property
    def bits(self) -> int:
        """Bits of one code, scales apart."""
        return layout.FORMATS[self.format].bits

    @property
    def torch_scale_dtype(self) -> torch.dtype:
        """`scale_dtype` as PyTorch's."""
        return _SCALE_DTYPES[self.scale_dtype]

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of the functions in `agoq_ext.nn.functional`."""
        return {
            "format": self.format,
            "group_size": self.group_size,
            "scale_dtype": self.torch_scale_dtype,
        }

    @property
    def codec(self) -> Codec:
        """What the functions of `autograd` take."""
        return Codec(self.format, self.group_size, self.torch_scale_dtype)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of codes and scales of a tensor of this shape, cols last."""
        rows, cols = layout.as_rows(shape)
        scales = 1
        for size in layout.scales_shape(rows, cols, self.format, self.group_size):
            scales *= size
        return rows * layout.row_bytes(cols, self.format) + scales * self.torch_scale_dtype.itemsize

    def widened(self, bits: int) -> TensorFormat:
        """This format, or where it has fewer than `bits` bits the integer code of 5, 6 or 8 that has them.

        Raises:
            ValueError: bits is not 4, 5, 6 or 8.
        """
        if bits not in (4, *_CODE_OF_BITS):
            raise ValueError(f"widened: bits must be one of 4, 5, 6, 8; got {bits!r}")
        return self if self.bits >= bits else replace(self, format=_CODE_OF_BITS[bits])


@dataclass(frozen=True)
class Override:
    """Another format for some modules. Every criterion that is given must hold; later overrides win.

    Attributes:
        format: how they store the tensor; None leaves it alone.
        kinds: the kinds of saved tensor it is for, see `ActivationPolicy`; () for all.
        name: shell pattern for the module's whole name, e.g. "*.layers.0.*" or "*.mlp".
        type: name of the module's class before conversion, e.g. "LlamaMLP".
        layers: layer indices, the first number in the module's name.
    """

    format: TensorFormat | None
    kinds: tuple[str, ...] = ()
    name: str | None = None
    type: str | None = None
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.format is not None and not isinstance(self.format, TensorFormat):
            raise TypeError(
                f"Override: format must be a TensorFormat or None; got {self.format.__class__.__name__}"
            )
        object.__setattr__(self, "kinds", _tuple_of(str, "kinds", self.kinds))
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"Override: kinds must be among {', '.join(KINDS)}; got {kind!r}")
        for attribute in ("name", "type"):
            value = getattr(self, attribute)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"Override: {attribute} must be a string or None; got {value!r}")
        if self.layers is not None:
            object.__setattr__(self, "layers", _tuple_of(int, "layers", self.layers))
        if self.name is None and self.type is None and self.layers is None:
            raise ValueError("Override: one of name, type and layers must be given; got none")

    def matches(self, kind: str, name: str, type_name: str) -> bool:
        """Whether it is for the tensor of this kind that the module called `name` stores."""
        return (
            (not self.kinds or kind in self.kinds)
            and (self.name is None or fnmatch.fnmatchcase(name, self.name))
            and (self.type is None or self.type == type_name)
            and (self.layers is None or layer_of(name) in map(str, self.layers))
        )


@dataclass(frozen=True)
class ActivationPolicy:
    """A `TensorFormat` for each kind of saved tensor; None keeps what the unconverted model keeps.

    Attributes:
        norm_input: input of an RMSNorm or LayerNorm; the projections that read the norm's output then keep nothing.
        attention_output: input of attention's output projection. Where attention stores query, key or value as well,
            it reads its output from the same stored copy.
        gate_up: the two inputs of silu(gate) * up; the down projection then keeps nothing.
        mlp_input: input of an MLP's first projections where no converted norm feeds them.
        query, key, value: the inputs of scaled dot-product attention, after rotary embedding and before grouped heads
            are repeated.
        gelu_input: input of the activation function of an MLP without a gate; the projection behind it keeps nothing.
        overrides: exceptions by name, type or layer; the last one that matches decides.
    """

    norm_input: TensorFormat | None = None
    attention_output: TensorFormat | None = None
    gate_up: TensorFormat | None = None
    mlp_input: TensorFormat | None = None
    query: TensorFormat | None = None
    key: TensorFormat | None = None
    value: TensorFormat | None = None
    gelu_input: TensorFormat | None = None
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        for kind in KINDS:
            value = getattr(self, kind)
            if value is not None and not isinstance(value, TensorFormat):
                raise TypeError(
                    f"ActivationPolicy: {kind} must be a TensorFormat or None; got {type(value).__name__}"
                )
        object.__setattr__(self, "overrides", _tuple_of(Override, "overrides", self.overrides))

    @classmethod
    def named(cls, name: str) -> ActivationPolicy:
        """The policy called "agoq", "paper", "lean" or "off"; docs/activations.md compares them.

        "paper" stores in 4 bits what AGoQ (arXiv 2605.00539) stores in 4 bits, attention itself untouched. "agoq"
        stores attention too, and spends 5 and 6 bits where 4 cost gradient error. "lean" takes the fewest bytes.
        Raises ValueError for any other name.
        """
        return resolve_policy("ActivationPolicy.named", name)

    @classmethod
    def uniform(cls, stored: TensorFormat | None) -> ActivationPolicy:
        """The policy that stores every kind in one format."""
        formats: dict[str, Any] = dict.fromkeys(KINDS, stored)
        return cls(**formats)

    def stored(self, kind: str, name: str = "", type_name: str = "") -> TensorFormat | None:
        """How the module called `name`, of the class called `type_name`, stores its tensor of this kind."""
        for override in reversed(self.overrides):
            if override.matches(kind, name, type_name):
                return override.format
        return getattr(self, kind)

    def fit(self, memory_budget: int, calibration: Calibration) -> ActivationPolicy:
        """This policy with the calibrated tensors in the widest formats that fit; see `Calibration.fit`."""
        return calibration.fit(memory_budget, self)

    @property
    def min_bits(self) -> int:
        """The fewest bits of any of its formats; 8 where it stores nothing."""
        formats = [*(getattr(self, kind) for kind in KINDS), *(o.format for o in self.overrides)]
        return min((f.bits for f in formats if f is not None), default=8)

    def widened(self, bits: int) -> ActivationPolicy:
        """This policy with no format below `bits` = 4, 5, 6 or 8 bits; what is not stored quantized stays so."""
        formats = {kind: getattr(self, kind) for kind in KINDS}
        return replace(
            self,
            **{kind: None if f is None else f.widened(bits) for kind, f in formats.items()},
            overrides=tuple(
                replace(o, format=None if o.format is None else o.format.widened(bits))
                for o in self.overrides
            ),
        )

    @classmethod
    def from_json(cls, text: str) -> ActivationPolicy:
        """The policy that `to_json` wrote. Absent kinds are None; raises ValueError for unknown ones."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"ActivationPolicy: text must be JSON; {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"ActivationPolicy: text must be a JSON object; got {type(data).__name__}")
        _check_keys("ActivationPolicy", data, (*KINDS, "overrides"))
        entries = data.pop("overrides", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError(f"ActivationPolicy: overrides must be a list of JSON objects; got {entries!r}")
        formats = {kind: _format_of(kind, value) for kind, value in data.items()}
        return cls(**formats, overrides=tuple(_override_of(entry) for entry in entries))

    def to_json(self) -> str:
        """The policy as a JSON object: one key for each kind of saved tensor, and "overrides"."""
        return json.dumps(asdict(self))


KINDS = tuple(field.name for field in fields(ActivationPolicy) if field.name != "overrides")
ATTENTION_KINDS = ("query", "key", "value")


# --- named policies ------------------------------------------------------------------------------------------

# The error of a norm's input reaches every projection behind it, so that it gets the widest codes; gate and up are half
# of all bytes, so that their width decides the size (docs/activations.md, "Which policy").
_NF4, _INT5, _INT6 = TensorFormat("nf4"), TensorFormat("int5"), TensorFormat("int6")
POLICIES = {
    "agoq": ActivationPolicy(
        norm_input=_INT6,
        attention_output=_INT6,
        gate_up=_INT5,
        mlp_input=_INT6,
        query=_INT6,
        key=_INT6,
        value=_INT6,
        gelu_input=_INT5,
    ),
    "paper": ActivationPolicy(
        norm_input=_NF4, attention_output=_NF4, gate_up=_NF4, mlp_input=_NF4, gelu_input=_NF4
    ),
    "lean": ActivationPolicy(
        norm_input=_INT6,
        attention_output=_INT5,
        gate_up=_NF4,
        mlp_input=_INT6,
        query=_INT5,
        key=_INT5,
        value=_INT5,
        gelu_input=_NF4,
    ),
    "off": ActivationPolicy(),
}


def resolve_policy(op: str, policy: str | ActivationPolicy) -> ActivationPolicy:
    """The policy that a name or a policy stands for; ValueError or TypeError otherwise."""
    if isinstance(policy, ActivationPolicy):
        return policy
    if not isinstance(policy, str):
        raise TypeError(f"{op}: policy must be a name or an ActivationPolicy; got {type(policy).__name__}")
    if policy not in POLICIES:
        raise ValueError(
            f"{op}: policy must be one of {', '.join(POLICIES)} or an ActivationPolicy; got {policy!r}"
        )
    return POLICIES[policy]
