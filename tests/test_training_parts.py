"""The parts of `agoq train`: data and its split, learning rate, optimizer groups, checkpoints, BF16 products."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from agoq_ext.errors import UserError
from agoq_ext.training import checkpoint, config, data
from agoq_ext.training.config import TrainConfig
from agoq_ext.training.model import learning_rate, make_optimizer
from agoq_ext.training.signals import StopRequest

# --- data ----------------------------------------------------------------------------------------------------


def write_files(folder: Path, count: int, size: int) -> list[bytes]:
    contents = [bytes(f"<{i:03d}>", "ascii") + bytes([65 + i % 26]) * size for i in range(count)]
    folder.mkdir(exist_ok=True)
    for i, content in enumerate(contents):
        (folder / f"{i}.txt").write_bytes(content)
    return contents


def pieces(stream: torch.Tensor) -> list[bytes]:
    return bytes(stream.tolist()).split(data.SEPARATOR)[:-1]


def test_split_by_file_loses_and_shares_nothing(tmp_path: Path) -> None:
    contents = write_files(tmp_path / "a", 100, 500)
    (tmp_path / "a" / "copy.txt").write_bytes(contents[0])
    (tmp_path / "a" / "binary").write_bytes(b"\x00\x01" * 100)
    (tmp_path / "a" / ".hidden").write_bytes(b"hidden")
    corpus = data.load_corpus([str(tmp_path / "a")])
    train, validation = pieces(corpus.train), pieces(corpus.validation)
    assert sorted(train + validation) == sorted(contents)
    assert len(validation) == 5
    assert corpus.files == 100


def test_split_depends_on_content_alone(tmp_path: Path) -> None:
    contents = write_files(tmp_path / "a", 50, 300)
    (tmp_path / "b" / "sub").mkdir(parents=True)
    for i, content in enumerate(reversed(contents)):
        (tmp_path / "b" / ("sub" if i % 2 else "") / f"other{i}").write_bytes(content)
    first, second = (data.load_corpus([str(tmp_path / name)]) for name in "ab")
    assert first.digest == second.digest
    assert torch.equal(first.train, second.train) and torch.equal(first.validation, second.validation)
    (tmp_path / "b" / "other0").write_bytes(b"changed")
    assert data.load_corpus([str(tmp_path / "b")]).digest != first.digest


def test_few_files_give_their_ends(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(1, 201)) * 10)
    corpus = data.load_corpus([str(path)])
    train, validation = pieces(corpus.train), pieces(corpus.validation)
    assert train[0] + validation[0] == path.read_bytes()
    assert len(validation[0]) == 100


def test_windows_of_an_epoch_are_disjoint_and_all_ranks_share_them(tmp_path: Path) -> None:
    corpus = data.Corpus(torch.arange(200, dtype=torch.uint8), torch.arange(50, dtype=torch.uint8), "", 1, "")
    total = corpus.windows(8)
    assert total == 24
    inputs, targets = corpus.train_batch(0, total, 8, seed=3)
    assert torch.equal(targets[:, :-1], inputs[:, 1:]) and torch.equal(targets, inputs + 1)
    assert len(set(inputs.flatten().tolist())) == total * 8
    again, _ = corpus.train_batch(total, total, 8, seed=3)
    assert not torch.equal(again, inputs)
    halves = [corpus.train_batch(total - 4 + 2 * rank, 2, 8, seed=3)[0] for rank in range(4)]
    whole, _ = corpus.train_batch(total - 4, 8, 8, seed=3)  # over the end of the epoch
    assert torch.equal(torch.cat(halves), whole)
    assert not torch.equal(corpus.train_batch(0, total, 8, seed=4)[0], inputs)


def test_validation_windows_are_fixed_and_spread() -> None:
    corpus = data.Corpus(torch.zeros(0, dtype=torch.uint8), torch.arange(101, dtype=torch.uint8), "", 1, "")
    batches = list(corpus.validation_batches(10, 4, 3))
    assert [len(inputs) for inputs, _ in batches] == [3, 1]
    assert torch.cat([inputs[:, 0] for inputs, _ in batches]).tolist() == [0, 20, 50, 70]
    assert sum(len(inputs) for inputs, _ in corpus.validation_batches(10, 999, 3)) == 10


def test_default_data_is_the_standard_library() -> None:
    corpus = data.load_corpus([])
    assert len(corpus.train) > 3e6
    share = len(corpus.validation) / (len(corpus.train) + len(corpus.validation))
    assert 0.025 <= share <= 0.0501  # each file ends with a separator


def test_too_short_for_a_step(tmp_path: Path) -> None:
    corpus = data.Corpus(torch.zeros(264, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8), "it", 1, "")
    corpus.check_length(seq=8, sequences=32, batch=4)
    with pytest.raises(UserError, match="too short"):
        corpus.check_length(seq=8, sequences=33, batch=4)
    with pytest.raises(UserError, match="9 bytes to validate on, too short"):
        corpus.check_length(seq=9, sequences=1, batch=1)


# --- optimizer, options, checkpoints -------------------------------------------------------------------------


def test_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    options = TrainConfig(out="", steps=100, lr=1.0)
    rates = [learning_rate(step, options) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert all(a >= b for a, b in zip(rates[9:], rates[10:], strict=False))
    assert rates[55] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_weight_decay_acts_on_matrices_alone() -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    model[2].weight.requires_grad_(False)
    groups = make_optimizer(model.parameters(), TrainConfig(out="", weight_decay=0.5)).param_groups
    assert [(group["weight_decay"], [p.dim() for p in group["params"]]) for group in groups] == [
        (0.5, [2]),
        (0.0, [1, 1, 1]),
    ]


def test_options_survive_their_checkpoint() -> None:
    options = TrainConfig(out="x", data=("a", "b"), seed=5)
    assert TrainConfig.from_dict({**options.to_dict(), "of a later version": 1}) == options
    config.check_resumable(options, {"steps": 9, "data": ("a", "b"), "seed": 5}, "file")
    with pytest.raises(UserError, match="--seed 5; got --seed 6"):
        config.check_resumable(options, {"seed": 6}, "file")


def test_an_echo_of_a_signal_is_not_a_second_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    stop = StopRequest()
    assert not stop.receive(signal.SIGINT)
    now = 5.9
    assert not stop.receive(signal.SIGTERM)
    now = 6.1
    assert stop.receive(signal.SIGTERM)
    assert stop.signal == signal.SIGINT


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    checkpoint.write_atomically(path, lambda file: file.write(b"old"))

    def fail(file: object) -> None:
        file.write(b"ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_model_of_other_shapes_is_named() -> None:
    with pytest.raises(UserError, match=r"bias has shape \(3,\), the model's has \(2,\)"):
        checkpoint.load_model(nn.Linear(2, 2), nn.Linear(2, 3).state_dict(), Path("file"))
    with pytest.raises(UserError, match="the checkpoint has no bias"):
        checkpoint.load_model(nn.Linear(2, 2), nn.Linear(2, 2, bias=False).state_dict(), Path("file"))


# --- BF16 products -------------------------------------------------------------------------------------------

_PRODUCTS = """
import torch
import torch.nn.functional as F
from agoq_ext.training import bf16_products

torch.manual_seed(0)
torch.set_num_threads(1)

def run(dtype):
    a, b, c = (torch.randn(s, generator=torch.Generator().manual_seed(i)).to(dtype).requires_grad_()
               for i, s in enumerate([(33, 48), (20, 48), (20,)]))
    q, k, v = (torch.randn(2, 2, 17, 8, generator=torch.Generator().manual_seed(i)).to(dtype).requires_grad_()
               for i in range(3))
    results = [F.linear(a, b, c), F.linear(a, b), torch.bmm(a[None], b.t()[None]),
               F.scaled_dot_product_attention(q, k, v, is_causal=True)]
    sum(r.float().square().sum() for r in results).backward()
    results += [t.grad for t in (a, b, c, q, k, v)]
    return results

plain = {dtype: run(dtype) for dtype in (torch.float32, torch.bfloat16)}
bf16_products.replace_kernels()
assert all(torch.equal(x, y) for x, y in zip(run(torch.float32), plain[torch.float32]))
for ours, theirs in zip(run(torch.bfloat16), plain[torch.bfloat16]):
    assert ours.dtype is torch.bfloat16 and ours.shape == theirs.shape
    error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
    assert error < 0.01, error
print("done")
"""


def test_bf16_products_agree_with_torchs_own() -> None:
    # In a process of its own: the kernels are replaced for good.
    result = subprocess.run([sys.executable, "-c", _PRODUCTS], capture_output=True, text=True, timeout=120)
    assert result.stdout == "done\n", result.stderr
    assert result.stderr == ""
