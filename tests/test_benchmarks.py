"""The scripts in benchmarks/ about CUDA: how they read the compiler's output, and that they run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report() -> ModuleType:
    return load("cuda_report")


# --- cuda_report: what cuobjdump prints ----------------------------------------------------------------------

SYMBOL = "_ZN4agoq4cuda12_GLOBAL__N_15quantize_kernelILNS_6FormatE3ELb0ELb1EEEvNS_12QuantizeArgsE"
RESOURCES = f"""
Fatbin elf code:
================
arch = sm_90a
code version = [1,8]
host = linux
compile_size = 64bit
compressed

Resource usage:
 Common:
  GLOBAL:124 CONSTANT[4]:8
 Function {SYMBOL}:
  REG:29 STACK:8 SHARED:1088 LOCAL:4 CONSTANT[0]:600 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_80
Resource usage:
 Function other:
  REG:40 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:440
"""
SASS = f"""
	code for sm_90a
	.target	sm_90a

		Function : {SYMBOL}
	.headerflags	@"EF_CUDA_ACCELERATORS EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                                /* 0x00000a00ff017b82 */
                                                                                         /* 0x000fe20000000800 */
        /*0010*/              @!P1 LDG.E.128 R4, desc[UR4][R2.64] ;                      /* 0x00000a0402047981 */
        /*0020*/                   LDG.E.128.CONSTANT R8, desc[UR4][R2.64+0x10] ;        /* 0x00000a0402047981 */
        /*0030*/             @!UP0 LDG.E.U16 R3, desc[UR4][R2.64] ;                      /* 0x00000a0402047981 */
        /*0040*/               @P0 STG.E.64 desc[UR4][R2.64], R4 ;                       /* 0x0000000402007986 */
        /*0050*/                   STG.E desc[UR4][R2.64], R4 ;                          /* 0x0000000402007986 */
        /*10060*/                  STL [R1], R4 ;                                        /* 0x0000000401007387 */
        /*10070*/                  LDL.64 R4, [R1] ;                                     /* 0x0000000001047983 */
        /*10080*/                  LDS R4, [R1] ;                                        /* 0x0000000001047984 */
        /*10090*/                  ST.E desc[UR4][R2.64], R4 ;                           /* 0x0000000402007985 */
		..........

		Function : unknown
        /*0000*/                   LDL R4, [R1] ;                                        /* 0x0000000001047983 */
"""


def test_report_reads_resources_and_sass(report: ModuleType) -> None:
    kernels = {(k.architecture, k.symbol): k for k in report.parse_resources(RESOURCES.splitlines())}
    assert set(kernels) == {("sm_90a", SYMBOL), ("sm_80", "other")}
    assert kernels["sm_80", "other"].registers == 40
    report.parse_sass(SASS.splitlines(), kernels)
    kernel = kernels["sm_90a", SYMBOL]
    assert (kernel.registers, kernel.shared, kernel.local, kernel.local_accesses) == (29, 1088, 12, 2)
    assert (kernel.loads, kernel.stores, kernel.generic) == ({128: 2, 16: 1}, {64: 1, 32: 1}, 1)
    kernel.name = report.short_name(
        "void agoq::cuda::(anonymous namespace)::quantize_kernel<(agoq::Format)3, false, true>(agoq::QuantizeArgs)"
    )
    assert (kernel.name, kernel.kernel) == ("quantize_kernel<(Format)3, false, true>", "quantize_kernel")
    assert kernel.complaints() == [
        "12 bytes of local memory, 2 accesses to it",
        "2 of 3 global loads are 128 bits wide",
        "1 accesses by generic addresses",
    ]
    (line,) = report.table([kernel])[1:]
    assert line.split() == [
        "quantize_kernel", "sm_90a", "1", "29", "1088", "14", "2", "0", "1", "bad"
    ]  # fmt: skip


def test_report_asks_nothing_of_scalar_instantiations(report: ModuleType) -> None:
    def complaints(name: str, **counts: dict[int, int]) -> list[str]:
        return report.Instantiation("s", "sm_80", name=name, **counts).complaints()

    assert complaints("quantize_kernel<(Format)3, true, false>") == []
    assert complaints("quantize_kernel<(Format)3, true, true>", loads={128: 3}) == []
    assert complaints("dequantize_kernel<(Format)0, true>", stores={128: 2, 32: 8}) == [
        "2 of 3 global stores are 128 bits wide"
    ]
    assert complaints("norm_kernel<(Format)0>") == []
    assert "not in the table" in complaints("new_kernel<1>")[0]


def test_report_knows_every_kernel(report: ModuleType) -> None:
    sources = "".join(p.read_text() for p in (BENCHMARKS.parent / "src" / "cuda").glob("*.cu"))
    kernels = set(re.findall(r"\b(\w+_kernel)\(", sources))
    assert kernels == set(report.WIDE_ACCESSES) | report.NO_DENSE


# --- gpu_check ------------------------------------------------------------------------------------------------


def test_gpu_kernels_measures_every_op(tmp_path: Path) -> None:
    module = load("gpu_kernels")
    results = module.measure_all(torch.device("cpu"), 1, ["int4"], ["bfloat16"], 1)
    assert len(results) == 15 and all(r.ms > 0 and r.bytes > 0 for r in results)
    goals = {r.op: r.goal for r in results}
    assert (goals["quantize"], goals["quantize stochastic"], goals["reduce W=8"]) == (0.90, 0.75, 0.85)
    # 1 MiB of bfloat16, codes of 4 bits and a bfloat16 scale for each 128 elements
    elements = 2**19
    assert (
        next(r.bytes for r in results if r.op == "quantize") == elements * 2 + elements // 2 + elements // 64
    )


def test_gpu_check_says_that_it_has_not_run() -> None:
    results = json.loads((BENCHMARKS / "results" / "gpu_kernels.json").read_text())
    assert (
        {"device", "driver", "torch", "commit", "results"} <= set(results)
        if results["run"]
        else results["reason"]
    )


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU driver")
def test_gpu_check_needs_a_gpu() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    done = subprocess.run(
        [bash, str(BENCHMARKS / "gpu_check.sh")], capture_output=True, text=True, env=os.environ
    )
    assert (done.returncode, done.stdout) == (2, "") and "finds no GPU" in done.stderr
