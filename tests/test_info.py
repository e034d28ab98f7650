"""`agoq info`, the command's exit statuses, and the loading of the native libraries."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import agoq_ext
from agoq_ext import _native, cli, info, layout
from agoq_ext.errors import UserError


def run_agoq(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agoq_ext.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_info_json_holds_the_facts() -> None:
    done = run_agoq("info", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts == json.loads(json.dumps(info.collect()))
    assert facts["versions"]["agoq_ext"] == agoq_ext.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["compiler"] != "unknown"
    assert facts["cpu"]["isa"] in ("avx512", "avx2", "baseline")
    assert {f["name"]: f["bits"] for f in facts["formats"]} == {
        f.name: f.bits for f in layout.FORMATS.values()
    }
    # Either the library is there, or there is a reason.
    assert facts["cuda"]["loaded"] == (facts["cuda"]["reason"] == "")


def test_info_text_names_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    text = {line[:13].strip(): line[14:] for line in lines}
    assert text["agoq_ext"] == agoq_ext.__version__
    assert all(name in text["formats"] for name in layout.FORMATS)
    facts = info.collect()
    assert text["CPU kernels"] == facts["cpu"]["isa"]
    assert text["CUDA library"] == ("loaded" if facts["cuda"]["loaded"] else facts["cuda"]["reason"])


def test_info_text_of_a_cuda_build() -> None:
    facts = info.collect()
    facts["cuda"] = {
        "loaded": True,
        "reason": "",
        "architectures": ["80-real", "90a-real"],
        "nvcc": "13.0.88",
        "torch_cuda": "13.0",
    }
    text = info.render(facts)
    assert "CUDA library  loaded" in text
    assert "CUDA targets  80-real, 90a-real" in text
    assert "nvcc 13.0.88" in text and "(CUDA 13.0)" in text


def test_info_does_not_load_the_training_code() -> None:
    script = (
        "import sys; from agoq_ext import cli; cli.main(['info']); "
        "heavy = ('agoq_ext.training', 'transformers'); "
        "sys.exit(any(name.startswith(heavy) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120).returncode == 0


@pytest.mark.parametrize("arguments", [["info", "--nope"], ["info", "extra"]])
def test_wrong_arguments_exit_with_2_and_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1 and captured.err.startswith("agoq: error: ")


def replace_info(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(cli, "_run_info", fail)


def test_user_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    replace_info(monkeypatch, UserError("data: /nowhere\n  cannot be read"))
    assert cli.main(["info"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "agoq: error: data: /nowhere cannot be read\n"


def test_interrupt_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_info(monkeypatch, KeyboardInterrupt())
    assert cli.main(["info"]) == 130
    assert capsys.readouterr().err == "agoq: interrupted\n"


def test_closed_pipe_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "agoq_ext.cli", "info"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert done.returncode == 141 and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_info(monkeypatch, RuntimeError("a defect"))
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(["info"])


# --- the native libraries -----------------------------------------------------------------------------------


def test_missing_cpu_library_says_how_to_build(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"_C\.abi3\.so is missing; reinstall it with `pip install "):
        _native._load(tmp_path)

    (tmp_path / "CMakeLists.txt").touch()
    (tmp_path / "python" / "agoq_ext").mkdir(parents=True)
    with pytest.raises(
        ImportError, match=r"is missing; build it with `pip install -e \. --no-build-isolation"
    ):
        _native._load(tmp_path / "python" / "agoq_ext")


def test_broken_cpu_library_is_an_import_error(tmp_path: Path) -> None:
    (tmp_path / _native.CPU_LIBRARY).write_bytes(b"not a library")
    (tmp_path / "_build_info.json").write_text('{"torch": "2.99.0"}')
    with pytest.raises(ImportError, match=r"built with torch 2\.99\.0, does not load under torch 2\."):
        _native._load(tmp_path)


def test_old_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(ImportError, match=r"needs torch >= 2\.11; this is torch 2\.10\.1"):
        _native._load(tmp_path)


def test_reason_of_a_cuda_library_that_was_not_built(tmp_path: Path) -> None:
    assert _native._load_cuda(tmp_path, {}) == "not built"
    build_info = {"cuda": {"built": False, "reason": "AGOQ_CUDA=OFF was set for the build"}}
    assert _native._load_cuda(tmp_path, build_info) == "not built: AGOQ_CUDA=OFF was set for the build"


def test_reason_of_a_cuda_library_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / _native.CUDA_LIBRARY).write_bytes(b"not a library")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert _native._load_cuda(tmp_path, {}) == f"built, but torch {torch.__version__} has no CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert _native._load_cuda(tmp_path, {}).startswith("built, but it does not load under torch ")


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_unreadable_build_info_is_empty(tmp_path: Path, text: str) -> None:
    assert _native.read_build_info(tmp_path) == {}
    (tmp_path / "_build_info.json").write_text(text)
    assert _native.read_build_info(tmp_path) == {}
