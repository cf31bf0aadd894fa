"""Measures a model's layers over a few steps, as they run in training: the same ranks, schedule,
microbatches and data, no updates.

Every step is measured for itself and a layer's figure is the median of the steps, so that one
disturbed step does no harm. The first step warms up and is not counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from statistics import median

from dynmo.config import Config
from dynmo.cost.layer_cost import LayerCost
from dynmo.cost.profile_file import Profile
from dynmo.dynamism import make_cases
from dynmo.models.model import Model
from dynmo.pipeline.profile import profile_of
from dynmo.runtime.comm.process_mesh import arrange
from dynmo.runtime.comm.rendezvous import Rendezvous
from dynmo.runtime.comm.world import World
from dynmo.train.assembly import pipeline_for
from dynmo.train.loader import DataLoader
from dynmo.train.setup import first_partition, start
from dynmo.train.shape_costs import shapes_of, with_workspace

Listener = Callable[[int, float], None]
"""Told of every step that was measured: how many so far, and the seconds it took."""


def run(
    config: Config, rendezvous: Rendezvous, steps: int, listen: Listener | None = None
) -> Profile:
    """Measures as one rank of the world at `rendezvous`; returns the same on every rank. Raises as
    `trainer.run` does."""
    with start(config, rendezvous) as (world, model):
        return measure(config, world, model, steps, listen)


def measure(
    config: Config, world: World, model: Model, steps: int, listen: Listener | None = None
) -> Profile:
    """What the dynamic cases do before the first step is done (a prefix that is frozen from the
    start, say); nothing changes later."""
    world = arrange(world, config.parallel.data)
    pipeline = pipeline_for(config, world, model, first_partition(config, model.layers))
    for case in make_cases(config, model.layers):
        case.check(pipeline.modules)
        change = case.act(0, pipeline.case_context)
        if change is not None:
            pipeline.on_workload_change(change.layers)
    loader = DataLoader(config, pipeline)
    readings: list[tuple[LayerCost, ...]] = []
    for step in range(steps + 1):
        start = time.perf_counter()
        pipeline.profiler.forget(range(model.layers))
        inputs, targets, _ = loader.train(step)
        pipeline.step(step, inputs, targets, lr=0.0)
        costs = pipeline.costs()
        if step:
            readings.append(costs)
            if listen is not None:
                listen(step, time.perf_counter() - start)
    measured = tuple(_median(layer) for layer in zip(*readings, strict=True))
    shapes = shapes_of(
        config, model, level=logging.INFO if world.everyone.rank else logging.WARNING
    )
    return profile_of(
        config, pipeline, with_workspace(measured, shapes, pipeline.recomputed), steps
    )


def _median(costs: Sequence[LayerCost]) -> LayerCost:
    """Of each figure; sizes are the same in every step, up to what a microbatch's content
    changes."""
    middle = {
        field.name: median(getattr(cost, field.name) for cost in costs)
        for field in fields(LayerCost)
    }
    return LayerCost(
        **{name: value if name in ("f", "b", "w") else int(value) for name, value in middle.items()}
    )
