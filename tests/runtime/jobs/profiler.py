"""Jobs of the pool's ranks for the tests of the profiler."""

from __future__ import annotations

from typing import Any

import torch

from dynmo.balance.partition import Partition
from dynmo.models.emulated import make_layers
from dynmo.runtime.comm.world import World
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.options import StepOptions
from dynmo.runtime.engine.profiler import measure_links
from tests.runtime.fake_time import emulated_time


def profile(
    world: World, f: list[float], b: list[float], w: list[float], counts: list[int]
) -> list[dict[str, Any]]:
    """The costs of emulated layers after a step."""
    model = make_layers(f, b, w, size=64)
    pipeline = Engine(world, model, Partition(tuple(counts)), StepOptions("zb-h1", microbatches=3))
    ids = torch.zeros(3, 1, dtype=torch.int64)
    with emulated_time():
        pipeline.step(0, ids, ids, lr=0.0)
    return [vars(cost) for cost in pipeline.costs()]


def links(world: World) -> list[list[float]]:
    pairs = [(rank, rank + 1) for rank in range(world.size - 1)]
    return [[link.latency, link.bytes_per_second] for link in measure_links(world, pairs).values()]
