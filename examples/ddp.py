"""DistributedDataParallel with gradients averaged in int8: one line more than without."""

import torch
import torch.distributed as dist
from common import arguments, batches, join_group, make_model
from torch.nn.parallel import DistributedDataParallel

import agoq_ext

args = arguments()
rank, world, device = join_group()
model = DistributedDataParallel(make_model().to(device))
agoq_ext.ddp.register(model, format="int8")
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step, ids in enumerate(batches(args.steps, rank)):
    loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and (step % 10 == 0 or step + 1 == args.steps):
        sent = agoq_ext.collectives.bytes_sent() / 1e6
        print(f"step {step}: loss {loss.item():.3f}, {sent:.2f} MB sent")
dist.destroy_process_group()
