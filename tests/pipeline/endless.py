"""A loop without an end, for tests of interruptions.

Usage: torchrun --nproc-per-node=2 tests/pipeline/endless.py
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import dynmo

# A worker that waits for work, as libraries keep them, does not hold up the end.
workers = ThreadPoolExecutor(1)
workers.submit(int).result()
with dynmo.init(device="cpu", timeout=60) as world:
    torch.manual_seed(0)
    model = dynmo.Sequential([nn.Linear(8, 8) for _ in range(4)], loss=nn.functional.mse_loss)
    pipeline = dynmo.Pipeline(model, world, microbatches=4, balance="none")
    while True:
        result = pipeline.step(torch.ones(8, 8), torch.zeros(8, 8))
        if result.step % 10 == 3:
            print(f"rank {world.rank} is at {result.step}", flush=True)
