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


def profile(
    world: World, f: list[float], b: list[float], w: list[float], counts: list[int]
) -> list[dict[str, Any]]:
    """Five steps of emulated layers.

    Args:
        world: World of all ranks.
        f: Seconds of each layer's F.
        b: Seconds of each layer's B.
        w: Seconds of each layer's W.
        counts: Number of layers on each rank.

    Returns:
        The costs of all layers, gathered.
    """
    model = make_layers(f, b, w, size=64)
    pipeline = Engine(world, model, Partition(tuple(counts)), StepOptions("zb-h1", microbatches=3))
    ids = torch.zeros(3, 1, dtype=torch.int64)
    for step in range(5):
        pipeline.step(step, ids, ids, lr=0.0)
    return [vars(cost) for cost in pipeline.costs()]


def links(world: World) -> list[list[float]]:
    pairs = [(rank, rank + 1) for rank in range(world.size - 1)]
    return [[link.latency, link.bytes_per_second] for link in measure_links(world, pairs).values()]
