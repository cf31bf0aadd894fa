"""Gathers what an engine has measured: costs, a situation to decide on, and a costs file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynmo.cost.layer_cost import Forecast, LayerCost
from dynmo.cost.profile_file import Profile
from dynmo.pipeline.options import PipelineOptions
from dynmo.plan.mesh_plan import Mesh
from dynmo.plan.situation import Situation, with_all_shares
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.profiler import measure_links
from dynmo.schedule.catalogue import AUTO, shapes_of


def measured_costs(engine: Engine, shapes: tuple[LayerCost, ...] | None) -> tuple[LayerCost, ...]:
    """Returns the measured cost of every layer: seconds per microbatch, and bytes."""
    costs = engine.costs()
    if shapes is None:
        return costs
    from dynmo.pipeline.shape_costs import with_workspace

    return with_workspace(costs, shapes, engine.store.layout.recomputed)


def gather(
    options: PipelineOptions,
    engine: Engine,
    costs: tuple[LayerCost, ...],
    *,
    step: int,
    forecasts: Sequence[Sequence[Forecast]] = (),
    **known: Any,
) -> Situation:
    """Gathers a situation. All ranks call it together, and get the same.

    Args:
        options: Options of the pipeline.
        engine: Holds the layers.
        costs: Cost of each layer from all readings.
        step: The next step.
        forecasts: What each dynamic case expects.
        known: Further fields of `Situation`.
    """
    layout, keeper, elastic = engine.store.layout, engine.schedule_keeper, options.elastic
    links = mesh_links = tuple(keeper.links.items())
    everyone = engine.store.world.everyone
    if not links and everyone.size > 1 and (elastic.reshape or known.get("nodes")):
        mesh_links = tuple(measure_links(everyone, [(0, 1)]).items())
    return Situation(
        step=step,
        end=options.end,
        layers=costs,
        halves=engine.halves(costs),
        names=engine.model.names,
        first_trainable=engine.store.frozen.first_trainable,
        links=links,
        mesh=Mesh(
            layout.ranks, layout.replicas, layout.microbatches, options.samples, layout.schedule
        ),
        partition=layout.partition,
        scheduled=keeper.scheduled,
        speeds=engine.speeds.current,
        scheduled_speeds=keeper.known_speeds,
        is_measured=keeper.known is not None,
        forecasts=tuple(map(tuple, forecasts)),
        chunks=options.chunks,
        objective=keeper.objective,
        post_validation=options.post_validation,
        zero=options.zero,
        expert=options.expert,
        accumulation_groups=engine.store.accumulation_groups,
        moments=engine.store.groups.moments,
        masters=options.precision != "float32",
        shapes=options.mesh_rule(engine.model.layers).shapes(everyone.size)
        if elastic.reshape
        else (),
        mesh_links=mesh_links,
        balance=options.balance,
        elastic=elastic,
        seed=options.seed,
        schedules=()
        if options.schedule != AUTO
        else shapes_of(AUTO, layout.ranks, layout.microbatches, engine.model.layers),
        **known,
    )


def profile_of(
    options: PipelineOptions,
    pipeline: Engine,
    costs: tuple[LayerCost, ...],
    steps: int | None = None,
) -> Profile:
    """Returns the costs of a pipeline's layers as a costs file records them."""
    if options.zero:
        replicas, masters = pipeline.store.world.replicas, options.precision != "float32"
        moments = pipeline.store.groups.moments
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
        schedule=pipeline.store.layout.schedule,
        steps=steps,
    )
