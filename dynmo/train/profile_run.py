"""Measures a model's layers over a few steps, as they run in training.

The ranks, the schedule, the microbatches and the data are the same. Nothing is updated. Every step
is measured by itself. A layer's figure is the median of the steps, so that one disturbed step does
no harm. The first step warms up and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from statistics import median

from dynmo import LayerCost, Loader, Pipeline
from dynmo.config import Config
from dynmo.cost.costs_file import Profile
from dynmo.runtime.comm.rendezvous import Rendezvous
from dynmo.train.data import DataLoader, loader_of
from dynmo.train.setup import own_cases, start

Listener = Callable[[int], None]
"""Takes the number of measured steps so far."""


def run(
    config: Config, rendezvous: Rendezvous, steps: int, listen: Listener | None = None
) -> Profile:
    """Measures as one rank of the world at `rendezvous`. Every rank gets the same profile.

    The dynamic cases act before the first step only. They may freeze a prefix, for example. Nothing
    changes later.
    """
    options = config.pipeline_arguments(
        optimizer=config.optimizer.model_copy(update={"lr": 0.0}),
        learning_rate=None,
        elastic=None,
        max_grad_norm=0.0,
        check_memory=False,
    )
    with start(config, rendezvous) as (world, model):
        cases = [*config.dynamism.named.values(), *own_cases(config)]
        pipeline = Pipeline(model, world, cases=cases, **options)
        loader = (
            loader_of(config, pipeline, model, {"step": 0})
            if config.data.has_samples
            else DataLoader(config, world, pipeline, model)
        )
        readings: list[tuple[LayerCost, ...]] = []
        for step in range(steps + 1):
            pipeline.measured.forget()
            if isinstance(loader, Loader):
                pipeline.step(next(loader), adapt=step == 0)
            else:
                inputs, targets, _ = loader.train(step)
                pipeline.step(inputs, targets, adapt=step == 0)
            costs = pipeline.measured.costs()
            if step:
                readings.append(costs)
                if listen is not None:
                    listen(step)
        loader.close()
        measured = tuple(_median(layer) for layer in zip(*readings, strict=True))
        return pipeline.measured.profile(steps, measured)


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
