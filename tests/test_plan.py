"""`agoq plan`: equal to what is measured, to the byte, and to the paper's table for its assumptions."""

from __future__ import annotations

import contextlib
import json
import random
import re
from typing import Any

import pytest
import torch

from agoq_ext import cli
from agoq_ext.activation import (
    ActivationPolicy,
    Override,
    TensorFormat,
    activation_report,
    compress_activations,
)
from agoq_ext.activation.policy import KINDS, POLICIES
from agoq_ext.plan import layer_bytes, outside_bytes, paper_units, plan_memory, plan_pipeline, read_shape
from agoq_ext.plan.memory import largest_batch
from agoq_ext.plan.shapes import shape_of

transformers = pytest.importorskip("transformers")

LLAMA = {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA["vocab_size"] = 32000
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "use_cache": False,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"attention_bias": True}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"head_dim": 24}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
}
BATCH, SEQ = 2, 24


def random_policy(seed: int) -> ActivationPolicy:
    """Every kind in some format or none, and some layers and modules in another."""
    rng = random.Random(seed)

    def stored() -> TensorFormat | None:
        if rng.random() < 0.3:
            return None
        format = rng.choice(["nf4", "uint4", "int5", "int6", "int8"])
        return TensorFormat(format, rng.choice([32, 64, 128]), rng.choice(["bfloat16", "float32"]))

    overrides = (
        Override(stored(), layers=(rng.randrange(3),)),
        Override(stored(), kinds=tuple(rng.sample(KINDS, 2)), name="model.layers.*"),
        Override(stored(), kinds=("norm_input",), name="model.norm"),
    )
    return ActivationPolicy(**{kind: stored() for kind in KINDS}, overrides=overrides)


def check(family: str, policy: ActivationPolicy, precision: str, chunked_loss: bool = False) -> None:
    config_class, model_class, own = FAMILIES[family]
    torch.manual_seed(0)
    config = config_class(**{**SMALL, **own})
    model = model_class(config)
    model = model.bfloat16() if precision == "bf16" else model
    compress_activations(model.train(), policy, chunked_loss=chunked_loss)
    ids = torch.randint(61, (BATCH, SEQ))
    with torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else contextlib.nullcontext():
        report = activation_report(model, {"input_ids": ids, "labels": ids})
    shape = shape_of(json.loads(config.to_json_string(use_diff=False)))
    assert shape.parameters == model.num_parameters()
    outside = outside_bytes(shape, BATCH, SEQ, policy, precision, chunked_loss)
    for index in range(3):
        planned = layer_bytes(shape, BATCH, SEQ, policy, index, precision)
        if index == 0:
            planned["attention"] += outside.pop("rotary tables")
        assert report.of_layer(index).by_operator == planned, (index, policy)
    assert report.of_layer("").by_operator == outside
    plan = plan_memory(shape, BATCH, SEQ, policy, precision, chunked_loss=chunked_loss)
    assert plan.activation_bytes == report.total_bytes
    assert plan.unit_bytes == report.unit_bytes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_the_plan_is_what_is_measured_to_the_byte(family, precision):
    for name in POLICIES:
        check(family, ActivationPolicy.named(name), precision, chunked_loss=name == "lean")


@pytest.mark.parametrize("seed", range(8))
def test_the_plan_of_any_policy_is_what_is_measured(seed):
    check(list(FAMILIES)[seed % 4], random_policy(seed), ("bf16", "autocast")[seed // 4])


def test_the_papers_table():
    """AGoQ's table of a LLaMA layer: multi-head attention, FFN width 4 x hidden."""
    units = paper_units(shape_of(LLAMA))
    table = {operator: tuple(row.values()) for operator, row in units.items()}
    assert table == {
        "norm": (4, 1, 0.5),
        "qkv": (1, 1, 0),
        "attention": (5, 5, 5),
        "output projection": (1, 1, 0.25),
        "gate and up projection": (1, 0.5, 0),
        "mlp": (12, 6, 2),
        "down projection": (4, 2, 0),
    }
    assert [sum(row[i] for row in table.values()) for i in range(3)] == [28, 16.5, 7.75]
    with_scales = sum(row["paper"] for row in paper_units(shape_of(LLAMA), scales=True).values())
    assert round(with_scales, 2) == 7.92


def test_the_policies_bounds_on_a_llama_layer():
    """At most 7.92 U for "paper" and 5.0 U for "lean", scales and log-sum-exp included."""
    shape = shape_of(LLAMA)
    units = {}
    for name in POLICIES:
        plan = plan_memory(shape, 1, 4096, ActivationPolicy.named(name))
        units[name] = sum(plan.layer.values()) / plan.unit_bytes
    assert units["paper"] <= 7.92
    assert units["lean"] < units["agoq"] <= 5.0
    assert 28 < units["off"] < 28.1


def test_a_pipelines_ranks():
    shape = shape_of({**LLAMA, "vocab_size": 1000})
    policy = ActivationPolicy.named("paper")
    ranks = plan_pipeline(shape, 1, 1024, policy, ("interleaved_1f1b", 4, 2, 8))
    assert [r.stored for r in ranks] == [11, 9, 7, 5]
    assert [r.bits for r in ranks] == [4, 4, 6, 8]
    four, eight = (sum(layer_bytes(shape, 1, 1024, policy.widened(b)).values()) for b in (4, 8))
    outside = outside_bytes(shape, 1, 1024, policy.widened(8))
    assert ranks[0].activations == 11 * (4 * four + outside["rotary tables"] + outside["embedding"])
    assert ranks[3].activations == 5 * (4 * eight + outside["rotary tables"]) + sum(
        outside[part] for part in ("norm", "head", "loss")
    )
    assert sum(r.weights for r in ranks) == 2 * shape.parameters
    assert all(r.activations < ranks[0].activations for r in ranks[1:])
    assert {r.bits for r in plan_pipeline(shape, 1, 64, ActivationPolicy(), ("gpipe", 4, 1, 2))} == {0}


def test_the_largest_batch():
    for limit in (0, 1, 2, 3, 7, 8, 1000):
        assert largest_batch(lambda batch, limit=limit: batch <= limit) == limit


# --- the command ---------------------------------------------------------------------------------------------


def agoq(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = cli.main(["plan", *arguments])
    except SystemExit as exit:
        status = int(exit.code or 0)
    return status, *capsys.readouterr()


def test_the_command_prints_tables_and_json(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, "model_type": "llama", "num_hidden_layers": 8}))
    policy = tmp_path / "policy.json"
    policy.write_text(random_policy(0).to_json())
    options = ["--batch", "2", "--seq", "24", "--policy", "agoq", "--policy", str(policy)]
    options += ["--chunked-loss", "--memory-budget", "4MiB", "--pipeline", "interleaved_1f1b:4:2:8"]
    for model in (path, tmp_path):
        status, text, _ = agoq(capsys, "--model", str(model), *options)
        assert status == 0
        assert all(part in text for part in ("BF16*", "COAT*", "paper*", "agoq", "rank 3", "largest batch"))
    status, text, _ = agoq(capsys, "--model", str(path), *options, "--json")
    facts = json.loads(text)
    shape = read_shape(str(path))

    def total(batch: int) -> int:
        return plan_memory(shape, batch, 24, POLICIES["agoq"], chunked_loss=True).total

    assert facts["policies"]["agoq"]["total"] == total(2)
    batch = facts["policies"]["agoq"]["largest_batch"]
    fits = [total(b) <= 4 * 2**20 for b in (batch, batch + 1)]
    assert fits == [True, False]
    assert len(facts["policies"][str(policy)]["ranks"]) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--model": "nowhere.json"}, "--model must be one of llama2-7b, .*nowhere.json"),
        ({"--batch": "0"}, "must be a positive integer; got '0'"),
        ({"--policy": "thin"}, "--policy must be one of agoq, paper, lean, off, or a JSON file"),
        ({"--pipeline": "1f1b:4"}, r"--pipeline must be SCHEDULE:STAGES\[:CHUNKS\]:MICROBATCHES"),
        ({"--pipeline": "1f1b:5:8"}, "must cut 32 layers evenly; got 5 stages"),
        ({"--pipeline": "2f2b:4:8"}, "schedule must be one of gpipe, 1f1b, interleaved_1f1b"),
        ({"--memory-budget": "80 apples"}, "must be a number of bytes such as 80GiB; got '80 apples'"),
    ],
)
def test_wrong_input_is_named_in_one_line(capsys, changes, message):
    arguments: dict[str, Any] = {"--model": "llama2-7b", "--batch": "1", "--seq": "64", **changes}
    status, out, error = agoq(capsys, *(part for pair in arguments.items() for part in pair))
    assert status == 2 and out == ""
    assert error.count("\n") == 1 and error.startswith("agoq: error: ")
    assert re.search(message, error)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "gpt2"}, "model_type must be one of llama, mistral, qwen2, qwen3; got 'gpt2'"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer; got '64'"),
        ({"vocab_size": None}, "vocab_size must be a positive integer; got None"),
    ],
)
def test_a_wrong_configuration_is_named(capsys, tmp_path, entries, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, **entries}))
    status, _, error = agoq(capsys, "--model", str(path), "--batch", "1", "--seq", "8")
    assert status == 2 and message in error
