"""compress_saved_tensors: what is compressed, once, and what never is; gradients; and everything around it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from agoq_ext.activation import ActivationPolicy, Override, TensorFormat, compress_saved_tensors
from agoq_ext.tensor import quantize

INT8 = ActivationPolicy.uniform(TensorFormat("int8"))


def tensor(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_(grad)


def run(
    function: Callable[..., Tensor], *inputs: Tensor, policy: Any = INT8, **options: Any
) -> tuple[compress_saved_tensors, tuple[Tensor, ...]]:
    """The context, and the gradients of what `function` returns, weighted."""
    with compress_saved_tensors(policy, **options) as context:
        loss = weighted(function(*inputs))
    return context, torch.autograd.grad(loss, [x for x in inputs if x.requires_grad])


def weighted(out: Tensor) -> Tensor:
    """A scalar whose gradient differs from element to element."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    return (out.float() * weights).sum() if out.dim() else out


def decoded(x: Tensor) -> Tensor:
    """x as it comes back: one row in the order in which it lies in memory."""
    return quantize(x.detach().reshape(-1), "int8", 64).dequantize().view(x.shape)


def test_gradients_are_those_of_the_decoded_tensors():
    x = tensor(64, 48)
    with compress_saved_tensors(INT8) as context:
        y = torch.sin(x)
    assert context.report.storages == 1
    got = torch.autograd.grad(y.sum(), x)[0]
    assert torch.equal(got, torch.cos(decoded(x)))
    assert not torch.equal(got, torch.cos(x))


def test_a_storage_is_compressed_once_whatever_its_views():
    x = tensor(4, 32, 64)
    weight = nn.Parameter(tensor(64, 64, seed=1).detach())

    with compress_saved_tensors(INT8) as context:
        y = x * 1.0
        kept = (y.sin(), y.view(-1, 64).cos(), y.transpose(0, 1).tanh(), F.linear(y, weight), y[1:].sin())
    report = context.report
    # y, what tanh returns, and the part of y that is no whole storage; of them y is read by sin, cos and linear.
    assert (report.storages, report.tensors) == (3, 5)
    assert report.original_bytes == 2 * x.nbytes + x.nbytes * 3 // 4
    assert report.left.total() == 1  # the weight, or a transpose of it
    assert len(kept) == 5 and "3 storages of 5 saved tensors" in str(report)


def test_views_come_back_as_they_were():
    x = tensor(6, 64, 32)
    cases = [
        lambda y: y.transpose(0, 2).sin(),
        lambda y: y.permute(1, 2, 0).flip(0).sin(),
        lambda y: y[1:4].sin(),
        lambda y: y[:, ::2].sin(),
        lambda y: y.expand(2, 6, 64, 32).sin(),
        lambda y: y.split(16, dim=1)[2].sin(),
        lambda y: (y.t() if y.dim() == 2 else y.flatten(0, 1).t()).sin(),
    ]
    for case in cases:
        context, (got,) = run(case, x)
        assert context.report.storages >= 1
        exact = torch.autograd.grad(weighted(case(x)), x)[0]
        assert 0 < (got - exact).norm() < 0.02 * exact.norm()


def test_what_is_changed_between_two_saves_is_stored_twice():
    x = tensor(64, 64)
    with compress_saved_tensors(INT8) as context:
        y = x * 1.0
        first = y.sin()
        y.mul_(2.0)
        second = y.sin()
    assert context.report.storages == 2
    got = torch.autograd.grad((first + second).sum(), x)[0]
    torch.testing.assert_close(got, x.cos() + 2 * (2 * x).cos(), rtol=0, atol=0.1)


# --- what is never compressed --------------------------------------------------------------------------------


def test_parameters_buffers_and_autocast_copies_are_left_alone():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
            self.register_buffer("table", torch.linspace(1, 2, 64 * 64).view(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x) * self.table)

    torch.manual_seed(0)
    model, x = Model(), tensor(64, 64)
    for cast in (False, True):
        seen: list[Any] = []

        class Watch(compress_saved_tensors):
            def _pack(self, x: Tensor, seen: list[Any] = seen) -> Any:
                got = super()._pack(x)
                seen.append((x, isinstance(got, Tensor)))
                return got

        with Watch(INT8), torch.autocast("cpu", torch.bfloat16, enabled=cast):
            model(x)
        weights = [model.one.weight, model.two.weight, model.table]
        for saved, left in seen:
            same = any(
                saved.shape == w.shape
                and torch.equal(saved.float(), w.to(saved.dtype).float())
                or torch.equal(saved.float(), w.t().to(saved.dtype).float())
                for w in weights
            )
            assert left == same
        assert sum(not left for _, left in seen) == 2  # the inputs of both layers


def test_frozen_weights_and_their_copies_are_left_alone():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    x = tensor(64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        context, (got,) = run(model, x)
    assert context.report.storages == 0
    assert context.report.left["requires no gradient"] >= 2
    assert got.isfinite().all()


def test_masks_log_sum_exp_integers_and_statistics_are_left_alone():
    q = tensor(2, 4, 64, 32)
    mask = torch.zeros(2, 1, 64, 64).masked_fill(torch.ones(64, 64).triu(1).bool(), float("-inf"))
    context, (got,) = run(lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=mask), q)
    exact = torch.autograd.grad(weighted(F.scaled_dot_product_attention(q, q, q, attn_mask=mask)), q)[0]
    assert got.isfinite().all() and 0 < (got - exact).norm() < 0.03 * exact.norm()
    assert context.report.left["requires no gradient"] >= 2  # mask and log-sum-exp
    for function in (
        lambda q: F.layer_norm(q, (32,)),
        lambda q: F.embedding(torch.arange(64), q.flatten(0, 2)),
        lambda q: F.dropout(q, 0.5),
        lambda q: F.max_pool2d(q, 2),
    ):
        torch.manual_seed(0)
        context, (got,) = run(function, q)
        torch.manual_seed(0)
        exact = torch.autograd.grad(weighted(function(q)), q)[0]
        assert (got - exact).norm() < 0.03 * exact.norm()


def test_probabilities_stay_exact():
    x = tensor(64, 64)
    target = torch.arange(64)
    for function in (lambda x: F.cross_entropy(x, target), lambda x: F.softmax(x * 1.0, -1)[:, 0].sum()):
        context, (got,) = run(function, x)
        assert torch.equal(got, torch.autograd.grad(function(x), x)[0])
        assert context.report.left["probabilities"] >= 1


def test_small_tensors_and_subclasses_are_left_alone():
    class Tagged(Tensor):
        pass

    context, _ = run(torch.sin, tensor(31, 33))
    assert context.report.left["small"] >= 1 and context.report.storages == 0
    context, _ = run(torch.sin, tensor(31, 33), min_elements=1000)
    assert context.report.storages == 1
    context, _ = run(torch.sin, tensor(2048, 1))
    assert context.report.storages == 0
    tagged = tensor(64, 64).detach().as_subclass(Tagged).requires_grad_()
    with compress_saved_tensors(INT8) as context:
        out = torch.sin(tagged)
    assert isinstance(out, Tagged) and context.report.left["a subclass or a sparse tensor"] == 1
    assert torch.equal(torch.autograd.grad(out.sum(), tagged)[0], torch.cos(tagged))


def test_a_relu_knows_which_outputs_were_positive():
    x = tensor(64, 100)
    with torch.no_grad():
        x[:, ::7] *= 1e-6
    for format in ("int8", "nf4"):
        policy = ActivationPolicy.uniform(TensorFormat(format))
        with compress_saved_tensors(policy) as context:
            y = F.relu(x * 1.0)
        assert context.report.storages == 1
        got = torch.autograd.grad(y.sum(), x)[0]
        assert torch.equal(got, (x > 0).float())
        assert context.report.stored_bytes == quantize(x.detach().view(-1), format, 64).nbytes + 800


# --- everything around ---------------------------------------------------------------------------------------


def test_codes_live_as_long_as_the_graph_and_originals_do_not():
    x = tensor(64, 64)
    with compress_saved_tensors(INT8) as context:
        y = x * 1.0
        watched = weakref.ref(y.untyped_storage())
        original = y.data_ptr()
        out = y.sin().sin()
    del y
    gc.disable()
    try:
        assert len(context._entries) == 2
        assert original and watched() is None
        out.sum().backward()
        assert len(context._entries) == 0
    finally:
        gc.enable()


def test_outputs_that_are_left_alone_do_not_leak():
    x = tensor(64, 64)
    with compress_saved_tensors(INT8):
        out = F.softmax(x, -1)
    watched = weakref.ref(out)
    gc.disable()
    try:
        del out
        assert watched() is None
    finally:
        gc.enable()


def test_the_policy_by_the_running_module():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(64)
            self.mlp = nn.Sequential(nn.Linear(64, 64), nn.GELU())
            self.last = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.mlp(self.norm(x)))

    torch.manual_seed(0)
    model, x = Model(), tensor(64, 64)
    four, eight = TensorFormat("nf4"), TensorFormat("int8")
    sizes = {f: quantize(x.detach().view(1, -1), f.format, 64).nbytes for f in (four, eight)}
    policy = ActivationPolicy(norm_input=eight, mlp_input=four)
    with compress_saved_tensors(policy, model) as context:
        model(x)
    # The norm's input; the inputs of both linear layers and of the GELU.
    assert context.report.stored_bytes == sizes[eight] + 3 * sizes[four]
    policy = ActivationPolicy(norm_input=eight, mlp_input=four, overrides=(Override(None, name="mlp.*"),))
    with compress_saved_tensors(policy, model) as context:
        model(x)
    assert context.report.left["the policy"] == 2
    assert context.report.stored_bytes == sizes[eight] + sizes[four]
    with compress_saved_tensors("off", model) as context:
        out = model(x)
    assert context.report.storages == 0
    exact = torch.autograd.grad(model(x).square().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(out.square().sum(), x)[0], exact)
    assert not nn.modules.module._global_forward_hooks


def test_double_backward_is_refused_and_checkpointing_keeps_its_own():
    x = tensor(64, 64)
    with compress_saved_tensors(INT8):
        y = x.sin()
    with pytest.raises(RuntimeError, match="compress_saved_tensors: double backward is not supported"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with compress_saved_tensors(INT8) as context:
        y = checkpoint(lambda x: x.sin().sin(), x, use_reentrant=False)
    assert context.report.storages == 1  # the region's input
    again = decoded(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], again.sin().cos() * again.cos())


def test_an_exception_leaves_nothing_behind_and_contexts_nest():
    model, x = nn.Linear(64, 64), tensor(64, 64)
    with pytest.raises(LookupError), compress_saved_tensors(INT8, model):
        raise LookupError
    assert not nn.modules.module._global_forward_hooks
    context = compress_saved_tensors(INT8, model)
    with context, context:
        model(x)
    assert context.report.storages == 1 and not nn.modules.module._global_forward_hooks
    with pytest.raises(ValueError, match="compress_saved_tensors: policy must be one of"):
        compress_saved_tensors("thin")


def test_a_nan_stays_visible():
    x = tensor(64, 64)
    with torch.no_grad():
        x[3, 3] = float("nan")
    assert run(torch.sin, x)[1][0].isnan().any()


def test_a_compiled_region_runs_and_keeps_its_intermediates_as_they_are():
    x, layer = tensor(64, 64), nn.Linear(64, 64)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: layer(layer(x).sin()).sin(), backend="aot_eager")
    exact = torch.autograd.grad(layer(layer(x).sin()).sin().sum(), x)[0]
    with compress_saved_tensors(INT8):
        out = compiled(x)
    got = torch.autograd.grad(out.sum(), x)[0]
    torch.testing.assert_close(got, exact, rtol=0.05, atol=0.05)


def test_fsdp2s_unsharded_parameters_are_left_alone(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        x = tensor(64, 64)
        with compress_saved_tensors(INT8) as plain:
            model(x)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        with compress_saved_tensors(INT8) as sharded:
            out = model(x)
        assert sharded.report.stored_bytes == plain.report.stored_bytes
        out.square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_whole_models_without_conversion():
    transformers = pytest.importorskip("transformers")
    from test_activation_families import IDS, MASK, build

    model = build("llama")
    cases = [(model, {"input_ids": IDS, "attention_mask": MASK, "labels": IDS})]
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=61
    )
    torch.manual_seed(0)
    bert = transformers.BertForMaskedLM(config).eval()
    cases.append((bert, {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}))
    for model, inputs in cases:
        gradients = []
        for compress in (False, True):
            model.zero_grad()
            context = compress_saved_tensors("agoq", model)
            if compress:
                with context:
                    loss = model(**inputs).loss
            else:
                loss = model(**inputs).loss
            loss.backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        exact, got = gradients
        assert 0 < (got - exact).norm() < 0.1 * exact.norm()
        assert context.report.stored_bytes < 0.25 * context.report.original_bytes
