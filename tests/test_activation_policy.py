"""ActivationPolicy: names, JSON, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from agoq_ext.activation import ActivationPolicy, TensorFormat


def test_paper_stores_four_bits_of_every_kind_and_off_none():
    paper = ActivationPolicy.named("paper")
    assert paper == ActivationPolicy(*[TensorFormat("nf4", 64, "bfloat16")] * 4)
    assert ActivationPolicy.named("off") == ActivationPolicy()
    with pytest.raises(
        ValueError, match=r"name must be one of agoq, paper, off.*; got 'papers'|one of agoq, paper, off"
    ):
        ActivationPolicy.named("papers")


def test_json_round_trip():
    for policy in (
        ActivationPolicy.named("paper"),
        ActivationPolicy.named("off"),
        ActivationPolicy(norm_input=TensorFormat("int8", 32, "float32"), gate_up=TensorFormat("uint4")),
    ):
        assert ActivationPolicy.from_json(policy.to_json()) == policy
    assert ActivationPolicy.from_json('{"gate_up": {"format": "int4"}}') == ActivationPolicy(
        gate_up=TensorFormat("int4")
    )
    assert ActivationPolicy.from_json('{"gate_up": {}}') == ActivationPolicy(gate_up=TensorFormat())


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
    ],
)
def test_wrong_json_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        ActivationPolicy.from_json(text)


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match="norm_input must be a TensorFormat or None; got str"):
        ActivationPolicy(norm_input="nf4")
