"""Two sites that train apart and exchange outer gradients in 4 bits, a fragment every few steps, while they train."""

import torch
import torch.distributed as dist
from common import arguments, batches, join_group, make_model

import agoq_ext

args = arguments(sync_every=10)
rank, world, device = join_group()
model = make_model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
diloco = agoq_ext.StreamingDiLoCo(
    model, optimizer, sync_every=args.sync_every, fragments=2, overlap=1, warmup_steps=args.steps // 3
)
for ids in batches(args.steps, rank):
    loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss
    loss.backward()
    diloco.average_gradients()
    optimizer.step()
    optimizer.zero_grad()
    diloco.step()
with diloco.outer_parameters(), torch.no_grad():
    ids = next(batches(1, rank=99)).to(device)
    loss = model(input_ids=ids, labels=ids).loss
if rank == 0:
    print(
        f"loss of the outer parameters {loss.item():.3f}; {diloco.bytes_sent / 1e6:.3f} MB of outer gradients sent"
    )
dist.destroy_process_group()
