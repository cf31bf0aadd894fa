"""Gathers what an engine has measured: costs, a problem to decide on, and a costs file."""

from __future__ import annotations

from dataclasses import replace

from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import Forecast, LayerCost
from dynmo.pipeline.options import PipelineOptions
from dynmo.plan.problem import Choice, Kind, Mesh, Problem, Rules
from dynmo.plan.recompute import recompute_as_workspace
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.profiler import measure_links
from dynmo.schedule.catalogue import AUTO, shapes_of

UNKNOWN_LINK = 1e9
"""Bytes per second between ranks, if there is one rank and nothing to measure."""


def measured_costs(
    engine: Engine,
    shapes: tuple[LayerCost, ...] | None,
    costs: tuple[LayerCost, ...] | None = None,
) -> tuple[LayerCost, ...]:
    """Returns the measured cost of every layer: seconds per microbatch, and bytes.

    A workspace is memory that an op needs beside the bytes that it keeps. A run cannot measure it,
    so it comes from the shapes. `costs` may be others than those of all readings.
    """
    costs = engine.costs() if costs is None else costs
    if shapes is None:
        return costs
    shapes = recompute_as_workspace(shapes, engine.store.layout.recomputed)
    return tuple(
        replace(
            cost,
            workspace_bytes=shape.workspace_bytes,
            forward_workspace_bytes=shape.forward_workspace_bytes,
            weight_workspace_bytes=shape.weight_workspace_bytes,
        )
        for cost, shape in zip(costs, shapes, strict=True)
    )


def problem_of(
    options: PipelineOptions,
    engine: Engine,
    costs: tuple[LayerCost, ...],
    step: int,
    kind: Kind,
    machines: tuple[str, ...],
    forecasts: tuple[tuple[Forecast, ...], ...],
) -> Problem:
    """Returns what an engine knows before a step. All ranks get the same.

    Args:
        options: Options of the pipeline.
        engine: Holds the layers.
        costs: Cost of each layer from all readings.
        step: The next step.
        kind: What is decided on. Other meshes need some link, even if a pipeline has one rank now.
        machines: Name of the machine of each rank. Empty if none is known.
        forecasts: What each dynamic case expects.
    """
    scheduled = engine.schedule_maker.replica(costs, engine.speeds.current).problem
    profile = replace(profile_of(options, engine, costs), microbatch=options.samples)
    everyone, zero = engine.store.world.everyone, options.zero
    if kind == "placement":  # the replicas stay, and so do their measured shares
        profile, zero = replace(profile, layers=costs), 0
    elif not profile.links and everyone.size > 1:
        profile = replace(profile, links=tuple(measure_links(everyone, [(0, 1)]).items()))
    rates = [link.bytes_per_second for _, link in profile.links]
    work = replace(
        scheduled.work,
        zero=zero,
        cost=options.balance.cost,
        seed=options.seed,
        step=step,
        end=options.end,
    )
    return replace(
        scheduled,
        profile=profile,
        work=work,
        bandwidth=min(rates, default=UNKNOWN_LINK),
        machines=machines,
        forecasts=forecasts,
    )


def choice_of(options: PipelineOptions, engine: Engine) -> Choice:
    """Returns the mesh and the placement with which an engine trains.

    Measured costs have recomputation in them.
    """
    layout = engine.store.layout
    sizes = layout.microbatches, options.samples
    return Choice(Mesh(layout.ranks, layout.replicas, *sizes, layout.schedule), layout.partition)


def rules_of(options: PipelineOptions, engine: Engine, kind: Kind) -> Rules:
    """Returns what a run may change."""
    rules = Rules(kind, options.balance, options.elastic)
    layout, layers, elastic = engine.store.layout, engine.model.layers, options.elastic
    if kind == "placement":
        if options.schedule != AUTO:
            return rules
        names = shapes_of(AUTO, layout.ranks, layout.microbatches, layers)
        return replace(rules, schedules=names)
    if kind == "mesh":
        meshes = options.mesh_rule(layers).shapes(engine.store.world.everyone.size)
        return replace(rules, replicas=tuple(replicas for _, replicas in meshes))
    mesh, groups = choice_of(options, engine).mesh, engine.store.accumulation_groups
    # Replicas that share experts stay together.
    replicas = mesh.fewer_replicas(groups) if options.expert == 1 else (mesh.replicas,)
    sizes = mesh.near_sizes(groups, replicas) if elastic.retune else ()
    return replace(rules, replicas=replicas, sizes=sizes)


def profile_of(
    options: PipelineOptions,
    pipeline: Engine,
    costs: tuple[LayerCost, ...],
    steps: int | None = None,
) -> Profile:
    """Returns the costs of a pipeline's layers as a costs file records them."""
    return Profile(
        layers=whole_costs(options, pipeline, costs),
        names=pipeline.model.names,
        first_trainable=pipeline.store.frozen.first_trainable,
        links=tuple(pipeline.schedule_maker.links.items()),
        model=None if pipeline.model.options is None else pipeline.model.options.kind,
        microbatch=options.micro_batch,
        microbatches=options.all_microbatches // pipeline.store.world.replicas,
        ranks=pipeline.store.layout.shape[0],
        partition=pipeline.store.layout.partition.counts,
        schedule=pipeline.store.layout.schedule,
        steps=steps,
    )


def whole_costs(
    options: PipelineOptions, engine: Engine, costs: tuple[LayerCost, ...]
) -> tuple[LayerCost, ...]:
    """Returns measured costs without ZeRO's division."""
    if not options.zero:
        return costs
    masters, moments = options.precision != "float32", engine.store.groups.moments
    replicas = engine.store.world.replicas
    return tuple(with_all_shares(cost, replicas, moments, masters) for cost in costs)


def with_all_shares(cost: LayerCost, replicas: int, moments: int, masters: bool) -> LayerCost:
    """Returns a layer's cost with all replicas' shares of its optimizer state.

    No share is larger than this one, which bounds them. Not every parameter may have a master. For
    a frozen layer nothing else is known.
    """
    most = replicas * cost.optimizer_bytes
    if not cost.gradient_bytes:
        return replace(cost, optimizer_bytes=most)
    copies = (1 + moments) * cost.gradient_bytes if cost.rollback_bytes else 0
    state = min(most, (moments + masters) * cost.gradient_bytes)
    return replace(cost, optimizer_bytes=state, rollback_bytes=copies)
