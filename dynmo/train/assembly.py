"""Makes the pipeline of a config, so that profiling and training run the same one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, partial
from typing import Literal, cast

from dynmo.balance.expert_placement import ExpertPlacement
from dynmo.balance.partition import Partition
from dynmo.config import Config
from dynmo.dynamism import Dynamism
from dynmo.models.model import Model
from dynmo.pipeline.engine import Engine
from dynmo.pipeline.membership import NextMesh
from dynmo.pipeline.optimizers import optimizer_settings
from dynmo.pipeline.options import StepOptions, UpdateOptions
from dynmo.pipeline.saving import restore_state
from dynmo.runtime.comm.world import World
from dynmo.runtime.layer.precision import dtype_for
from dynmo.runtime.optim.loss_scale import make_scaler
from dynmo.runtime.state.layer_options import LayerOptions, ReplicaOptions
from dynmo.train.setup import memory_limit
from dynmo.train.shape_costs import recompute_for, shapes_of
from dynmo.train.summons import Summons


def pipeline_for(
    config: Config,
    world: World,
    model: Model,
    partition: Partition,
    cache_bytes: int = 0,
    elsewhere: tuple[int, int] | None = None,
) -> Engine:
    """Makes the pipeline of a run.

    Args:
        config: Config of the run.
        world: One pipeline of the mesh (`arrange`), which need not be the config's first.
        model: The model to train.
        partition: Number of layers on each stage.
        cache_bytes: Bytes for outputs of frozen layers.
        elsewhere: The mesh of the run, if this process is still outside of it.
    """
    replicas = world.replicas if elsewhere is None else elsewhere[1]
    train, pipeline = config.train, config.pipeline
    dtype, limit = dtype_for(train.precision, world.device), memory_limit(config, world.device)
    return Engine(
        world,
        model,
        partition,
        StepOptions(
            schedule=pipeline.schedule,
            microbatches=config.all_microbatches // replicas,
            chunks=config.chunks,
            slices=config.slices,
            memory_limit=limit,
            recompute=recompute_for(config, model, world.device),
            w_granularity=cast(Literal["whole", "linear"], pipeline.w_granularity),
            # The trainer warns of unknown activations at its start.
            shapes=cache(partial(shapes_of, config, model, level=logging.INFO))
            if limit is not None
            else None,
        ),
        update=UpdateOptions(
            optimizer=optimizer_settings(train),
            clip_scope=cast(Literal["global", "local"], train.clip_scope),
            scaler=make_scaler(dtype, train.loss_scale, train.loss_scale_window),
            post_validation=pipeline.post_validation,
            rollback=cast(Literal["exact", "in-place"], pipeline.rollback),
        ),
        layers=LayerOptions(
            dtype=dtype, seed=config.seed, compiles=train.compile, cache_bytes=cache_bytes
        ),
        replicas=ReplicaOptions(
            accumulation_groups=config.accumulation_groups,
            zero=config.parallel.zero,
            expert=config.parallel.expert,
            replicates=config.elastic.reshape
            or any(data > 1 for _, _, data in config.elastic.reshape_at),
        ),
        elsewhere=elsewhere,
    )


def join_pipeline(
    config: Config,
    world: World,
    model: Model,
    cases: Sequence[Dynamism],
    summons: Summons,
    cache_bytes: int = 0,
) -> Engine:
    """Makes this process a rank of a running run's pipeline.

    The run's ranks grow meanwhile.

    Args:
        config: Config of the run.
        world: This process alone (`World.outside`).
        model: The model to train.
        cases: The dynamic cases, which take up the run's state.
        summons: Rank 0's message to this process.
        cache_bytes: Bytes for outputs of frozen layers.

    Returns:
        The pipeline, with the layers that belong here.

    Raises:
        RunError: The ranks did not meet.
    """
    engine = pipeline_for(
        config, world, model, Partition(summons.layers_before), cache_bytes, summons.shape_before
    )
    restore_state(engine, summons.state, cases)
    engine.schedule_keeper.known = summons.known_costs
    engine.membership.arrive(
        summons.rank,
        summons.size,
        summons.generation,
        NextMesh(
            *summons.shape,
            Partition(summons.layers),
            config.train.global_batch // summons.micro_batch,
        ),
        join_timeout=config.elastic.join_timeout,
        experts={
            layer: ExpertPlacement(holders, config.parallel.expert)
            for layer, holders in summons.experts
        },
    )
    return engine
