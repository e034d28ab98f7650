"""Blocks that are not in Llama's form: GPT-2, and a module tree of one's own with a few lines of mapping."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agoq_ext.activation import (
    ActivationPolicy,
    BlockMap,
    TensorFormat,
    activation_report,
    compress_activations,
    restore,
)

transformers = pytest.importorskip("transformers")

INT6 = ActivationPolicy.uniform(TensorFormat("int6"))
IDS = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(5))
TOKENS, HIDDEN = 48, 64


def gpt2(**changes: Any) -> Any:
    torch.manual_seed(0)
    options = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 64}
    options |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "use_cache": False}
    options |= {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**options, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1).add_(0.1 * torch.randn(parameter.shape))
    return model


class PlainBlock(nn.Module):
    """A pre-norm block with attention of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        n = self.ln1(x)
        q, k, v = (p(n).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln2(x))


BLOCKS = {
    PlainBlock: BlockMap(
        norms={"ln1": ("q", "k", "v"), "ln2": ("mlp.0",)},
        activations={"mlp.1": "mlp.2"},
        linears={"out": "attention_output"},
    )
}


Output = namedtuple("Output", "loss logits")


class Plain(nn.Module):
    """An embedding, two blocks and a head; called and answering as GPT-2 is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(61, HIDDEN), nn.Linear(HIDDEN, 61)
        self.blocks = nn.ModuleList([PlainBlock(), PlainBlock()])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return Output(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def step(model: Any, cast: bool = False) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def convert(model: Any, policy: Any = INT6) -> Any:
    report = compress_activations(model, policy, blocks=BLOCKS)
    assert not report.skipped
    return report


@pytest.mark.parametrize("build", [gpt2, Plain])
@pytest.mark.parametrize("cast", [False, True], ids=["fp32", "autocast"])
def test_values_gradients_and_restoring(build, cast):
    model, converted = build(), build()
    loss, exact = step(model, cast)
    report = convert(converted)
    kinds = {"norm_input", "attention_output", "gelu_input"}
    assert set(report.converted.values()) == kinds | ({"query, key, value"} if build is gpt2 else set())
    got_loss, got = step(converted, cast)
    assert torch.equal(got_loss, loss)
    assert 0 < (got - exact).norm() < 0.06 * exact.norm()
    assert converted.state_dict().keys() == model.state_dict().keys()
    for twin in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert torch.equal(step(twin, cast)[1], got)
    restore(converted)
    for a, b in zip(model.modules(), converted.modules(), strict=True):
        assert type(a) is type(b) and vars(a).keys() == vars(b).keys()
    assert torch.equal(step(converted, cast)[1], exact)


@pytest.mark.parametrize("build", [gpt2, Plain])
def test_what_is_kept(build):
    model = build().bfloat16()
    convert(model)
    inputs = {"input_ids": IDS, "labels": IDS}
    stored = TensorFormat("int6")
    hidden, wide = (stored.nbytes((TOKENS, n)) for n in (HIDDEN, 4 * HIDDEN))
    lse = TOKENS * 4 * 4
    report = activation_report(model, inputs).of_layer(1)
    if build is gpt2:  # norms; q, k, v, out; the GELU's input
        assert report.total_bytes == 2 * hidden + 4 * hidden + lse + wide
    else:  # the attention of one's own keeps q, k, v and out as they are
        assert report.total_bytes == 2 * hidden + hidden + 4 * TOKENS * HIDDEN * 2 + lse + wide
    plain = activation_report(build().bfloat16(), inputs).of_layer(1)
    assert report.total_bytes < 0.5 * plain.total_bytes


def test_gpt2_generates_compiles_and_takes_a_mask():
    plain, model = gpt2(), gpt2()
    convert(model)
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :5] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    assert torch.equal(plain.generate(IDS, **options), model.generate(IDS, **options))
    inputs = {"input_ids": IDS, "attention_mask": mask}
    assert torch.equal(plain(**inputs).logits, model(**inputs).logits)
    _, expected = step(model)
    torch._dynamo.reset()
    model.transformer.compile(backend="aot_eager", fullgraph=True)  # the loss function logs
    _, got = step(model)
    assert (got - expected).norm() < 1e-5 * expected.norm()


def test_gpt2_with_dropout_and_checkpointing():
    model, exact = gpt2(attn_pdrop=0.2, resid_pdrop=0.2), gpt2(attn_pdrop=0.2, resid_pdrop=0.2)
    convert(model)
    losses = []
    for m in (model, exact):
        m.train()
        torch.manual_seed(3)
        losses.append(step(m)[0])
    assert torch.equal(*losses)
    model = gpt2()
    convert(model)
    model.train()
    _, expected = step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers renamed it
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(step(model)[1], expected)


@pytest.mark.parametrize("target", ["ln1", "q", "out", "mlp", "mlp.0", "mlp.1", "mlp.2"])
def test_hooks_see_tensors_as_before(target):
    model, converted = Plain(), Plain()
    convert(converted)
    seen: list[list[Any]] = [[], []]
    for m, log in zip((model, converted), seen, strict=True):
        module = m.get_submodule(f"blocks.0.{target}")
        module.register_forward_hook(lambda _, args, out, log=log: log.extend([args[0], out]))
        step(m)
    assert all(isinstance(t, Tensor) for t in seen[1]) and all(map(torch.equal, *seen))


def test_another_layer_in_the_place_of_a_reader():
    """As adapters do, before the conversion and after it."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) * 2

    results = []
    for when in ("never", "before", "after"):
        model = Plain()
        if when == "after":
            convert(model)
        for block in model.blocks:
            block.q = Adapter(block.q)
            block.mlp[2] = Adapter(block.mlp[2])
        if when == "before":
            report = compress_activations(model, INT6, blocks=BLOCKS)
            assert "must be a linear layer" in report.skipped["blocks.0.q"]
        results.append(step(model))
    (loss, exact), *others = results
    for got_loss, got in others:
        assert torch.equal(got_loss, loss)
        assert (got - exact).norm() < 0.06 * exact.norm()


def test_policies_and_reasons():
    model = Plain()
    report = compress_activations(model, ActivationPolicy(norm_input=TensorFormat()), blocks=BLOCKS)
    assert set(report.converted.values()) == {"norm_input"}
    model = Plain()
    model.blocks[0].mlp[1] = nn.ReLU()
    model.blocks[1].ln1 = nn.Identity()
    report = compress_activations(model, "agoq", blocks=BLOCKS)
    assert "the activation must be GELU or SiLU; it is torch.nn" in report.skipped["blocks.0.mlp.1"]
    assert "must be a LayerNorm or nn.RMSNorm over the last dimension" in report.skipped["blocks.1.ln1"]
    step(model)
    with pytest.raises(TypeError, match="or `blocks` must map its blocks; got Plain"):
        compress_activations(Plain())
    with pytest.raises(ValueError, match="linears must name kinds of norm_input, .*; got 'out'"):
        BlockMap(linears={"out": "out"})
