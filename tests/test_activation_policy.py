"""ActivationPolicy: names, JSON, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from agoq_ext.activation import ActivationPolicy, Override, TensorFormat
from agoq_ext.activation.policy import KINDS
from agoq_ext.tensor import quantize


def test_named_policies():
    nf4 = TensorFormat("nf4", 64, "bfloat16")
    paper = ActivationPolicy.named("paper")
    assert paper == replace(ActivationPolicy.uniform(nf4), query=None, key=None, value=None)
    assert ActivationPolicy.named("off") == ActivationPolicy() == ActivationPolicy.uniform(None)
    for name in ("agoq", "lean"):
        assert None not in [getattr(ActivationPolicy.named(name), kind) for kind in KINDS]
    with pytest.raises(ValueError, match="must be one of agoq, paper, lean, off or .*; got 'papers'"):
        ActivationPolicy.named("papers")


def test_json_round_trip():
    int8 = TensorFormat("int8", 32, "float32")
    for policy in (
        *map(ActivationPolicy.named, ("agoq", "paper", "lean", "off")),
        ActivationPolicy(norm_input=int8, gate_up=TensorFormat("uint4")),
        ActivationPolicy(
            overrides=(
                Override(int8, kinds=("norm_input", "query"), name="*.layers.0.*", layers=(0, 3)),
                Override(None, type="LlamaMLP"),
            )
        ),
    ):
        assert ActivationPolicy.from_json(policy.to_json()) == policy
        assert hash(ActivationPolicy.from_json(policy.to_json())) == hash(policy)
    assert ActivationPolicy.from_json('{"gate_up": {"format": "int4"}}') == ActivationPolicy(
        gate_up=TensorFormat("int4")
    )
    assert ActivationPolicy.from_json('{"gate_up": {}}') == ActivationPolicy(gate_up=TensorFormat())


def test_overrides_by_name_type_and_layer_the_last_one_wins():
    base, first, mlp, named = (TensorFormat(f) for f in ("nf4", "int8", "int6", "int5"))
    policy = ActivationPolicy(
        gate_up=base,
        norm_input=base,
        overrides=(
            Override(first, layers=(0, 11)),
            Override(mlp, kinds=("gate_up",), type="LlamaMLP"),
            Override(named, name="model.layers.1?.*", type="LlamaMLP"),
            Override(None, kinds=("norm_input",), name="*.norm"),
        ),
    )
    assert policy.stored("gate_up", "model.layers.2.mlp", "OtherMLP") == base
    assert policy.stored("gate_up", "model.layers.0.mlp", "OtherMLP") == first
    assert policy.stored("gate_up", "model.layers.0.mlp", "LlamaMLP") == mlp
    assert policy.stored("gate_up", "model.layers.11.mlp", "LlamaMLP") == named
    assert policy.stored("norm_input", "model.layers.11.mlp", "LlamaMLP") == named
    assert policy.stored("norm_input", "model.layers.1.input_layernorm", "LlamaRMSNorm") == base
    assert policy.stored("norm_input", "model.norm", "LlamaRMSNorm") is None
    assert policy.stored("query", "model.layers.0.self_attn", "LlamaAttention") == first
    assert policy.stored("query", "model.layers.1.self_attn", "LlamaAttention") is None
    assert policy.min_bits == 4


def test_widening_raises_what_is_narrower_and_nothing_else():
    policy = ActivationPolicy(
        norm_input=TensorFormat("nf4", 32),
        gate_up=TensorFormat("int6"),
        query=TensorFormat("fp8_e4m3"),
        overrides=(Override(TensorFormat("uint4"), layers=(0,)), Override(None, layers=(1,))),
    )
    assert policy.widened(4) == policy
    assert policy.widened(6) == replace(
        policy,
        norm_input=TensorFormat("int6", 32),
        overrides=(Override(TensorFormat("int6"), layers=(0,)), Override(None, layers=(1,))),
    )
    assert policy.widened(8).gate_up == TensorFormat("int8")
    assert policy.widened(8).min_bits == 8
    with pytest.raises(ValueError, match="bits must be one of 4, 5, 6, 8; got 7"):
        policy.widened(7)


def test_nbytes_are_those_of_the_op():
    x = torch.randn(3, 5, 100)
    for format in ("nf4", "uint4", "int5", "int6", "int8"):
        for group_size, scale_dtype in ((32, "bfloat16"), (64, "float32")):
            stored = TensorFormat(format, group_size, scale_dtype)
            q = quantize(x, format, group_size, stored.torch_scale_dtype)
            assert stored.nbytes(x.shape) == q.nbytes


def test_keywords_are_those_of_the_functions():
    assert TensorFormat("int8", 32, "float32").keywords() == {
        "format": "int8",
        "group_size": 32,
        "scale_dtype": torch.float32,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[]", "must be a JSON object; got list"),
        ('{"norm": {}}', "keys must be among norm_input, .*; got 'norm'"),
        ('{"gate_up": "nf4"}', "gate_up must be a JSON object or null; got 'nf4'"),
        ('{"gate_up": {"bits": 4}}', "gate_up has unknown keys bits"),
        ('{"gate_up": {"format": "nf3"}}', "format must be one of .*; got 'nf3'"),
        ('{"gate_up": {"group_size": 48}}', "group_size must be one of 32, 64, 128, 256; got 48"),
        (
            '{"gate_up": {"scale_dtype": "float16"}}',
            "scale_dtype must be one of bfloat16, float32; got 'float16'",
        ),
        ('{"overrides": {}}', "overrides must be a list of JSON objects"),
        ('{"overrides": [{"layers": [0]}]}', "an override must have a format or null"),
        ('{"overrides": [{"format": null}]}', "one of name, type and layers must be given; got none"),
        ('{"overrides": [{"format": null, "layer": 0}]}', "keys must be among .*; got 'layer'"),
        ('{"overrides": [{"format": null, "layers": ["0"]}]}', "layers must be a sequence of int"),
        (
            '{"overrides": [{"format": null, "name": "*", "kinds": ["q"]}]}',
            "kinds must be among norm_input.*; got 'q'",
        ),
    ],
)
def test_wrong_json_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        ActivationPolicy.from_json(text)


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match="norm_input must be a TensorFormat or None; got str"):
        ActivationPolicy(norm_input="nf4")
    with pytest.raises(TypeError, match="overrides must be a sequence of Override"):
        ActivationPolicy(overrides=(TensorFormat(),))
    with pytest.raises(TypeError, match="format must be a TensorFormat or None; got str"):
        Override("nf4", name="*")
    with pytest.raises(TypeError, match="name must be a string or None; got 3"):
        Override(None, name=3)
