"""nn.TransformerEncoderLayer, nn.RMSNorm in mapped blocks, tensor-parallel weights, and adapters by peft."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import agoq_ext
from agoq_ext import ActivationPolicy, BlockMap, TensorFormat

INT8 = ActivationPolicy.uniform(TensorFormat("int8", 32))


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True, **options}
    layer = nn.TransformerEncoderLayer(64, 4, 128, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def run(model: nn.Module, x: Tensor, **masks: Any) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x, **masks)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return y.detach(), torch.cat([x.grad.reshape(-1), *(p.grad.reshape(-1) for p in model.parameters())])


def close(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


CAUSAL = torch.triu(torch.ones(7, 7, dtype=torch.bool), 1)
PADDING = torch.arange(7) >= torch.tensor([[7], [5], [6]])
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"mask": CAUSAL, "is_causal": True},
    "float": {"mask": torch.randn(7, 7)},
    "by head": {"mask": torch.randn(12, 7, 7)},
    "padding": {"src_key_padding_mask": PADDING},
    "both": {"mask": CAUSAL, "src_key_padding_mask": PADDING},
}


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu", torch.nn.functional.silu])
@pytest.mark.parametrize("batch_first", [True, False])
def test_values_gradients_and_restoring(norm_first: bool, activation: Any, batch_first: bool) -> None:
    model = encoder(norm_first=norm_first, activation=activation, batch_first=batch_first)
    plain = copy.deepcopy(model)
    report = agoq_ext.compress_activations(model, INT8)
    assert len(report.converted) == 2 and not report.skipped
    x = torch.randn(3, 7, 64) if batch_first else torch.randn(7, 3, 64)
    for name, masks in MASKS.items():
        want, want_gradient = run(plain, x, **masks)
        got, gradient = run(model, x, **masks)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=name)
        error = close(gradient, want_gradient)
        # A ReLU's gradient follows the decoded sign: what was rounded to zero has none.
        assert 1e-4 < error < (0.08 if activation == "relu" else 0.02), f"{name}: {error}"
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    agoq_ext.restore(model)
    assert all(torch.equal(a, b) for a, b in zip(run(model, x), run(plain, x), strict=True))


@pytest.mark.parametrize("norm_first", [True, False])
def test_bytes(norm_first: bool) -> None:
    """U = 3 x 7 x 64 x 4 bytes here: norms, in_proj and linear1, q, k, v, out, and twice U in the MLP."""
    model = encoder(norm_first=norm_first)
    x = torch.randn(3, 7, 64, requires_grad=True)
    before = agoq_ext.activation_report(model, (x,)).total_bytes
    agoq_ext.compress_activations(model, "agoq")
    after = agoq_ext.activation_report(model, (x,)).total_bytes
    assert after < (0.3 if norm_first else 0.35) * before


def test_dropout_hooks_and_autocast() -> None:
    model = encoder(dropout=0.1)
    agoq_ext.compress_activations(model, INT8)
    x = torch.randn(3, 7, 64)
    assert not torch.equal(model(x), model(x)) and torch.equal(model.eval()(x), model(x))
    model.train()(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    seen: list[int] = []
    model.layers[0].linear1.register_forward_hook(lambda *_: seen.append(1))
    model(x).sum().backward()
    assert seen == [1]
    model, plain = encoder(), encoder()
    agoq_ext.compress_activations(model, INT8)
    with torch.autocast("cpu", torch.bfloat16):
        assert close(model(x).float(), plain(x).float()) < 0.01


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=None, dtype=dtype)
        self.a, self.b = (nn.Linear(64, 32, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.a(h) * self.b(h)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_in_mapped_blocks(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Block(dtype)
    plain = copy.deepcopy(model)
    report = agoq_ext.compress_activations(model, INT8, blocks={Block: BlockMap(norms={"norm": ("a", "b")})})
    assert report.converted == {"norm": "norm_input"}
    x = torch.randn(5, 64, dtype=dtype)
    want, want_gradient = run(plain, x)
    got, gradient = run(model, x)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert close(gradient, want_gradient) < 0.02
    kept = agoq_ext.activation_report(model, (x.requires_grad_(),)).by_module.get("norm", 0)
    if dtype == torch.float32:  # one packed input; products of a and b aside
        assert kept == 5 * (64 + 2 * 2)


def check_tensor_parallel(rank: int, world: int) -> str:
    model = encoder()
    mesh = init_device_mesh("cpu", (world,))
    plan = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    agoq_ext.compress_activations(model, INT8)
    x = torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(0))
    try:
        model(x).sum().backward()
    except TypeError as error:
        return str(error)
    return "ran"


def test_tensor_parallel_weights_work_or_are_refused(tmp_path: Path) -> None:
    for message in run_world(tmp_path, 2, check_tensor_parallel):
        assert message == "ran" or ("must be a plain tensor; got a DTensor" in message), message


@pytest.mark.parametrize("convert_first", [True, False])
def test_lora_by_peft(convert_first: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian", lora_dropout=0.0
    )
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))

    def build(convert: bool) -> nn.Module:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        if convert and convert_first:
            agoq_ext.compress_activations(model, INT8)
        torch.manual_seed(2)
        adapted = peft.get_peft_model(model, lora)
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.1)
        if convert and not convert_first:
            agoq_ext.compress_activations(adapted, INT8)
        return adapted

    plain, model = build(False), build(True)
    want, got = (m(input_ids=ids, labels=ids).loss for m in (plain, model))
    torch.testing.assert_close(got, want)
    want.backward()
    got.backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == ("lora" not in name)
        if p.grad is not None:
            assert close(p.grad, q.grad) < 0.05, name
    batch = {"input_ids": ids, "labels": ids}
    before, after = (agoq_ext.activation_report(m, batch).total_bytes for m in (plain, model))
    assert after < 0.75 * before
