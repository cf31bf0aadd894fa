"""Makes the engine of a pipeline from its options."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dynmo.models.group_placement import GroupPlacement
from dynmo.models.model import Model
from dynmo.pipeline.actions import Actions, NextMesh
from dynmo.pipeline.case import Dynamism
from dynmo.pipeline.optimizers import settings_of
from dynmo.pipeline.options import PipelineOptions
from dynmo.pipeline.saving import restore_state
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.world import World
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.layer.precision import dtype_for
from dynmo.runtime.optim.loss_scale import make_scaler
from dynmo.runtime.options import EngineOptions
from dynmo.schedule.catalogue import AUTO, SHAPES
from dynmo.schedule.memory import Limit

if TYPE_CHECKING:
    from dynmo.elastic.newcomer import NewcomerState
    from dynmo.plan.partition import RecomputeRule
    from dynmo.runtime.options import Shapes


def make_engine(
    options: PipelineOptions,
    world: World,
    model: Model,
    partition: Partition,
    limit: Limit,
    elsewhere: tuple[int, int] | None = None,
    schedule: str | None = None,
) -> Engine:
    replicas = world.replicas if elsewhere is None else elsewhere[1]
    dtype = dtype_for(options.precision, world.device)
    recompute, shapes = _from_shapes(options, model, limit)
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
            memory_limit=limit,
            recompute=recompute,
            shapes=shapes,
            optimizer=settings_of(options),
            clip_scope=options.clip_scope,
            scaler=make_scaler(dtype, options.loss_scale, options.loss_scale_window),
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
    )


def _from_shapes(
    options: PipelineOptions, model: Model, limit: Limit
) -> tuple[RecomputeRule, Shapes | None]:
    """Returns which layers recompute, and a function that finds costs from shapes."""
    if options.recompute == "none" and limit is None:
        return (), None
    from functools import cache, partial

    from dynmo.pipeline.shape_costs import recompute_for, shapes_of

    # The pipeline warns of unknown activations when it is made.
    shapes = cache(partial(shapes_of, options, model, level=logging.INFO))
    return recompute_for(options, model, limit), shapes if limit is not None else None


def join_engine(
    options: PipelineOptions,
    world: World,
    model: Model,
    cases: Sequence[Dynamism],
    newcomer: NewcomerState,
    limit: Limit,
) -> Engine:
    """Makes this process a rank of a running pipeline, whose ranks grow meanwhile."""
    engine = make_engine(
        options,
        world,
        model,
        Partition(newcomer.layers_before),
        limit,
        newcomer.shape_before,
        newcomer.state["schedule"],
    )
    restore_state(engine, newcomer.state, cases)
    engine.schedule_keeper.known = newcomer.costs
    Actions(engine).arrive(
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
