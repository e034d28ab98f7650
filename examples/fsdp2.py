"""FSDP2 with gradients and parameters exchanged in int8, and activations compressed."""

import torch
import torch.distributed as dist
from common import arguments, batches, join_group, make_model
from torch.distributed.fsdp import fully_shard

import agoq_ext
from agoq_ext.fsdp import quantize_comms

args = arguments()
rank, world, device = join_group()
model = make_model().to(device)
agoq_ext.compress_activations(model)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
quantize_comms(model, reduce_scatter="int8", all_gather="int8")
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step, ids in enumerate(batches(args.steps, rank)):
    loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and (step % 10 == 0 or step + 1 == args.steps):
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
