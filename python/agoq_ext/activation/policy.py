"""ActivationPolicy: which code stores which kind of saved tensor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from .. import layout
from ..nn.functional import DEFAULT_FORMAT, DEFAULT_GROUP_SIZE

_SCALE_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in layout.SCALE_DTYPES}


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

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of the functions in `agoq_ext.nn.functional`."""
        return {
            "format": self.format,
            "group_size": self.group_size,
            "scale_dtype": _SCALE_DTYPES[self.scale_dtype],
        }


@dataclass(frozen=True)
class ActivationPolicy:
    """A `TensorFormat` for each kind of saved tensor; None keeps what the unconverted model keeps.

    Attributes:
        norm_input: input of an RMSNorm; the projections that read the norm's output then keep nothing.
        attention_output: input of attention's output projection.
        gate_up: the two inputs of silu(gate) * up; the down projection then keeps nothing.
        mlp_input: input of the gate and up projections where no converted norm feeds them.
    """

    norm_input: TensorFormat | None = None
    attention_output: TensorFormat | None = None
    gate_up: TensorFormat | None = None
    mlp_input: TensorFormat | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not isinstance(value, TensorFormat):
                raise TypeError(
                    f"ActivationPolicy: {field.name} must be a TensorFormat or None; got {type(value).__name__}"
                )

    @classmethod
    def named(cls, name: str) -> ActivationPolicy:
        """The policy called "agoq", "paper" or "off".

        "paper" stores in 4 bits what AGoQ (arXiv 2605.00539) stores in 4 bits, attention itself untouched. "agoq"
        stores the inputs of norms and projections in 8 bits and gate and up, the bulk, in 4: the error of a norm's
        input reaches every projection behind it and slows early training measurably (docs/activations.md).
        Raises ValueError for any other name.
        """
        return resolve_policy("ActivationPolicy.named", name)

    @classmethod
    def from_json(cls, text: str) -> ActivationPolicy:
        """The policy that `to_json` wrote. Absent kinds are None; raises ValueError for unknown ones."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"ActivationPolicy: text must be JSON; {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"ActivationPolicy: text must be a JSON object; got {type(data).__name__}")
        kinds = [field.name for field in fields(cls)]
        for kind, value in data.items():
            if kind not in kinds:
                raise ValueError(f"ActivationPolicy: keys must be among {', '.join(kinds)}; got {kind!r}")
            if value is not None and not isinstance(value, dict):
                raise ValueError(f"ActivationPolicy: {kind} must be a JSON object or null; got {value!r}")
            unknown = set(value or ()) - {field.name for field in fields(TensorFormat)}
            if unknown:
                raise ValueError(f"ActivationPolicy: {kind} has unknown keys {', '.join(sorted(unknown))}")
        return cls(**{kind: None if value is None else TensorFormat(**value) for kind, value in data.items()})

    def to_json(self) -> str:
        """The policy as a JSON object, one key for each kind of saved tensor."""
        return json.dumps(asdict(self))


_FOUR_BITS = TensorFormat()
_EIGHT_BITS = TensorFormat("int8")
POLICIES = {
    "agoq": ActivationPolicy(
        norm_input=_EIGHT_BITS, attention_output=_EIGHT_BITS, gate_up=_FOUR_BITS, mlp_input=_EIGHT_BITS
    ),
    "paper": ActivationPolicy(
        norm_input=_FOUR_BITS, attention_output=_FOUR_BITS, gate_up=_FOUR_BITS, mlp_input=_FOUR_BITS
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
