"""Trains on process groups that the program made itself.

Usage: torchrun --nproc-per-node=4 tests/pipeline/adopting.py
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dynmo
from dynmo.errors import ConfigError


def train(world: dynmo.World, replicas: int, microbatches: int) -> str:
    """Three steps. Returns the weights' digest."""
    torch.manual_seed(0)
    model = dynmo.Sequential([nn.Linear(8, 8) for _ in range(6)], loss=nn.functional.mse_loss)
    pipeline = dynmo.Pipeline(
        model, world, schedule="zb-h1", microbatches=microbatches, replicas=replicas, balance="none"
    )
    for step in range(3):
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        own = batch.chunk(replicas)[world.rank % replicas]
        pipeline.step(own, own.roll(1, 1))
    return pipeline.digest()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    middle: Any = dist.new_group([1, 2])
    if rank in (1, 2):
        with dynmo.init(middle, device="cpu") as world:
            print(f"middle {world.rank} of {world.size}: {train(world, 1, 4)}", flush=True)
    else:
        try:
            dynmo.init(middle, device="cpu")
        except ConfigError as error:
            print(f"refused: {error}", flush=True)
    with dynmo.init(init_device_mesh("cpu", (2, 2)), device="cpu") as world:
        print(f"mesh {world.rank} of {world.size}: {train(world, 2, 2)}", flush=True)
    with dynmo.init(device="cpu") as world:
        print(f"all {world.rank} of {world.size}: {train(world, 1, 4)}", flush=True)
    total = torch.ones(())
    dist.all_reduce(total)  # the program's own group goes on
    print(f"total {total:g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
