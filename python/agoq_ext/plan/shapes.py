"""ModelShape: the sizes of a decoder in Llama's form, read from a configuration of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

# Sizes known by name, in the entries of a config.json.
KNOWN: dict[str, dict[str, Any]] = {
    "llama2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "llama2-13b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "vocab_size": 32000,
    },
    "llama3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        family: "llama", "mistral", "qwen2" or "qwen3".
        hidden: width of the residual stream. ffn: width between the MLP's projections.
        layers: decoder layers. heads, kv_heads: of queries, of keys and values. head_dim: of each.
        vocabulary: rows of the embedding. tied: whether the head is the embedding.
        attention_bias, output_bias, mlp_bias: biases of q, k, v; of the output projection; of the MLP.
    """

    family: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = self.hidden * (2 * query + 2 * key) + 3 * self.hidden * self.ffn
        biases = (query + 2 * key) * self.attention_bias + self.hidden * self.output_bias
        biases += (2 * self.ffn + self.hidden) * self.mlp_bias
        norms = 2 * self.hidden + (2 * self.head_dim if self.family == "qwen3" else 0)
        return matrices + biases + norms

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, a tied head counted once."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that the entries of a config.json describe.

    Raises:
        UserError: an entry is missing or wrong, or the model is of another family.
    """
    family = config.get("model_type", "llama")
    if family not in FAMILIES:
        raise UserError(f"plan: model_type must be one of {', '.join(FAMILIES)}; got {family!r}")

    def size(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise UserError(f"plan: {name} must be a positive integer; got {value!r}")
        return value

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    default_dim = 128 if family == "qwen3" else hidden // heads
    bias = bool(config.get("attention_bias", False))
    kv_default = {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(family, heads)
    return ModelShape(
        family=family,
        hidden=hidden,
        ffn=size("intermediate_size"),
        layers=size("num_hidden_layers"),
        heads=heads,
        kv_heads=size("num_key_value_heads", kv_default),
        head_dim=size("head_dim", default_dim),
        vocabulary=size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bias or family == "qwen2",
        output_bias=bias and family in ("llama", "qwen3"),
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
    )


def read_shape(name: str) -> ModelShape:
    """The shape of a size known by name, of a config.json, or of a folder that holds one.

    Raises:
        UserError: none of these, or the configuration is not usable.
    """
    if name in KNOWN:
        return shape_of(KNOWN[name])
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        known = ", ".join(KNOWN)
        raise UserError(f"plan: --model must be one of {known}, or a config.json; {error}") from error
    except ValueError as error:
        raise UserError(f"plan: {path} must be JSON; {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"plan: {path} must hold a JSON object; got {type(data).__name__}")
    return shape_of(data)
