"""Every Python block of README.md and docs/ runs, in order, a page in one process of a world of one.

What a block takes for granted (a model, a batch, a group) is set up here by page and number.
"""

from __future__ import annotations

import os
import re
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from distributed import run_world

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]

NEW_GROUP = "import torch.distributed as dist\ndist.destroy_process_group()\n"
LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
ids = torch.randint(64, (2, 16))
"""
TRAINED = """
import torch, agoq_ext
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())
def loss(model, batch):
    return model(batch).square().mean()
"""
# What comes before a block, by page and number from 0.
SETUP: dict[tuple[str, int], str] = {
    ("README.md", 3): NEW_GROUP,
    ("README.md", 4): "gradient = torch.randn(4096)",
    ("docs/activations.md", 0): LLAMA,
    ("docs/activations.md", 1): """
x = torch.randn(2, 16, 64, requires_grad=True)
norm_weight, norm2_weight, norm3_weight = (torch.ones(64) for _ in range(3))
wq, wk, wv, wo, w_gate, w_up, w_down, w_head = (torch.randn(64, 64) / 8 for _ in range(8))
labels = torch.randint(64, (2, 16))
def heads(t):
    return t.unflatten(-1, (4, 16)).transpose(1, 2)
""",
    ("docs/activations.md", 2): """
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
inputs = torch.randn(16, 64)
""",
    ("docs/activations.md", 4): LLAMA
    + "batches = [{'input_ids': ids, 'labels': ids}]\nmemory_budget = 10**6\n",
    ("docs/activations.md", 5): """
class MyBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = torch.nn.LayerNorm(64), torch.nn.LayerNorm(64)
        self.q, self.k, self.v, self.out = (torch.nn.Linear(64, 64) for _ in range(4))
        self.mlp = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
model = MyBlock()
""",
    ("docs/collectives.md", 0): """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
tensor, share, whole = torch.randn(4096), torch.empty(4096), torch.empty(4096)
model = torch.nn.Linear(64, 64)
model(torch.randn(2, 64)).sum().backward()
parameters = list(model.parameters())
nodes = ranks_of_a_node = 1
init_once, dist.init_process_group = dist.init_process_group, lambda name: None  # there is a group already
""",
    ("docs/diloco.md", 0): TRAINED
    + "data = [torch.randn(4, 64) for _ in range(3)]\nevaluate = lambda model: loss(model, data[0])\n",
    ("docs/gradients.md", 0): TRAINED
    + "batches = [[torch.randn(4, 64) for _ in range(3)] for _ in range(2)]\n",
    ("docs/gradients.md", 1): "store.close()\n",
    ("docs/gradients.md", 2): "from torch.distributed.fsdp import fully_shard\nfully_shard(model)\n",
    ("docs/training.md", 0): NEW_GROUP
    + """
import torch
from agoq_ext import cli
assert cli.main(["train", "--out", "run", "--steps", "1", "--batch", "1", "--eval-windows", "1"]) == 0
""",
}
NOT_RUN = {
    **({} if find_spec("cupy") else {("docs/interoperation.md", 1): "needs CuPy"}),
    ("docs/gradients.md", 3): "needs eight GPUs; tests/test_fsdp.py makes such a mesh of four ranks",
    (
        "docs/pipeline.md",
        0,
    ): "needs a pipeline of ranks; tests/test_pipeline.py and examples/pipeline.py have them",
    ("docs/testing-cuda.md", 0): "is a part of tests/cuda_kernels",
}


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


def run_page(rank: int, world: int, page: str, folder: str) -> int:
    os.chdir(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    namespace: dict[str, Any] = {"__name__": "page"}
    ran = 0
    for number, block in enumerate(blocks_of(page)):
        if (page, number) not in NOT_RUN:
            exec(
                compile(SETUP.get((page, number), ""), f"set-up of {page}, block {number}", "exec"), namespace
            )
            exec(compile(block, f"{page}, block {number}", "exec"), namespace)
            ran += 1
    return ran


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)])
def test_blocks_run(page: str, tmp_path: Path) -> None:
    left_out = sum(where == page for where, _ in NOT_RUN)
    assert run_world(tmp_path, 1, run_page, page, str(tmp_path), timeout=120) == [
        len(blocks_of(page)) - left_out
    ]


def test_set_ups_belong_to_blocks() -> None:
    for page, number in [*SETUP, *NOT_RUN]:
        assert number < len(blocks_of(page)), f"{page} has no block {number}"
