"""Hugging Face's Trainer with compressed activations: one line more than without."""

import tempfile

import torch
from common import arguments, batches, make_model
from transformers import Trainer, TrainingArguments

import agoq_ext

args = arguments()
model = make_model()
agoq_ext.compress_activations(model)  # the one line
rows = torch.cat(list(batches(args.steps)))
dataset = [{"input_ids": row, "labels": row} for row in rows]
with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(
        output_dir=folder,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=max(1, args.steps // 5),
        save_strategy="no",
        report_to="none",
    )
    Trainer(model=model, args=options, train_dataset=dataset).train()
