"""compress_activations on transformers' Llama: values, gradients, checkpoints, and everything around them."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from agoq_ext.activation import (
    ActivationPolicy,
    TensorFormat,
    activation_report,
    compress_activations,
    restore,
)

transformers = pytest.importorskip("transformers")

VOCABULARY = 61
QKV_AND_FFN1 = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A Llama with grouped-query attention, two layers and random norm weights."""
    torch.manual_seed(seed)
    options = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "attention_bias": True,
        "use_cache": False,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**options, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
            else:
                parameter.mul_(3)
    return model.to(dtype)


def ids(batch: int = 2, length: int = 24) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(5))


def loss_and_gradients(model: Any, cast: torch.dtype | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    with torch.autocast("cpu", cast) if cast else contextlib.nullcontext():
        loss = model(input_ids=ids(), labels=ids()).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def relative_error(got: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Norm of the difference of all gradients over their norm."""
    assert got.keys() == exact.keys()
    difference = sum((got[n].double() - exact[n].double()).square().sum() for n in exact)
    return float((difference / sum(g.double().square().sum() for g in exact.values())).sqrt())


# --- values and gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "cast"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)],
    ids=["fp32", "bf16", "autocast"],
)
def test_forward_is_equal_and_the_gradient_error_is_that_of_the_format(dtype, cast):
    """Measured on four seeds: 0.057 to 0.080 for "paper", 0.003 to 0.006 for int8 in groups of 32."""
    exact_loss, exact = loss_and_gradients(llama(dtype=dtype), cast)
    int8 = TensorFormat("int8", 32, "float32")
    for policy, bound in (("paper", 0.10), (ActivationPolicy.uniform(int8), 0.01)):
        model = llama(dtype=dtype)
        compress_activations(model, policy)
        loss, gradients = loss_and_gradients(model, cast)
        assert torch.equal(loss, exact_loss)
        assert 0 < relative_error(gradients, exact) < bound
        for name, gradient in gradients.items():
            assert gradient.dtype == exact[name].dtype


def test_eval_and_training_logits_are_equal():
    model, converted = llama(), llama()
    compress_activations(converted)
    for mode in (True, False):
        model.train(mode), converted.train(mode)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                assert torch.equal(model(input_ids=ids()).logits, converted(input_ids=ids()).logits)


def test_an_attention_mask_and_eager_attention():
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :5] = 0
    for implementation in ("sdpa", "eager"):
        model, converted = (llama(attn_implementation=implementation) for _ in range(2))
        compress_activations(converted)
        options = {"input_ids": ids(), "attention_mask": mask, "labels": ids()}
        assert torch.equal(model(**options).logits, converted(**options).logits)
        converted(**options).loss.backward()
        assert all(p.grad.isfinite().all() for p in converted.parameters())


def test_hidden_states_and_attentions_can_be_collected_and_compression_stays():
    model, converted = llama(attn_implementation="eager"), llama(attn_implementation="eager")
    compress_activations(converted)
    before = activation_report(converted, {"input_ids": ids()}).total_bytes
    options = {"input_ids": ids(), "output_hidden_states": True, "output_attentions": True}
    plain, got = model(**options), converted(**options)
    assert all(map(torch.equal, plain.hidden_states, got.hidden_states))
    assert all(map(torch.equal, plain.attentions, got.attentions))
    assert activation_report(converted, {"input_ids": ids()}).total_bytes == before


@pytest.mark.parametrize("training", [True, False])
def test_generation_with_a_cache(training):
    model, converted = llama(), llama()
    compress_activations(converted)
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    for m in (model, converted):
        m.train(training)
    assert torch.equal(model.generate(ids(), **options), converted.generate(ids(), **options))
    cached = [m(input_ids=ids(), use_cache=True) for m in (model, converted)]  # with gradients
    assert torch.equal(cached[0].logits, cached[1].logits)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=["fp32", "autocast"])
def test_under_transformers_own_checkpointing(reentrant, cast):
    model = llama()
    compress_activations(model)
    model.train()
    _, expected = loss_and_gradients(model, cast)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers renamed it
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    saved = activation_report(model, {"input_ids": ids()}).saved
    assert not any(s.dtype == "uint8" for s in saved if ".layers." in s.module)
    _, gradients = loss_and_gradients(model, cast)
    assert all(torch.equal(gradients[n], expected[n]) for n in expected)


def test_gradient_accumulation_adds_up():
    model = llama()
    compress_activations(model)
    _, once = loss_and_gradients(model)
    model(input_ids=ids(), labels=ids()).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name])


def test_compiles_in_one_graph():
    model = llama(num_hidden_layers=1)
    compress_activations(model)
    loss, expected = loss_and_gradients(model)
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    compiled_loss, gradients = loss_and_gradients(model)
    assert torch.equal(compiled_loss, loss)
    assert relative_error(gradients, expected) < 1e-6


@pytest.fixture
def lone_rank(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_under_data_parallel_wrappers(lone_rank):
    """DDP and FSDP2 (by layer), the conversion before and after: the gradients of the bare converted model."""
    bare = llama()
    compress_activations(bare)
    loss, expected = loss_and_gradients(bare)
    kept = activation_report(bare, {"input_ids": ids()}).by_operator
    for wrapper in ("ddp", "fsdp2"):
        for convert_first in (True, False):
            model = inner = llama()
            if convert_first:
                compress_activations(model)
            if wrapper == "ddp":
                model = nn.parallel.DistributedDataParallel(model)
            else:
                for layer in model.model.layers:
                    fully_shard(layer)
                fully_shard(model)
            if not convert_first:
                compress_activations(model)
            got = model(input_ids=ids(), labels=ids()).loss
            got.backward()
            assert torch.equal(got, loss)
            for name, parameter in inner.named_parameters():
                gradient = parameter.grad
                gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                assert torch.equal(gradient, expected[name]), (wrapper, name)
            assert activation_report(model, {"input_ids": ids()}).by_operator == kept


def test_double_backward_is_refused():
    model = llama()
    compress_activations(model)
    loss = model(input_ids=ids(), labels=ids()).loss
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


# --- what is kept --------------------------------------------------------------------------------------------


def kept_in_layer(model: Any, index: int = 1) -> dict[str, int]:
    """Bytes by operator of a layer, by default the second (the first also holds the rotary tables)."""
    return activation_report(model, {"input_ids": ids()}).of_layer(index).by_operator


@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=["bf16", "autocast"])
def test_kept_bytes_are_codes_and_scales(cast):
    tokens, hidden, width, kv = 48, 64, 160, 32

    def nf4(columns: int) -> int:
        return tokens * (columns // 2 + 2 * -(-columns // 64))

    model = llama(dtype=torch.float32 if cast else torch.bfloat16)
    compress_activations(model, "paper")
    with torch.autocast("cpu", cast) if cast else contextlib.nullcontext():
        kept = kept_in_layer(model)
    attention = tokens * 2 * (2 * hidden + 2 * kv) + 4 * tokens * 4  # q, out, k, v; FP32 log-sum-exp a head
    assert kept == {
        "norm": 2 * nf4(hidden),
        "attention": attention,
        "output projection": nf4(hidden),
        "mlp": 2 * nf4(width),
    }


def test_attention_and_the_output_projection_share_one_stored_copy():
    tokens, hidden, width, kv = 48, 64, 160, 32
    for name in ("agoq", "lean"):
        policy = ActivationPolicy.named(name)
        model = llama(dtype=torch.bfloat16)
        compress_activations(model, policy)
        parts = [policy.stored(kind) for kind in ("query", "key", "value", "attention_output")]
        columns = (hidden, kv, kv, hidden)
        attention = sum(f.nbytes((tokens, c)) for f, c in zip(parts, columns, strict=True) if f)
        assert kept_in_layer(model) == {
            "norm": 2 * policy.norm_input.nbytes((tokens, hidden)),
            "attention": attention + 4 * tokens * 4,  # and the log-sum-exp
            "mlp": 2 * policy.gate_up.nbytes((tokens, width)),
        }


def test_each_part_of_the_policy_alone():
    plain = kept_in_layer(llama(dtype=torch.bfloat16))
    saving = {
        "norm_input": {"norm", "qkv", "gate and up projection"},
        "attention_output": set(),  # attention itself keeps its output in full
        "gate_up": {"mlp", "down projection"},
        "mlp_input": set(),  # nothing unless the MLP is converted
    }
    for kind, operators in saving.items():
        model = llama(dtype=torch.bfloat16)
        report = compress_activations(model, ActivationPolicy(**{kind: TensorFormat()}))
        assert set(report.converted.values()) == ({kind} if kind != "mlp_input" else set())
        kept = kept_in_layer(model)
        assert {o for o in plain if kept.get(o, 0) < plain[o]} == operators
        exact_loss, exact = loss_and_gradients(llama(dtype=torch.bfloat16))
        loss, gradients = loss_and_gradients(model)
        assert torch.equal(loss, exact_loss)
        assert relative_error(gradients, exact) < 0.10


def test_frozen_layers_keep_only_what_their_inputs_gradient_reads():
    model = llama(dtype=torch.bfloat16)
    compress_activations(model)
    trained = kept_in_layer(model)
    model.requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    kept = kept_in_layer(model)
    assert "output projection" not in kept
    assert kept == {o: n for o, n in trained.items() if o != "output projection"}
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert kept_in_layer(model) == {}


# --- adapters and hooks --------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A low-rank adapter around a frozen linear layer, as adapter libraries put in its place."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(7)
        self.down = nn.Parameter(0.1 * torch.randn(4, base.in_features, generator=generator))
        self.up = nn.Parameter(0.1 * torch.randn(base.out_features, 4, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def adapt(model: Any, *names: str) -> Any:
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in names:
            parent = layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp
            setattr(parent, name, Adapter(getattr(parent, name)))
    return model


@pytest.mark.parametrize("name", ["q_proj", "o_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("convert_first", [True, False])
def test_adapters_before_or_after_the_conversion(name, convert_first):
    exact_loss, exact = loss_and_gradients(adapt(llama(), name))
    model = llama()
    if convert_first:
        compress_activations(model)
        adapt(model, name)
    else:
        report = compress_activations(adapt(model, name))
        assert bool(report.skipped) == (name != "down_proj")
        assert all("Adapter" in reason for reason in report.skipped.values())
    loss, gradients = loss_and_gradients(model)
    assert torch.equal(loss, exact_loss)
    assert len(gradients) == 4
    assert relative_error(gradients, exact) < 0.15


def test_hooks_see_tensors_as_before():
    model, converted = llama(), llama()
    compress_activations(converted)
    layer = "model.layers.0."
    targets = ["input_layernorm", "self_attn.k_proj", "mlp", "mlp.up_proj", "post_attention_layernorm"]
    for target in targets:
        seen: list[list[Any]] = [[], []]
        for m, log in zip((model, converted), seen, strict=True):
            module = m.get_submodule(layer + target)
            handles = [
                module.register_forward_hook(lambda _, args, out, log=log: log.extend([args[0], out])),
                module.register_forward_pre_hook(lambda _, args, log=log: log.append(args[0])),
            ]
            loss_and_gradients(m)
            for handle in handles:
                handle.remove()
        assert all(map(torch.equal, *seen)), target
        gradients: list[Tensor] = []
        handle = converted.get_submodule(layer + target).register_full_backward_hook(
            lambda _, into, out, gradients=gradients: gradients.extend([into[0], out[0]])
        )
        loss_and_gradients(converted)
        handle.remove()
        assert all(isinstance(g, Tensor) and g.isfinite().all() for g in gradients) and len(gradients) == 2
    _, gradients_after = loss_and_gradients(converted)
    fresh = llama()
    compress_activations(fresh)
    assert all(map(torch.equal, gradients_after.values(), loss_and_gradients(fresh)[1].values()))


def test_attention_hooks_that_see_keywords_get_the_hidden_states():
    model = llama()
    compress_activations(model)
    seen: list[Any] = []
    attention = model.model.layers[0].self_attn
    attention.register_forward_hook(
        lambda _, args, kwargs, out: seen.append(kwargs["hidden_states"]), with_kwargs=True
    )
    loss_and_gradients(model)
    assert isinstance(seen[0], Tensor)


def test_a_hooked_norm_leaves_the_mlp_input_to_the_mlp():
    """mlp_input: where the norm cannot compute the projections, the MLP keeps their input once, quantized."""
    model = llama(dtype=torch.bfloat16)
    compress_activations(model)
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_hook(lambda *_: None)
    kept = activation_report(model, {"input_ids": ids()}).of_layer(1)
    assert "gate and up projection" not in kept.by_operator
    assert sum(s.dtype == "uint8" for s in kept.saved if s.operator == "mlp") == 3
    exact_loss, exact = loss_and_gradients(llama(dtype=torch.bfloat16))
    loss, gradients = loss_and_gradients(model)
    assert torch.equal(loss, exact_loss)
    assert relative_error(gradients, exact) < 0.10


def test_a_patched_forward_is_respected():
    model = llama()
    compress_activations(model)
    projection = model.model.layers[0].self_attn.v_proj
    projection.forward = lambda x: torch.zeros(*x.shape[:-1], projection.out_features)
    _, gradients = loss_and_gradients(model)
    assert "model.layers.0.self_attn.v_proj.weight" not in gradients
    projection.forward = type(projection).forward.__get__(projection)  # as it was
    _, gradients = loss_and_gradients(model)
    fresh = llama()
    compress_activations(fresh)
    assert all(map(torch.equal, gradients.values(), loss_and_gradients(fresh)[1].values()))
    assert kept_in_layer(model, 0) == kept_in_layer(fresh, 0)


# --- names, checkpoints, restoring ---------------------------------------------------------------------------


def test_names_and_checkpoints_both_ways(tmp_path):
    model, converted = llama(seed=1), llama(seed=2)
    compress_activations(converted)
    assert [n for n, _ in converted.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in converted.named_modules()] == [n for n, _ in model.named_modules()]
    assert converted.state_dict().keys() == model.state_dict().keys()
    converted.load_state_dict(model.state_dict())
    expected = model(input_ids=ids()).logits
    assert torch.equal(converted(input_ids=ids()).logits, expected)
    converted.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(input_ids=ids()).logits, expected)
    compress_activations(loaded)
    assert torch.equal(loaded(input_ids=ids()).logits, expected)


def test_copies_are_independent():
    """A deep copy and a pickled copy are converted models of their own: their norms read their own projections."""
    model = llama()
    compress_activations(model)
    _, expected = loss_and_gradients(model)
    model.zero_grad()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss, gradients = loss_and_gradients(twin)
        assert all(torch.equal(gradients[n], expected[n]) for n in expected)
        assert all(p.grad is None for p in model.parameters())
        restore(twin)
        assert type(twin.model.norm) is type(llama().model.norm)


def test_restore_undoes_everything():
    fresh = llama()
    model = llama()
    compress_activations(model)
    restore(model)
    for (name, module), original in zip(model.named_modules(), fresh.modules(), strict=True):
        assert type(module) is type(original), name
        assert vars(module).keys() == vars(original).keys(), name
    _, gradients = loss_and_gradients(model)
    _, exact = loss_and_gradients(fresh)
    assert all(torch.equal(gradients[n], exact[n]) for n in exact)
    restore(model)  # nothing to do
    compress_activations(model)  # and again


def test_the_report_says_what_was_converted():
    model = llama()
    report = compress_activations(model)
    assert report.policy == ActivationPolicy.named("agoq")
    assert not report.skipped
    assert report.converted["model.norm"] == "norm_input"
    assert report.converted["model.layers.1.mlp"] == "gate_up"
    assert "5 x norm_input, 2 x query, key, value, 2 x attention_output, 2 x gate_up" in str(report)


def test_off_changes_nothing():
    model = llama()
    types = [type(m) for m in model.modules()]
    assert str(compress_activations(model, "off")) == "stored quantized: nothing"
    assert [type(m) for m in model.modules()] == types


def test_a_body_or_a_wrapper_is_converted_too():
    body = llama().model
    assert compress_activations(body).converted["layers.0.mlp"] == "gate_up"
    wrapper = nn.ModuleDict({"inner": llama()})
    assert compress_activations(wrapper).converted["inner.model.norm"] == "norm_input"


def test_another_activation_function_is_reported_and_left():
    exact_loss, exact = loss_and_gradients(llama(hidden_act="gelu"))
    model = llama(hidden_act="gelu")
    report = compress_activations(model)
    assert "activation must be SiLU; it is GELUActivation" in report.skipped["model.layers.0.mlp"]
    loss, gradients = loss_and_gradients(model)
    assert torch.equal(loss, exact_loss)
    assert relative_error(gradients, exact) < 0.10


def test_what_cannot_be_converted_is_named():
    with pytest.raises(TypeError, match=r"model must be a Llama, .* model of transformers or .*; got Linear"):
        compress_activations(nn.Linear(2, 2))
    model = llama()
    with pytest.raises(
        ValueError, match=r"policy must be one of agoq, paper, lean, off or an ActivationPolicy; got 'thin'"
    ):
        compress_activations(model, "thin")
    with pytest.raises(TypeError, match="policy must be a name or an ActivationPolicy; got int"):
        compress_activations(model, 4)
    compress_activations(model)
    with pytest.raises(ValueError, match=r"must not be converted already; call restore\(model\) first"):
        compress_activations(model)
    norm = model.model.norm
    norm.__class__ = type("Wrapped", (type(norm),), {})
    with pytest.raises(ValueError, match=r"restore: model.norm must not be wrapped .*; got Wrapped"):
        restore(model)
