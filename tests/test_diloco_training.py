"""`agoq train --diloco`: its report, a run stopped and resumed, and one started by torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_world

from agoq_ext import cli
from agoq_ext.training.config import TrainConfig
from agoq_ext.training.trainer import Trainer
from agoq_ext.training.world import World

MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

TEXT = "".join(f"{i} times {i} is {i * i}.\n" for i in range(4000))


def arguments(folder: Path, out: str, *options: str) -> list[str]:
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "text.txt").write_text(TEXT)
    return [
        "train", "--out", str(folder / out), "--model", str(folder / "model.json"), "--data", str(folder / "text.txt"),
        "--activations", "none", "--precision", "fp32", "--seq", "32", "--batch", "4", "--eval-windows", "8",
        "--threads", "1", *options,
    ]  # fmt: skip


def train(folder: Path, out: str, *options: str) -> dict[str, Any]:
    assert cli.main(arguments(folder, out, *options)) == 0
    return json.loads((folder / out / "summary.json").read_text())


DILOCO = ["--diloco", "6", "--overlap", "2", "--warmup", "4", "--replicas", "2"]


def test_report(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", *DILOCO, "--steps", "20", "--save-every", "7", "--log-every", "5")
    report = whole["diloco"]
    assert (report["replicas"], report["sync_every"], report["fragments"]) == (2, 6, 3)
    assert 0 <= report["start_up_bytes"] - 4 * whole["parameters"] < 1000  # and buffers
    # An all-reduce of two ranks: each sends as much as it has, in each of the 4 steps, with padding and records.
    ideal = 2 * 4 * whole["parameters"] * 4
    assert ideal <= report["warmup_bytes"] < 1.1 * ideal
    # Fragments start at local steps 6 and 12, 8 and 14, 10 and 16: 2 x 2 of all parameters, in 4.125 bits.
    ideal = 2 * 2 * whole["parameters"] * 4.125 / 8
    assert ideal < report["outer_gradient_bytes"] < 1.3 * ideal
    assert 0 < report["utilization"] <= 1
    assert report["peak_bytes_per_second_of_a_replica"] > 0
    assert whole["val_loss"] < 5.6


class StopAt:
    """Asks to stop once a step of the trainer is done."""

    def __init__(self, step: int) -> None:
        self.step, self.trainer = step, None

    def agreed(self, world: World) -> int:
        return 0

    @property
    def signal(self) -> int:
        return 15 if self.trainer.step + 1 == self.step else 0


def check_stopped(rank: int, world: int, folder: Path) -> None:
    """Stopped after step 15, when 11 local steps are done and a fragment is in flight."""
    common = {
        "model_config": MODEL, "data": (str(folder / "text.txt"),), "ranks": 2, "activations": "none",
        "precision": "fp32", "steps": 20, "batch": 4, "seq": 32, "eval_windows": 8, "log_every": 1, "threads": 1,
        "save_every": 0, "diloco": 6, "overlap": 2, "warmup": 4,
    }  # fmt: skip

    def run(out: str, stop_at: int, resume: Path | None = None) -> int:
        stop = StopAt(stop_at)
        trainer = Trainer(TrainConfig(out=str(folder / out), **common), World(rank, world), resume)
        stop.trainer = trainer
        return trainer.run(stop).step

    assert run("whole", 0) == 20
    assert run("stopped", 15) == 15
    dist.barrier()
    stopped = torch.load(folder / "stopped" / "checkpoint.pt", weights_only=True)
    assert any("flying" in fragment for fragment in stopped["replicas"][rank]["diloco"]["fragments"])
    assert run("resumed", 0, folder / "stopped" / "checkpoint.pt") == 20
    dist.barrier()
    one, other = (
        torch.load(folder / out / "checkpoint.pt", weights_only=True) for out in ("whole", "resumed")
    )
    pairs = [(one["model"], other["model"])]
    pairs += [(a["model"], b["model"]) for a, b in zip(one["replicas"], other["replicas"], strict=True)]
    for left, right in pairs:
        assert all(torch.equal(value, right[name]) for name, value in left.items())
    assert not torch.equal(one["replicas"][0]["model"]["lm_head.weight"], one["model"]["lm_head.weight"])


def test_a_stopped_run_continues_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    run_world(tmp_path, 2, check_stopped, tmp_path)


def test_under_torchrun(tmp_path: Path) -> None:
    """torchrun's processes train to the same bits as those that the command starts itself."""
    options = ["--diloco", "3", "--overlap", "1", "--warmup", "2", "--steps", "9"]
    torchrun = Path(sys.executable).with_name("torchrun")
    launcher = [str(torchrun)] if torchrun.exists() else [sys.executable, "-m", "torch.distributed.run"]
    command = [*launcher, "--standalone", "--nproc-per-node", "2", "-m", "agoq_ext.cli"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, *arguments(tmp_path, "torchrun", *options)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=200)
        finally:
            process.terminate()  # torchrun then ends its ranks, which SIGKILL would leave behind
    assert process.returncode == 0, err
    assert out.count("validation loss") == 1  # rank 0 alone speaks
    found = json.loads((tmp_path / "torchrun" / "summary.json").read_text())
    expected = train(tmp_path, "local", "--replicas", "2", *options)
    assert found["val_loss"] == expected["val_loss"] and found["diloco"]["replicas"] == 2
    for name in ("start_up_bytes", "warmup_bytes", "outer_gradient_bytes"):
        assert found["diloco"][name] == expected["diloco"][name] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--diloco", "5", "--overlap", "5"], "--overlap must be less than --diloco, 5; got 5"),
        (["--diloco", "-1"], "--diloco must be at least 0; got -1"),
        (
            ["--diloco", "5", "--replicas", "2", "--ranks", "3"],
            "--replicas and --ranks are one number; got 2 and 3",
        ),
        (["--diloco", "5", "--fragments", "9"], "fragments must be between 1 and 5 for this model; got 9"),
    ],
)
def test_wrong_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert cli.main(["train", "--out", str(tmp_path / "out"), "--steps", "2", *options]) == 2
    assert message in capsys.readouterr().err
