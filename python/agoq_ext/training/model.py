"""The model: a Hugging Face LLaMA over bytes, its activation policy, its autocast, its optimizer's groups."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from .config import VOCABULARY, TrainConfig

MIN_LR_SHARE = 0.1


def build_model(config: TrainConfig) -> nn.Module:
    """A LlamaForCausalLM in FP32, initialized from `config.seed`, converted as `config.activations` says.

    Raises:
        UserError: transformers is missing, or the configuration is not one of a LLaMA over bytes.
    """
    try:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaForCausalLM
    except ImportError as error:
        raise UserError(f"training needs transformers: pip install 'agoq-ext[demo]' ({error})") from error

    entries: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False, **config.model_config}
    kind = entries.pop("model_type", "llama")
    if kind != "llama":
        raise UserError(f"--model {config.model}: model_type must be llama; got {kind!r}")
    entries["attn_implementation"] = "sdpa"
    torch.manual_seed(config.seed)
    try:
        llama_config = LlamaConfig(**entries)
        _check_llama(config, llama_config)
        model: nn.Module = LlamaForCausalLM(llama_config)
    except UserError:
        raise
    except Exception as error:  # transformers validates with exceptions of many kinds
        raise UserError(f"--model {config.model} is not a usable LlamaConfig: {error}") from error
    if config.activations != "none":
        from ..activation import compress_activations

        compress_activations(model, policy=config.activations)
    return model.train()


def _check_llama(config: TrainConfig, llama: Any) -> None:
    if llama.vocab_size < VOCABULARY:
        raise UserError(
            f"--model {config.model}: vocab_size must be at least {VOCABULARY} (one a byte value); "
            f"got {llama.vocab_size}"
        )
    if llama.max_position_embeddings < config.seq:
        raise UserError(
            f"--seq must be at most the model's max_position_embeddings, {llama.max_position_embeddings}; "
            f"got {config.seq}"
        )
    if "head_dim" not in config.model_config and llama.hidden_size % llama.num_attention_heads:
        raise UserError(
            f"--model {config.model}: hidden_size must be a multiple of num_attention_heads, "
            f"{llama.num_attention_heads}; got {llama.hidden_size}"
        )


def loss_inputs(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """What the model is called with so that it returns the mean cross-entropy: int64 [batch, seq] each.

    The targets are already shifted; `labels` only asks for the loss.
    """
    return {"input_ids": inputs, "labels": targets, "shift_labels": targets}


def autocast(precision: str) -> AbstractContextManager[Any]:
    """The context that the forward pass runs in."""
    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW whose weight decay acts on matrices alone: norms and biases are left to the loss."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of optimizer step `step` (0-based): linear warm-up over a tenth, then a cosine down to a tenth."""
    warmup = max(1, min(config.steps // 10, 500))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, config.steps - warmup))
    return config.lr * (MIN_LR_SHARE + (1 - MIN_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress)))
