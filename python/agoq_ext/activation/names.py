"""What a module's name tells: the operator it is and the layer it lies in."""

from __future__ import annotations

import re

from torch import nn

# Operator by the last part of a module's name; the first pattern that matches it whole decides.
OPERATORS = (
    (r"q_proj|k_proj|v_proj|qkv_proj", "qkv"),
    (r"o_proj|out_proj", "output projection"),
    (r"self_attn|attn|attention|rotary_emb", "attention"),
    (r".*norm.*|ln_.*", "norm"),
    (r"gate_proj|up_proj|gate_up_proj", "gate and up projection"),
    (r"down_proj", "down projection"),
    (r"mlp|act_fn", "mlp"),
    (r"lm_head|score", "head"),
    (r"embed_tokens|.*embed.*|wte|wpe", "embedding"),
)


def operator_of(name: str, module: nn.Module | None = None) -> str:
    """What the module called `name` does: by `OPERATORS`, else its class's name."""
    last = name.rpartition(".")[2]
    for pattern, operator in OPERATORS:
        if re.fullmatch(pattern, last):
            return operator
    if module is None:
        return "other"
    if "For" in type(module).__name__:
        return "loss"  # what a LlamaForCausalLM and the like compute outside their modules
    if last.isdigit() and any(True for _ in module.children()):
        return "residual"  # what a layer computes outside its modules
    return type(module).__name__


def layer_of(name: str) -> str:
    """The first number in a module's name: the index of its layer; "" if there is none."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return match.group(1) if match else ""
