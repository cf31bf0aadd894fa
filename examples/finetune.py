"""Trains a model of transformers: torchrun ... examples/finetune.py FOLDER NEW_FOLDER"""

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

import dynmo

folder, saved = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer(Path(json.__file__).read_text(), return_tensors="pt")["input_ids"][0]
rows = ids.unfold(0, 64, 64)
with dynmo.init(device="cpu") as world:
    model = dynmo.huggingface.from_pretrained(folder)
    pipeline = dynmo.Pipeline(model, world, microbatches=4, optimizer=dynmo.AdamW(lr=1e-3))
    for step in range(20):
        batch = rows[8 * step % (len(rows) - 7) :][:8]
        print(pipeline.step({"input_ids": batch, "labels": batch}))
    print(f"weights {pipeline.digest()}")
    dynmo.huggingface.save_pretrained(pipeline, saved)
    print(dynmo.huggingface.generate(pipeline, "def ", max_new_tokens=8))
