"""What a running engine asks the planner: would another mesh of the same ranks repay its
reshape?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dynmo.config import Config, mesh_shapes
from dynmo.cost.layer_cost import LayerCost
from dynmo.cost.profile_file import Profile
from dynmo.pipeline.engine import Engine
from dynmo.pipeline.profile import profile_of
from dynmo.planner.mesh_plan import Mesh
from dynmo.planner.mesh_search import MeshRequest
from dynmo.planner.reshape import Reshape, reshape
from dynmo.runtime.engine.profiler import measure_links


def current_mesh(config: Config, engine: Engine) -> Mesh:
    """Returns the mesh that the engine runs on.

    Args:
        config: Of the run.
        engine: Holds the layers.
    """
    world = engine.world
    return Mesh(
        world.size,
        world.replicas,
        config.all_microbatches // world.replicas,
        config.train.micro_batch,
        config.pipeline.schedule,
    )


def mesh_question(
    config: Config, engine: Engine, costs: tuple[LayerCost, ...], steps: int, memory_limit: int | None
) -> Callable[[tuple[LayerCost, ...]], Reshape]:
    """Returns a pure function from costs to the best mesh.

    All ranks call it together, since a pipeline of one rank has no links and measures one.

    Args:
        config: Of the run.
        engine: Holds the layers.
        costs: Cost of each layer by all readings.
        steps: Number of steps in which a reshape must repay itself.
        memory_limit: Bytes of a rank. None means unlimited.
    """
    world, current, balance = engine.world, current_mesh(config, engine), config.balance
    # Between replicas as between stages: the slowest of the links that were measured.
    links = engine.schedule_keeper.links or measure_links(world.everyone, [(0, 1)])
    slowest = min(link.bytes_per_second for link in links.values())

    def profile(layers: tuple[LayerCost, ...]) -> Profile:
        return replace(profile_of(config, engine, layers), links=tuple(links.items()))

    request = MeshRequest(
        profile(costs),
        gpus=world.everyone.size,
        global_batch=config.train.global_batch,
        micro_batches=(config.train.micro_batch,),
        schedules=(config.pipeline.schedule,),
        chunks=config.pipeline.chunks,
        memory_limit=memory_limit,
        zero=config.parallel.zero,
        bandwidth=slowest,
        objective=engine.objective,
        replicas=tuple(data for _, data in mesh_shapes(config)),
        accumulation_groups=config.accumulation_groups,
    )

    def decide(layers: tuple[LayerCost, ...]) -> Reshape:
        return reshape(
            *(replace(request, profile=profile(layers)), current, engine.partition),
            horizon_steps=steps,
            seconds_per_byte=1 / slowest,
            margin=balance.margin,
            hysteresis=balance.hysteresis,
        )

    return decide
