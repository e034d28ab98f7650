"""A LoRA fine-tune with peft, activations compressed: frozen weights keep nothing for themselves."""

import torch
from common import arguments, batches, make_model
from peft import LoraConfig, get_peft_model

import agoq_ext

args = arguments()
model = get_peft_model(make_model(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
print(agoq_ext.compress_activations(model))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
for step, ids in enumerate(batches(args.steps)):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step + 1 == args.steps:
        print(f"step {step}: loss {loss.item():.3f}")
