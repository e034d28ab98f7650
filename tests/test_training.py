"""`agoq train` end to end on local ranks: a whole run, resuming, signals, dead ranks, torchrun, wrong input."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from agoq_ext import cli
from agoq_ext.training import checkpoint, demo, launch, metrics
from agoq_ext.training.config import TrainConfig

pytest.importorskip("transformers")

MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,  # so that the random state matters
}


@pytest.fixture(scope="module", autouse=True)
def own_forkserver() -> Iterator[None]:
    """A server with the model's libraries, and none of it for other modules: it is one for the whole process."""
    forkserver._forkserver._stop()
    yield
    forkserver._forkserver._stop()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 60 files, 90 kB, of words in an order with some structure."""
    folder = tmp_path_factory.mktemp("text")
    generator = torch.Generator().manual_seed(0)
    for i in range(60):
        words = torch.randint(40, (400,), generator=generator).tolist()
        content = " ".join(f"w{word:02d}" if k % 3 else f"line{i}" for k, word in enumerate(words))
        (folder / f"{i}.txt").write_text(content)
    return folder


@pytest.fixture
def config(text: Path, tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        out=str(tmp_path / "out"),
        model="test",
        model_config=MODEL,
        data=(str(text),),
        ranks=2,
        steps=40,
        batch=2,
        seq=32,
        save_every=0,
        threads=1,
    )


def losses(config: TrainConfig) -> list[tuple[int, float]]:
    records = metrics.read(Path(config.out))
    return [(r["step"], r["train_loss"]) for r in records if "train_loss" in r]


def stored(config: TrainConfig) -> checkpoint.Checkpoint:
    return checkpoint.load(Path(config.out) / checkpoint.FILE_NAME)


def after_steps(config: TrainConfig, steps: int, act: Callable[[], Any]) -> threading.Thread:
    """Calls `act` as soon as the run has recorded that many steps."""

    def watch() -> None:
        path = Path(config.out) / metrics.FILE_NAME
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if path.exists() and path.read_text().count("\n") >= steps:
                act()
                return
            time.sleep(0.01)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


# --- whole runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", ["int8", "store"])
def test_run_and_interrupted_run_take_the_same_steps(
    config: TrainConfig, tmp_path: Path, gradients: str
) -> None:
    config = replace(config, eval_every=16, accumulate=2, gradients=gradients)
    assert launch.run(config) == 0
    summary = json.loads((Path(config.out) / "summary.json").read_text())
    steps = losses(config)
    assert [step for step, _ in steps] == list(range(1, 41))
    assert steps[-1][1] < steps[0][1] - 0.5
    validations = [r for r in metrics.read(Path(config.out)) if "val_loss" in r]
    assert [r["step"] for r in validations] == [16, 32, 40]
    assert summary["val_loss"] == validations[-1]["val_loss"] < validations[0]["val_loss"]
    parameters = summary["parameters"]
    # int8 with a 2-byte scale a group of 128, sent twice to the one other rank's half; a little padding.
    exchanged = 2 * parameters * (1 + 2 / 128) * config.steps
    assert exchanged <= summary["wire_bytes"] <= 1.01 * exchanged
    if summary["kernel_written_bytes"] is not None:
        assert summary["kernel_written_bytes"] == pytest.approx(summary["wire_bytes"], rel=0.05)
    assert summary["peak_rss_bytes"] > 50e6
    assert sum(summary["saved_activation_bytes_by_operator"].values()) == summary["saved_activation_bytes"]

    cut = replace(config, out=str(tmp_path / "cut"))

    def stop_twice() -> None:  # as `timeout` does: its second signal is not a second request
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)

    watcher = after_steps(cut, 7, stop_twice)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the run may be over before the second one
    try:
        assert launch.run(cut) == 128 + signal.SIGTERM
        watcher.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    done = stored(cut).step
    assert 7 <= done < 40
    assert not multiprocessing.active_children()
    assert cli.main(["train", "--out", cut.out, "--resume"]) == 0
    assert losses(cut) == losses(config)
    whole, resumed = stored(config), stored(cut)
    assert resumed.step == whole.step == 40
    assert resumed.wire_bytes == whole.wire_bytes
    assert_equal_tensors(resumed.model, whole.model)
    assert_equal_tensors(resumed.optimizer["state"], whole.optimizer["state"])
    assert_equal_tensors(dict(enumerate(resumed.random_states)), dict(enumerate(whole.random_states)))


def assert_equal_tensors(actual: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_equal_tensors(actual[key], value)
        else:
            assert torch.equal(actual[key], value), key


def test_a_killed_rank_ends_the_run_and_keeps_the_checkpoint(
    config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(config, steps=10_000, save_every=5, gradients="fp32", activations="none")

    def kill_one() -> None:
        os.kill(multiprocessing.active_children()[-1].pid, signal.SIGKILL)

    watcher = after_steps(config, 8, kill_one)
    assert launch.run(config) == 1
    watcher.join()
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "was killed by SIGKILL" in message and str(Path(config.out) / "checkpoint.pt") in message
    assert not multiprocessing.active_children()
    assert stored(config).step >= 5
    assert [path.name for path in Path(config.out).iterdir() if path.name.startswith(".")] == []


def test_diverging_training_stops_and_says_so(config: TrainConfig, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.run(replace(config, lr=1e30, activations="none", precision="fp32")) == 1


def test_under_torchrun(config: TrainConfig, tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    model.write_text(json.dumps(MODEL))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [
        "-m",
        "agoq_ext.cli",
        "train",
        "--out",
        config.out,
        "--model",
        str(model),
        "--data",
        *config.data,
    ]
    command += ["--steps", "5", "--batch", "2", "--seq", "32", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=200)
        finally:
            process.terminate()  # torchrun then ends its ranks, which SIGKILL would leave behind
    assert process.returncode == 0, err
    assert stored(config).step == 5
    assert out.count("validation loss") == 1  # rank 0 alone speaks
    local = replace(config, steps=5, out=str(tmp_path / "local"), save_every=100)
    assert launch.run(local) == 0
    assert losses(local) == losses(config)


def test_demo_compares_its_runs(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "demo"
    assert demo.run(str(out), data=(str(text),), steps=3) == 0
    report = json.loads((out / "report.json").read_text())
    for name in ("baseline", "agoq", "store"):
        for key in ("val_loss", "train_loss", "tokens_per_s", "saved_activation_bytes", "wire_bytes"):
            assert report[name][key] > 0
        assert report[name]["peak_rss_bytes"] > 50e6
    for name in ("agoq", "store"):
        ratios = report["ratios"][name]
        assert ratios["saved_activation_bytes"] <= 0.40
        assert ratios["wire_bytes"] <= 0.27
    assert report["ratios"]["store"]["gradient_bytes"] <= 1.02 / 4
    for name in ("loss.png", "activation_bytes.png", "wire_bytes.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert "met" in capsys.readouterr().out


# --- wrong input ---------------------------------------------------------------------------------------------


@pytest.fixture
def trained(config: TrainConfig) -> Path:
    """A checkpoint after no steps, of a model that is not `tiny`."""
    path = Path(config.out) / checkpoint.FILE_NAME
    path.parent.mkdir()
    checkpoint.Checkpoint(0, config.to_dict(), "", {}, {}, [], [], 0, 0.0).save(path.parent)
    return path


def refused(argv: list[str], capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    """Runs `agoq` and expects status 2 and one line on stderr that holds `parts`."""
    try:
        status = cli.main(argv)
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.err.count("\n") == 1 and captured.err.startswith("agoq: error: ")
    assert captured.out == ""
    for part in parts:
        assert part in captured.err


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--gradients", "int3"], "int3"),
        (["--activations", "all"], "all"),
        (["--precision", "fp8"], "fp8"),
        (["--ranks", "0"], "--ranks must be between 1 and"),
        (["--ranks", "-2"], "--ranks must be between 1 and"),
        (["--ranks", "100000"], "--ranks must be between 1 and"),
        (["--ranks", "two"], "two"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--lr", "nan"], "--lr must be"),
        (["--data", "/does/not/exist"], "cannot read /does/not/exist"),
        (["--model", "huge"], "--model must be tiny, small or a JSON file"),
        (["--model", "missing.json"], "missing.json"),
        (["--resume"], "there is no checkpoint"),
        (["--resume", "nowhere.pt"], "nowhere.pt"),
    ],
)
def test_wrong_options(
    options: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(["train", "--out", str(tmp_path / "out"), *options], capsys, part)


def test_wrong_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short to train on")
    refused(["train", "--out", str(tmp_path / "out"), "--data", str(short)], capsys, "21 bytes", "too short")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(["train", "--out", str(tmp_path / "out"), "--data", str(empty)], capsys, "holds no text")


def test_wrong_out(tmp_path: Path, capsys: pytest.CaptureFixture[str], trained: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(["train", "--out", str(tmp_path / "file" / "out")], capsys, "--out: cannot write to")
    refused(["train", "--out", str(trained.parent)], capsys, "is there from an earlier run")
    assert cli.main(["demo", "--out", str(tmp_path / "file")]) == 2


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("[1]", "must hold a JSON object"),
        ("{", "cannot read"),
    ],
)
def test_unreadable_model(model: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    path.write_text(model)
    refused(["train", "--out", str(tmp_path / "out"), "--model", str(path)], capsys, part)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"vocab_size": 100}, "vocab_size must be at least 256"),
        ({"hidden_size": 65}, "hidden size (65) is not a multiple"),
        ({"model_type": "gpt2"}, "model_type must be llama"),
        ({"max_position_embeddings": 16}, "max_position_embeddings, 16"),
        ({"num_hidden_layers": "many"}, "is not a usable LlamaConfig"),
    ],
)
def test_unusable_model_is_one_line_from_a_child_rank(
    changes: dict[str, Any],
    part: str,
    config: TrainConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**MODEL, **changes}))
    argv = ["train", "--out", config.out, "--model", str(path), "--data", *config.data, "--ranks", "2"]
    refused([*argv, "--seq", "32"], capsys, part)


def test_wrong_checkpoints(config: TrainConfig, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume = ["train", "--out", config.out, "--resume"]
    refused([*resume, "--model", "tiny"], capsys, "holds another model", "hidden_size is 64")
    refused([*resume, "--lr", "0.5"], capsys, "was trained with --lr 0.001; got --lr 0.5")
    refused([*resume, "--ranks", "3"], capsys, "--ranks 2")
    refused([*resume, "--overwrite"], capsys, "contradict")
    refused(resume, capsys, "other data")
    trained.write_bytes(trained.read_bytes()[:-100])
    refused(resume, capsys, "is not a checkpoint, or is damaged")
    torch.save({"model": {}}, trained)
    refused(resume, capsys, "is not a checkpoint of agoq train")
