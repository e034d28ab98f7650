"""What each operator of a decoder keeps for backward: the measured behaviour as formulas, and the paper's count.

Two kinds of numbers stand side by side. `layer_bytes` and `outside_bytes` say what this package and transformers keep,
to the byte that `activation_report` measures: plain PyTorch on the CPU or a CUDA flash kernel, no padding mask, no
dropout, gradients for every parameter. `paper_units` says what AGoQ (arXiv 2605.00539, its table of a LLaMA layer)
counts for BF16, for COAT and for itself, in U = batch x sequence x hidden x 2 bytes, scales left out.

The paper counts 5 U for attention, where a flash kernel keeps q, k, v, out and the log-sum-exp, and a second copy of
the output projection's input, which here is the storage that attention keeps already.
"""

from __future__ import annotations

from ..activation.policy import ATTENTION_KINDS, ActivationPolicy, TensorFormat
from .shapes import ModelShape

COLUMNS = ("BF16", "COAT", "paper")
OPERATORS = (
    "norm",
    "qkv",
    "attention",
    "output projection",
    "gate and up projection",
    "mlp",
    "down projection",
)
PRECISIONS = ("bf16", "autocast")
_BF16, _FP32, _INT64 = 2, 4, 8


# --- to the byte ---------------------------------------------------------------------------------------------


def layer_bytes(
    shape: ModelShape,
    batch: int,
    seq: int,
    policy: ActivationPolicy,
    index: int = 0,
    precision: str = "bf16",
) -> dict[str, int]:
    """Bytes by operator that one decoder layer keeps; operators that keep nothing are absent.

    Args:
        index: of the layer, for the policy's overrides.
        precision: "bf16" for a BF16 model, "autocast" for FP32 parameters under BF16 autocast.
    """
    prefix = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[shape.family]
    layer = f"model.layers.{index}"

    def stored(kind: str, name: str, part: str) -> TensorFormat | None:
        return policy.stored(kind, f"{layer}.{name}", part if part == "Linear" else prefix + part)

    tokens = batch * seq
    full = tokens * shape.hidden
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    copies = _copies(precision)
    kept = dict.fromkeys(OPERATORS, 0)

    # Attention decides first: Qwen3's norms of q and k are converted with it.
    formats = [stored(kind, "self_attn", "Attention") for kind in ATTENTION_KINDS]
    output = stored("attention_output", "self_attn.o_proj", "Linear")
    converted = any(formats)
    for width, stored_as in zip((query, key, key), formats, strict=True):
        kept["attention"] += _kept(stored_as if converted else None, tokens, width)
    kept["attention"] += _kept(output if converted else None, tokens, query)
    kept["attention"] += batch * shape.heads * seq * _FP32  # log-sum-exp
    if output is not None and not converted:
        kept["output projection"] += output.nbytes((tokens, query))
    if shape.family == "qwen3":
        for name, heads in (("q_norm", shape.heads), ("k_norm", shape.kv_heads)):
            norm = stored("norm_input", f"self_attn.{name}", "RMSNorm") if converted else None
            # Behind the BF16 projections these norms see BF16 even under autocast.
            kept["norm"] += _norm(norm, tokens * heads, shape.head_dim, "bf16")

    first = stored("norm_input", "input_layernorm", "RMSNorm")
    kept["norm"] += _norm(first, tokens, shape.hidden, precision)
    kept["qkv"] += 0 if first else full * _BF16 * copies[0]

    second = stored("norm_input", "post_attention_layernorm", "RMSNorm")
    gate_up = stored("gate_up", "mlp", "MLP")
    mlp_input = stored("mlp_input", "mlp", "MLP")
    kept["norm"] += _norm(second, tokens, shape.hidden, precision)
    if second is None and gate_up is not None and mlp_input is not None:
        kept["mlp"] += mlp_input.nbytes((tokens, shape.hidden))
    elif second is None:
        kept["gate and up projection"] += full * _BF16 * copies[1]
    if gate_up is not None:
        kept["mlp"] += 2 * gate_up.nbytes((tokens, shape.ffn))
    else:
        # SiLU keeps gate, the product silu(gate) and up, the down projection the product.
        kept["mlp"] += 3 * tokens * shape.ffn * _BF16
        kept["down projection"] += tokens * shape.ffn * _BF16
    return {operator: n for operator, n in kept.items() if n}


def outside_bytes(
    shape: ModelShape,
    batch: int,
    seq: int,
    policy: ActivationPolicy,
    precision: str = "bf16",
    chunked_loss: bool = False,
) -> dict[str, int]:
    """Bytes by operator that a causal LM with labels keeps outside its layers.

    The rotary tables are counted by the attention of the first layer, which saves them first.
    """
    prefix = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[shape.family]
    tokens = batch * seq
    norm = policy.stored("norm_input", "model.norm", f"{prefix}RMSNorm")
    table = _BF16 if precision == "bf16" else _FP32
    if chunked_loss:
        # The head's input, label and log-sum-exp of each token, and how many labels count.
        last = {"loss": tokens * (shape.hidden * _BF16 + _INT64 + _FP32) + _INT64}
    else:
        # The head's input; the log-softmax in FP32, the labels, and the mean's weight.
        loss = tokens * (shape.vocabulary * _FP32 + _INT64) + _FP32
        last = {"head": tokens * shape.hidden * _BF16, "loss": loss}
    return {
        "embedding": tokens * _INT64,
        "rotary tables": 2 * seq * shape.head_dim * table,
        "norm": _norm(norm, tokens, shape.hidden, precision),
        **last,
    }


def _copies(precision: str) -> tuple[int, int]:
    """How often the inputs of q, k, v and of gate, up are kept: autocast casts for each projection anew."""
    return (3, 2) if precision == "autocast" else (1, 1)


def _kept(stored: TensorFormat | None, rows: int, cols: int) -> int:
    return rows * cols * _BF16 if stored is None else stored.nbytes((rows, cols))


def _norm(stored: TensorFormat | None, rows: int, cols: int, precision: str) -> int:
    """An RMSNorm as transformers writes it keeps its input in FP32, the normalized input in its own dtype, and rstd."""
    if stored is not None:
        return stored.nbytes((rows, cols))
    own = _BF16 if precision == "bf16" else _FP32
    return rows * cols * (_FP32 + own) + rows * _FP32


# --- the paper's count ---------------------------------------------------------------------------------------


def paper_units(shape: ModelShape, *, scales: bool = False) -> dict[str, dict[str, float]]:
    """U by operator for "BF16", "COAT" and "paper", as AGoQ's table counts a LLaMA layer.

    With multi-head attention and an FFN of 4 x hidden the totals are the table's: 28, 16.5 and 7.75.

    Args:
        scales: add the paper's FP32 scale for each block of 128 to its own column (7.92 in total).
    """
    ffn = shape.ffn / shape.hidden
    query = shape.heads * shape.head_dim / shape.hidden
    key = shape.kv_heads * shape.head_dim / shape.hidden
    attention = 3 * query + 2 * key
    four_bits = 1 / 4 + (4 / 128 / 2 if scales else 0)  # of two bytes an element
    return {
        "norm": {"BF16": 4, "COAT": 1, "paper": 2 * four_bits},
        "qkv": {"BF16": 1, "COAT": 1, "paper": 0},
        "attention": dict.fromkeys(COLUMNS, attention),
        "output projection": {"BF16": query, "COAT": query, "paper": query * four_bits},
        "gate and up projection": {"BF16": 1, "COAT": 1 / 2, "paper": 0},
        "mlp": {"BF16": 3 * ffn, "COAT": 3 * ffn / 2, "paper": 2 * ffn * four_bits},
        "down projection": {"BF16": ffn, "COAT": ffn / 2, "paper": 0},
    }
