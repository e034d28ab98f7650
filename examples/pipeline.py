"""Two pipeline stages of encoder layers; the stage that stores fewer micro-batches uses wider codes."""

import torch
import torch.distributed as dist
from common import arguments, join_group
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from agoq_ext.pipeline import compress_stages

args = arguments(micro_batches=4)
rank, world, device = join_group()
torch.manual_seed(rank)
layer = nn.TransformerEncoderLayer(
    64, 4, 256, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
)
module = nn.Sequential(layer).to(device)
stage = PipelineStage(module, rank, world, device)
schedule = Schedule1F1B(stage, args.micro_batches, loss_fn=nn.functional.mse_loss)
report = compress_stages(schedule, policy="paper")
print(f"rank {rank}: {report.stored} micro-batches stored, in {report.bits} bits", flush=True)
optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
for step in range(args.steps):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4 * args.micro_batches, 16, 64, generator=generator).to(device)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x.flip(-1), losses=losses)
    optimizer.step()
    optimizer.zero_grad()
    if losses and (step % 10 == 0 or step + 1 == args.steps):
        print(f"step {step}: loss {torch.stack(losses).mean().item():.3f}")
dist.destroy_process_group()
