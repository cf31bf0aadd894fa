"""Trains adapters on the upper half: torchrun ... examples/lora.py FOLDER NEW_FOLDER"""

import json
import sys
from pathlib import Path

from peft import LoraConfig
from transformers import AutoConfig, AutoTokenizer

import dynmo

folder, saved = sys.argv[1:]
blocks = AutoConfig.from_pretrained(folder).num_hidden_layers
upper = list(range(blocks // 2, blocks))
lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], layers_to_transform=upper)
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer(Path(json.__file__).read_text(), return_tensors="pt")["input_ids"][0]
rows = ids.unfold(0, 64, 64)
with dynmo.init(device="cpu") as world:
    model = dynmo.huggingface.from_pretrained(folder, lora=lora, saves_base=False)
    pipeline = dynmo.Pipeline(model, world, microbatches=4, optimizer=dynmo.AdamW(lr=1e-2))
    for step in range(10):
        batch = rows[8 * step % (len(rows) - 7) :][:8]
        print(pipeline.step({"input_ids": batch, "labels": batch}))
    print(f"weights {pipeline.digest()}, layers {pipeline.mesh.partition.counts}")
    dynmo.huggingface.save_pretrained(pipeline, saved)  # what peft loads
