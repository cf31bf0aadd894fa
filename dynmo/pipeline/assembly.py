"""Makes the engine of a pipeline: its first placement, the memory of a rank, its options."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dynmo.models.group_placement import GroupPlacement
from dynmo.models.model import Model
from dynmo.pipeline.case import Dynamism
from dynmo.pipeline.optimizers import settings_of
from dynmo.pipeline.options import PipelineOptions
from dynmo.pipeline.resizing import NextMesh, Resizing
from dynmo.pipeline.saving import SavedPipeline, restore_state
from dynmo.plan.partition import Partition, uniform
from dynmo.runtime.comm.meeting import meeting_of
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.optim.precision import dtype_for, make_scaler
from dynmo.runtime.options import EngineOptions
from dynmo.schedule.catalogue import AUTO, SHAPES, chunks_of, shapes_of
from dynmo.schedule.memory import Limit

if TYPE_CHECKING:
    from dynmo.elastic.newcomer import NewcomerState
    from dynmo.plan.partition import RecomputeRule
    from dynmo.runtime.options import Shapes


def make_engine(
    options: PipelineOptions,
    world: RankGroup,
    model: Model,
    partition: Partition,
    elsewhere: tuple[int, int] | None = None,
    schedule: str | None = None,
    former: Engine | None = None,
) -> Engine:
    replicas = world.replicas if elsewhere is None else elsewhere[1]
    dtype = dtype_for(options.precision, world.device)
    recompute, shapes = _from_shapes(options, model)
    return Engine(
        world,
        model,
        partition,
        EngineOptions(
            schedule=schedule or options.schedule,
            microbatches=options.all_microbatches // replicas,
            chunks=options.chunks,
            alternatives=SHAPES if options.schedule == AUTO else (),
            slices=options.pipeline if options.slices else None,
            memory_limit=options.memory_limit,
            recompute=recompute,
            shapes=shapes,
            optimizer=settings_of(options),
            clip_scope=options.clip_scope,
            scaler=make_scaler(dtype, options.loss_scale, options.loss_scale_window),
            stop_after=options.stop_after,
            post_validation=options.post_validation,
            rollback=options.rollback,
            dtype=dtype,
            seed=options.seed,
            compiles=options.compile,
            head_tokens=options.head_tokens,
            accumulation_groups=options.accumulation_groups,
            zero=options.zero,
            expert=options.expert,
            replicates=options.elastic.reshape
            or any(replicas > 1 for _, _, replicas in options.elastic.reshape_at),
        ),
        elsewhere=elsewhere,
        former=former,
    )


def _from_shapes(options: PipelineOptions, model: Model) -> tuple[RecomputeRule, Shapes | None]:
    """Returns which layers recompute, and a function that finds costs from shapes."""
    is_limited = options.memory_limit is not None
    if options.recompute == "none" and not is_limited:
        return (), None
    from functools import cache, partial

    from dynmo.pipeline.shape_costs import recompute_for, shapes_of

    # The pipeline warns of unknown activations when it is made.
    shapes = cache(partial(shapes_of, options, model, level=logging.INFO))
    return recompute_for(options, model), shapes if is_limited else None


def join_engine(
    options: PipelineOptions,
    world: RankGroup,
    model: Model,
    cases: Sequence[Dynamism],
    newcomer: NewcomerState,
) -> Engine:
    """Makes this process a rank of a running pipeline, whose ranks grow meanwhile."""
    engine = make_engine(
        options,
        world,
        model,
        Partition(newcomer.layers_before),
        newcomer.shape_before,
        newcomer.state["schedule"],
    )
    restore_state(engine, newcomer.state, cases)
    engine.schedule_maker.known = newcomer.costs
    Resizing(engine).arrive(
        newcomer.rank,
        newcomer.shape[0] * newcomer.shape[1],
        newcomer.generation,
        NextMesh(*newcomer.shape, Partition(newcomer.layers), newcomer.microbatches),
        join_timeout=options.elastic.join_timeout,
        groups={
            layer: GroupPlacement(holders, options.expert) for layer, holders in newcomer.groups
        },
    )
    return engine


# -- the first placement, and the memory of a rank ---


def first_partition(
    options: PipelineOptions,
    layers: int,
    pipeline: int | None = None,
    schedule: str | None = None,
) -> Partition:
    """Returns the first placement: `balance.initial` if set, and uniform otherwise.

    Nothing is measured yet, so uniform is the best guess. `schedule` is the one that "auto" begins
    with.
    """
    chunks, initial = options.stages_per_rank, options.balance.initial
    if schedule is not None:
        chunks = chunks_of(schedule, options.chunks)
    ranks = options.pipeline if pipeline is None else pipeline
    if initial is None or ranks != options.pipeline or len(initial) != ranks * chunks:
        return uniform(layers, ranks * chunks)
    return Partition(tuple(initial))


def first_schedule(
    options: PipelineOptions, layers: int, shape: tuple[int, int], saved: SavedPipeline | None
) -> str:
    """Returns the first schedule of a mesh. A training with "auto" keeps the saved one."""
    if options.schedule != AUTO:
        return options.schedule
    pipeline, replicas = shape
    possible = shapes_of(AUTO, pipeline, options.all_microbatches // replicas, layers)
    if saved is not None and saved.state.schedule in possible:
        return saved.state.schedule
    if saved is None and pipeline == options.pipeline:
        possible = options.first_shapes(layers)
    return possible[0]


def first_shape(
    options: PipelineOptions, layers: int, saved: SavedPipeline | None
) -> tuple[int, int]:
    """Returns the first mesh: ranks of a pipeline, and number of replicas.

    A training that chooses its mesh keeps the saved mesh, if the options allow it. A mesh of fewer
    or more ranks comes with the first step.
    """
    started = options.pipeline, options.replicas
    if saved is None:
        shape = options.shape_at(0)
    else:
        meshes = options.mesh_rule(layers).shapes(started[0] * started[1])
        pipeline, replicas = saved.state.shape or (0, 0)
        known = options.elastic.reshape and (pipeline, replicas) in meshes
        shape = (pipeline, replicas) if known else options.shape_at(saved.step)
    return shape if shape[0] * shape[1] == started[0] * started[1] else started


def check_own_rules(options: PipelineOptions) -> None:
    """Tries the user's own balancer and rule for fewer ranks, before anything needs them."""
    if options.balance.balancer.startswith("python:"):
        from dynmo.plan.balancers import balancer

        balancer(options.balance.balancer)
    if options.elastic.algorithm != "fewest":
        from dynmo.plan.balancers import find_rule

        find_rule(options.elastic.algorithm)


def rank_memory_limit(options: PipelineOptions, world: RankGroup) -> Limit:
    """Returns the bytes that the tensors of a rank, or of each, may use. All ranks get the same.

    The default is a part of the CUDA device's memory. Its slices, or the ranks that share it, get
    equal parts. The rest of the memory is for bytes that are in no account of tensors. These are
    the context and its kernels, NCCL's buffers, cuBLAS's workspaces and the allocator's rounding.
    The part depends on the device's size alone, so equal devices have equal limits. Replicas have
    the least of theirs, and so have all ranks if the mesh may change.
    """
    device = world.device
    if options.memory_limit is not None or device.type != "cuda":
        return options.memory_limit
    parts = options.pipeline if options.slices else 1
    if world.staged:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", options.world_size))
        parts *= -(-ranks // torch.cuda.device_count())
    total = torch.cuda.get_device_properties(device).total_memory
    limit = max(1, total * 92 // 100 - (1 << 30)) // parts
    return limit if meeting_of(world).is_outside else _agreed_limit(options, world.everyone, limit)


def _agreed_limit(options: PipelineOptions, everyone: RankGroup, limit: int) -> Limit:
    each: list[int] = everyone.gather(torch.tensor(limit), "everyone's memory limits").tolist()
    elastic, replicas = options.elastic, options.replicas
    changes = elastic.reshape or elastic.reshape_at or elastic.changes_ranks
    if len(set(each)) == 1 or options.slices or changes:
        return min(each)
    return tuple(min(each[i : i + replicas]) for i in range(0, len(each), replicas))
