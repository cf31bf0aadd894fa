"""Makes a costs file from the measured layers of a pipeline."""

from __future__ import annotations

from dynmo.cost.layer_cost import LayerCost
from dynmo.cost.profile_file import Profile
from dynmo.pipeline.optimizers import settings_of
from dynmo.pipeline.options import PipelineOptions
from dynmo.planner.situation import with_all_shares
from dynmo.runtime.engine.engine import Engine


def profile_of(
    options: PipelineOptions,
    pipeline: Engine,
    costs: tuple[LayerCost, ...],
    steps: int | None = None,
) -> Profile:
    """Returns the costs of a pipeline's layers as a costs file records them."""
    if options.zero:
        replicas, masters = pipeline.store.world.replicas, options.precision != "float32"
        moments = settings_of(options.optimizer).moments
        costs = tuple(with_all_shares(cost, replicas, moments, masters) for cost in costs)
    return Profile(
        layers=costs,
        names=pipeline.model.names,
        first_trainable=pipeline.store.frozen.first_trainable,
        links=tuple(pipeline.schedule_keeper.links.items()),
        model=None if pipeline.model.options is None else pipeline.model.options.kind,
        microbatch=options.micro_batch,
        microbatches=options.all_microbatches // pipeline.store.world.replicas,
        ranks=pipeline.store.layout.shape[0],
        partition=pipeline.store.layout.partition.counts,
        schedule=options.schedule,
        steps=steps,
    )
