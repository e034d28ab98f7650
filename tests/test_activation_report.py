"""activation_report: it measures what autograd keeps, each storage once, parameters apart."""

from __future__ import annotations

import json
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agoq_ext.activation import ActivationReport, activation_report
from agoq_ext.nn.functional import linear
from agoq_ext.tensor import quantize


class Block(nn.Module):
    """Two linear layers that read one input, an activation, and a sum."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.q_proj(x) * self.k_proj(x))


def block(seed: int = 0) -> Block:
    torch.manual_seed(seed)
    return Block()


ONE = 3 * 8 * 4  # bytes of one activation of x = [3, 8] in FP32
X = torch.linspace(-1, 1, 24).reshape(3, 8)


def test_each_storage_counts_once_for_the_module_that_saves_it_first():
    report = activation_report(block(), X)
    # q_proj saves x, the product saves both outputs, tanh its own; k_proj saves x again.
    assert report.by_module == {"q_proj": ONE, "": 3 * ONE}
    assert report.by_operator == {"qkv": ONE, "Block": 3 * ONE}
    assert report.total_bytes == 4 * ONE
    assert report.parameter_bytes == 0  # x needs no gradient, so no weight is kept
    report = activation_report(block(), X.clone().requires_grad_())
    assert report.total_bytes == 4 * ONE
    assert report.parameter_bytes == 2 * 8 * 8 * 4


def test_autocast_copies_of_weights_are_apart():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.autocast("cpu", torch.bfloat16):
        model(X)  # leaves copies in the cache of this region
        report = activation_report(model, X)
    assert report.by_module == {"0": ONE // 2, "1": ONE // 2}
    assert report.parameter_bytes == 0
    assert report.parameter_copy_bytes == 8 * 8 * 2  # of the second; the first needs no input gradient


def test_parameters_that_sharding_puts_in_place_are_parameters():
    """As FSDP2 does: a hook of the parent replaces the parameters of its children for the time of the forward."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8, bias=False)))

    def unshard(parent: nn.Module, args: tuple[Tensor, ...]) -> None:
        parent[0].weight = nn.Parameter(parent[0].weight.detach().clone())

    model[0].register_forward_pre_hook(unshard)
    report = activation_report(model, X.clone().requires_grad_())
    assert report.total_bytes == ONE
    assert report.parameter_bytes == 8 * 8 * 4


def test_what_is_made_from_parameters_alone_is_apart_and_the_rest_is_not():
    class Merged(nn.Module):
        """A weight that is the product of two, scaled by the data."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(8, 2)), nn.Parameter(torch.ones(2, 8))

        def forward(self, x: Tensor) -> Tensor:
            weight = (self.a @ self.b).exp()  # saved by exp: parameters alone
            return x @ (weight * x.sum())  # saved: x, x.sum() and the scaled weight, which the data made

    report = activation_report(Merged(), X.clone().requires_grad_())
    assert report.parameter_copy_bytes == 8 * 8 * 4
    assert report.total_bytes == ONE + 4 + 8 * 8 * 4


def test_a_view_keeps_its_whole_storage():
    class Slice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1)[:1].square()

    assert activation_report(Slice(), X.clone().requires_grad_()).total_bytes == ONE


def test_what_is_gone_when_the_forward_returns_is_not_counted():
    class Detached(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.value = x.exp().exp().sum().item()
            return x.exp()

    assert activation_report(Detached(), X.clone().requires_grad_()).total_bytes == ONE


def test_ids_masks_and_constants_are_counted():
    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(5, 8)
            self.register_buffer("scale", torch.full((8,), 2.0))

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            x = self.embed_tokens(ids) * self.scale  # the scale is a buffer: apart
            return x.masked_fill(mask[:, None], 0)

    ids, mask = torch.tensor([1, 2, 3]), torch.tensor([True, False, False])
    report = activation_report(Embed(), (ids, mask))
    assert report.by_operator == {"embedding": 3 * 8, "Embed": 3}
    assert report.parameter_bytes == 8 * 4


def test_compressed_operators_are_measured_as_they_are():
    class Compressed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return linear(x, self.weight)

    with torch.autocast("cpu", torch.bfloat16):
        report = activation_report(Compressed(), X.clone().requires_grad_())
    assert report.total_bytes == quantize(X, "nf4", 64).nbytes
    assert report.parameter_bytes == 4 * 8 * 4
    assert report.parameter_copy_bytes == 0  # the weight itself is kept, not autocast's copy


def test_layers_operators_and_units():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_layernorm = nn.LayerNorm(8, elementwise_affine=False)
            self.mlp = nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.input_layernorm(x)).exp()

    class ModelForTest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return F.mse_loss(x, torch.zeros_like(x))

    report = activation_report(ModelForTest(), X.clone().requires_grad_(), unit_bytes=3 * 8 * 2)
    # Each layer: the norm's input with mean and rstd, GELU's input, exp's output, which is the next norm's input;
    # the loss: its target.
    assert report.by_layer == {"0": 3 * ONE + 24, "1": 2 * ONE + 24, "": ONE}
    assert set(report.by_operator) == {"norm", "mlp", "residual", "loss"}
    assert sum(report.by_operator.values()) == sum(report.by_module.values()) == report.total_bytes
    assert report.of_layer(1).total_bytes == report.by_layer["1"]
    assert report.in_units(3 * 8 * 2) == 1.0
    table = str(report)
    assert "total" in table and f"{report.total_bytes:,}" in table and " U" in table
    assert json.loads(json.dumps(report.to_dict()))["total_bytes"] == report.total_bytes
    assert " U" not in str(ActivationReport())


def test_units_come_from_token_ids_and_the_configuration():
    class Config(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 8)
            self.config = type("Config", (), {"hidden_size": 8})()

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.embed(input_ids)

    ids = torch.tensor([[1, 2, 3]])
    for inputs in (ids, (ids,), {"input_ids": ids}, UserDict(input_ids=ids)):
        assert activation_report(Config(), inputs).unit_bytes == 3 * 8 * 2
    assert activation_report(block(), X).unit_bytes is None


def test_nothing_is_left_behind():
    """Random state, gradients and hooks are as before, also when the forward fails."""

    class Fails(Block):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise LookupError("inside")

    state = torch.get_rng_state()
    model = nn.Sequential(nn.Dropout(0.5), block())
    activation_report(model, X)
    torch.set_rng_state(state)
    torch.manual_seed(3)
    first = torch.rand(3)
    torch.manual_seed(3)
    activation_report(model, X)
    assert torch.equal(torch.rand(3), first)
    assert all(p.grad is None for p in model.parameters())
    hooks = nn.modules.module
    with pytest.raises(LookupError, match="inside"):
        activation_report(Fails(), X)
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients must be enabled"):
        activation_report(model, X)
