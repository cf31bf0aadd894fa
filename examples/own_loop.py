"""A training loop of one's own: torchrun --nproc-per-node=2 examples/own_loop.py [FOLDER]"""

import pathlib
import sys

import torch
from torch import nn

import dynmo

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own-loop")
with dynmo.init(device="cpu") as world:
    torch.manual_seed(0)  # every rank makes the same layers, and keeps its own
    wide = [nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))) for _ in range(2)]
    layers = [nn.Linear(64, 256), *(nn.Linear(256, 256) for _ in range(5)), *wide]
    model = dynmo.Sequential([*layers, nn.Linear(256, 64)], loss=nn.functional.mse_loss)
    saved = folder if folder.exists() else None  # goes on where it was stopped
    pipeline = dynmo.Pipeline(model, world, microbatches=8, resume=saved)
    for step in range(pipeline.steps, 40):
        batch = torch.randn(512, 64, generator=torch.Generator().manual_seed(step))
        loss = pipeline.step(batch, batch.roll(1, 1)).loss
        if step == 29:
            print(f"rank {world.rank}: loss {loss:.4f}, saved {pipeline.save(folder)}")
    counts = pipeline.mesh.partition.counts
    print(f"rank {world.rank}: layers {counts}, weights {pipeline.digest()}")
