"""A training loop of one's own: activations kept in 5 and 6 bits, gradients accumulated in 8."""

from common import arguments, batches, make_model
from torch import optim

import agoq_ext

args = arguments(micro_batches=2)
model = make_model()
print(agoq_ext.compress_activations(model))
store = agoq_ext.GradientStore(model)
optimizer = optim.AdamW(model.parameters(), 1e-3)
data = batches(args.steps * args.micro_batches)
for step in range(args.steps):
    for _ in range(args.micro_batches):
        ids = next(data)
        loss = model(input_ids=ids, labels=ids).loss / args.micro_batches
        loss.backward()  # one process: nothing to exchange, so no_sync() is not needed
    result = store.step(optimizer, max_norm=1.0)
    if step % 10 == 0 or step + 1 == args.steps:
        print(f"step {step}: loss {loss.item() * args.micro_batches:.3f}, gradient norm {result.norm:.3f}")
