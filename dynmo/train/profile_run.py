"""Measures a model's layers over a few steps, as they run in training.

The ranks, the schedule, the microbatches and the data are the same. Nothing is updated. Every step
is measured by itself. A layer's figure is the median of the steps, so that one disturbed step does
no harm. The first step warms up and is not counted.
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
"""Takes the number of measured steps so far, and the seconds of the last one."""


def run(
    config: Config, rendezvous: Rendezvous, steps: int, listen: Listener | None = None
) -> Profile:
    """Measures as one rank of the world at `rendezvous`.

    Args:
        config: Config of the run.
        rendezvous: Where the ranks meet.
        steps: Number of steps to measure.
        listen: Called after every measured step.

    Returns:
        The profile, the same on every rank.

    Raises:
        ConfigError: Input turns out wrong only now.
        RunError: The run fails.
    """
    with start(config, rendezvous) as (world, model):
        return measure(config, world, model, steps, listen)


def measure(
    config: Config, world: World, model: Model, steps: int, listen: Listener | None = None
) -> Profile:
    """Measures the layers in a world that has met.

    The dynamic cases act before the first step only. They may freeze a prefix, for example. Nothing
    changes later.

    Args:
        config: Config of the run.
        world: All ranks.
        model: The model to measure.
        steps: Number of steps to measure.
        listen: Called after every measured step.

    Returns:
        The profile, the same on every rank.
    """
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
    """Returns a layer's cost with the median of each figure.

    Sizes are the same in every step, unless they depend on a microbatch's content.
    """
    middle = {
        field.name: median(getattr(cost, field.name) for cost in costs)
        for field in fields(LayerCost)
    }
    return LayerCost(
        **{name: value if name in ("f", "b", "w") else int(value) for name, value in middle.items()}
    )
