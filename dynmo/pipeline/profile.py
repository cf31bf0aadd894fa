"""Makes a costs file from the measured layers of a pipeline."""

from __future__ import annotations

from dataclasses import replace

from dynmo.cost.layer_cost import LayerCost
from dynmo.cost.profile_file import Profile
from dynmo.pipeline.optimizers import settings_of
from dynmo.pipeline.options import PipelineOptions
from dynmo.runtime.engine.engine import Engine


def profile_of(
    options: PipelineOptions,
    pipeline: Engine,
    costs: tuple[LayerCost, ...],
    steps: int | None = None,
) -> Profile:
    """Returns the costs of a pipeline's layers as a costs file records them.

    Args:
        options: Options of the pipeline.
        pipeline: Its pipeline.
        costs: Cost of each layer, as `Engine.costs` gathers them.
        steps: The number of measured steps.

    Returns:
        The profile. Its layers have the optimizer state of all replicas, even if ZeRO divides it.
    """
    return Profile(
        layers=tuple(_whole(options, pipeline, cost) for cost in costs) if options.zero else costs,
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


def _whole(options: PipelineOptions, pipeline: Engine, cost: LayerCost) -> LayerCost:
    """Returns the layer's cost with all replicas' shares of its optimizer state.

    For a frozen layer only an upper bound is known: no share is larger than this one.
    """
    moments, masters = settings_of(options.optimizer).moments, options.precision != "float32"
    if not cost.gradient_bytes:
        return replace(cost, optimizer_bytes=pipeline.store.world.replicas * cost.optimizer_bytes)
    copies = (1 + moments) * cost.gradient_bytes if cost.rollback_bytes else 0
    return replace(
        cost, optimizer_bytes=(moments + masters) * cost.gradient_bytes, rollback_bytes=copies
    )
