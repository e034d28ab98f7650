"""compress_activations on the other decoders in Llama's form: Mistral, Qwen2, Qwen3."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from agoq_ext.activation import activation_report, compress_activations, restore

transformers = pytest.importorskip("transformers")

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 9}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
}
IDS = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(5))
MASK = torch.ones(2, 24, dtype=torch.long)
MASK[0, :5] = 0


def build(family: str, **changes: Any) -> Any:
    config, cls, own = FAMILIES[family]
    torch.manual_seed(0)
    options = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 61,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    model = cls(config(**{**options, **own, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return model


def step(model: Any, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and all gradients in one vector."""
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, **inputs).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_gradients_and_restoring(family, masked):
    inputs = {"attention_mask": MASK} if masked else {}
    model, converted = build(family), build(family)
    loss, exact = step(model, **inputs)
    report = compress_activations(converted)
    assert not report.skipped
    assert {"query, key, value", "norm_input", "gate_up", "attention_output"} == set(
        report.converted.values()
    )
    got_loss, got = step(converted, **inputs)
    assert torch.equal(got_loss, loss)
    assert 0 < (got - exact).norm() < 0.08 * exact.norm()  # measured: 0.03 to 0.066
    kept, plain = (activation_report(m, {"input_ids": IDS, **inputs}).of_layer(1) for m in (converted, model))
    assert kept.total_bytes < 0.25 * plain.total_bytes  # FP32: 5 and 6 bits of 32
    restore(converted)
    assert converted.config._attn_implementation == "sdpa"
    assert all(type(a) is type(b) for a, b in zip(model.modules(), converted.modules(), strict=True))
    assert torch.equal(step(converted, **inputs)[1], exact)


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_and_generation(family):
    model = build(family)
    plain = model.generate(IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False, pad_token_id=0)
    compress_activations(model)
    got = model.generate(IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(got, plain)
    _, expected = step(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(step(twin)[1], expected)


def test_the_attention_implementation_may_change_and_is_reported():
    exact = step(build("llama", attn_implementation="eager"))[1]
    model = build("llama", attn_implementation="eager")
    report = compress_activations(model)
    assert "must be sdpa; it is eager" in report.skipped["model.layers.0.self_attn"]
    assert (step(model)[1] - exact).norm() < 0.05 * exact.norm()
    model = build("llama")
    compress_activations(model)
    model.set_attn_implementation("eager")
    assert (step(model)[1] - exact).norm() < 0.05 * exact.norm()
    restore(model)
    assert model.config._attn_implementation == "eager"


def test_saved_checkpoints_do_not_name_the_implementation(tmp_path):
    model = build("qwen3")
    compress_activations(model)
    model.save_pretrained(tmp_path)
    assert "agoq" not in (tmp_path / "config.json").read_text()
    loaded = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_dropout_in_attention_is_left_to_pytorch():
    model, converted = (build("llama", attention_dropout=0.3).train() for _ in range(2))
    compress_activations(converted)
    losses = []
    for m in (model, converted):
        torch.manual_seed(1)
        losses.append(step(m)[0])
    assert torch.equal(*losses)


# --- the loss without the logits -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chunked_loss(family):
    plain, model = build(family).train(), build(family).train()
    report = compress_activations(model, "off", chunked_loss=True)
    assert report.converted == {"": "chunked_loss"}
    shifted = torch.nn.functional.pad(IDS[:, 1:], (0, 1), value=-100)
    for extra in (
        {},
        {"num_items_in_batch": torch.tensor(30)},
        {"shift_labels": shifted},
        {"attention_mask": MASK},
    ):
        results = []
        for m in (plain, model):
            m.zero_grad()
            out = m(input_ids=IDS, labels=IDS, **extra)
            out.loss.backward()
            results.append((out.loss, torch.cat([p.grad.flatten() for p in m.parameters()])))
            assert (out.logits is None) == (m is model)
        (loss, exact), (got_loss, got) = results
        torch.testing.assert_close(got_loss, loss)
        assert (got - exact).norm() < 1e-5 * exact.norm()
    restore(model)
    assert type(model) is type(plain)


def test_a_chunked_loss_gives_way_where_logits_are_wanted():
    plain, model = build("llama").train(), build("llama").train()
    compress_activations(model, "off", chunked_loss=True)
    for inputs in (
        {"input_ids": IDS},
        {"input_ids": IDS, "labels": IDS, "logits_to_keep": 24},
        {"input_ids": IDS, "labels": IDS, "return_dict": False},
    ):
        expected, got = (m(**inputs) for m in (plain, model))
        for key in range(2 if "labels" in inputs else 1):
            assert torch.equal(got[key], expected[key])
    handle = model.lm_head.register_forward_hook(lambda module, args, out: out * 2)
    assert model(input_ids=IDS, labels=IDS).logits is not None
    handle.remove()
    with torch.no_grad():
        assert model(input_ids=IDS, labels=IDS).logits is not None
    model.eval()
    assert model(input_ids=IDS, labels=IDS).logits is not None
    got = model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(got, plain.eval().generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0))
    model.train()
    hidden = model(input_ids=IDS, labels=IDS, output_hidden_states=True)
    assert hidden.logits is None and len(hidden.hidden_states) == 3
