"""Asks the planner for a running engine: would another mesh repay its reshape?

The ranks stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dynmo.cost.layer_cost import LayerCost
from dynmo.pipeline.options import PipelineOptions
from dynmo.pipeline.profile import profile_of
from dynmo.planner.mesh_plan import Mesh
from dynmo.planner.mesh_search import MeshRequest
from dynmo.planner.reshape import Reshape, reshape
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.profiler import measure_links

# Bytes per second between ranks, if there is one rank and nothing to measure.
_UNKNOWN_LINK = 1e9


def current_mesh(options: PipelineOptions, engine: Engine) -> Mesh:
    """Returns the mesh that the engine runs on.

    Args:
        options: Options of the pipeline.
        engine: Holds the layers.
    """
    world = engine.store.world
    return Mesh(
        world.size,
        world.replicas,
        options.all_microbatches // world.replicas,
        options.samples,
        options.schedule,
    )


def mesh_request(
    options: PipelineOptions,
    engine: Engine,
    costs: tuple[LayerCost, ...],
    memory_limit: int | None,
    replicas: tuple[int, ...],
) -> MeshRequest:
    """Returns the request for a search for another mesh.

    All ranks call it together, since a pipeline of one rank has no links and measures one.

    Args:
        options: Options of the pipeline.
        engine: Holds the layers.
        costs: Cost of each layer.
        memory_limit: Bytes of a rank. None means unlimited.
        replicas: The numbers of replicas that are allowed.
    """
    everyone = engine.store.world.everyone
    # Links between replicas count like links between stages: as the slowest measured link.
    links = engine.schedule_keeper.links or measure_links(
        everyone, [(0, 1)] if everyone.size > 1 else []
    )
    slowest = min((link.bytes_per_second for link in links.values()), default=_UNKNOWN_LINK)
    return MeshRequest(
        replace(profile_of(options, engine, costs), links=tuple(links.items())),
        gpus=everyone.size,
        global_batch=options.global_batch,
        micro_batches=(options.samples,),
        schedules=(options.schedule,),
        chunks=options.chunks,
        memory_limit=memory_limit,
        zero=options.zero,
        bandwidth=slowest,
        objective=engine.schedule_keeper.objective,
        replicas=replicas,
        accumulation_groups=options.accumulation_groups,
    )


def mesh_question(
    options: PipelineOptions,
    engine: Engine,
    costs: tuple[LayerCost, ...],
    steps: int,
    memory_limit: int | None,
) -> Callable[[tuple[LayerCost, ...]], Reshape]:
    """Returns a pure function from costs to the best mesh.

    All ranks call it together.

    Args:
        options: Options of the pipeline.
        engine: Holds the layers.
        costs: Cost of each layer from all readings.
        steps: Number of steps in which a reshape must repay itself.
        memory_limit: Bytes of a rank. None means unlimited.
    """
    current, balance = current_mesh(options, engine), options.balance
    shapes = options.mesh_rule(engine.model.layers).shapes(engine.store.world.everyone.size)
    request = mesh_request(
        options, engine, costs, memory_limit, tuple(replicas for _, replicas in shapes)
    )

    def decide(layers: tuple[LayerCost, ...]) -> Reshape:
        return reshape(
            with_costs(request, options, engine, layers),
            current,
            engine.store.layout.partition,
            horizon_steps=steps,
            seconds_per_byte=1 / request.bandwidth,
            margin=balance.margin,
            hysteresis=balance.hysteresis,
        )

    return decide


def with_costs(
    request: MeshRequest, options: PipelineOptions, engine: Engine, layers: tuple[LayerCost, ...]
) -> MeshRequest:
    """Returns the same request at other costs.

    Args:
        request: A request at some costs.
        options: Options of the pipeline.
        engine: Holds the layers.
        layers: Cost of each layer.
    """
    return replace(
        request, profile=replace(profile_of(options, engine, layers), links=request.profile.links)
    )
