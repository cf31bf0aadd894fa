"""The pipeline that a config asks for, made in one place: what is profiled is what is trained."""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Literal, cast

from dynmo.balance.partition import Partition
from dynmo.config import Config
from dynmo.models.model import Model
from dynmo.pipeline.engine import Engine
from dynmo.pipeline.optimizers import optimizer_settings
from dynmo.runtime.comm.world import World
from dynmo.runtime.layer.precision import dtype_for
from dynmo.runtime.optim.loss_scale import make_scaler
from dynmo.train.setup import memory_limit
from dynmo.train.shape_costs import recompute_for, shapes_of


def pipeline_for(config: Config, world: World, model: Model, partition: Partition, cache_bytes: int = 0) -> Engine:
    """world: one pipeline of the mesh (`mesh.arrange`), which need not be the config's first.
    cache_bytes: for outputs of frozen layers."""
    train, pipeline = config.train, config.pipeline
    dtype, limit = dtype_for(train.precision, world.device), memory_limit(config, world.device)
    return Engine(
        world,
        model,
        partition,
        schedule=pipeline.schedule,
        microbatches=config.all_microbatches // world.replicas,
        chunks=config.chunks,
        slices=config.slices,
        memory_limit=limit,
        seed=config.seed,
        optimizer=optimizer_settings(train),
        compiles=train.compile,
        accumulation_groups=config.accumulation_groups,
        zero=config.parallel.zero,
        expert=config.parallel.expert,
        w_granularity=cast(Literal["whole", "linear"], pipeline.w_granularity),
        post_validation=pipeline.post_validation,
        rollback=cast(Literal["exact", "in-place"], pipeline.rollback),
        clip_scope=cast(Literal["global", "local"], train.clip_scope),
        dtype=dtype,
        recompute=recompute_for(config, model, world.device),
        scaler=make_scaler(dtype, train.loss_scale, train.loss_scale_window),
        cache_bytes=cache_bytes,
        # The trainer warns of unknown activations at its start.
        shapes=cache(partial(shapes_of, config, model, level=logging.INFO)) if limit is not None else None,
        replicates=config.elastic.reshape or any(data > 1 for _, _, data in config.elastic.reshape_at),
    )
