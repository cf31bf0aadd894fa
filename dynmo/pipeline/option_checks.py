"""Checks of a pipeline's options that must fit together, and fit the model.

Each problem is one line that names its keys as the configuration file has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from dynmo.errors import ScheduleError
from dynmo.models.options import ModelOptions
from dynmo.options import LARGEST
from dynmo.pipeline.options import PipelineOptions
from dynmo.plan.partition import accumulation_problem, divisors
from dynmo.schedule.catalogue import AUTO, check_microbatches, chunks_of


def problems(
    options: PipelineOptions, layers: int | None, model: ModelOptions | None
) -> Iterator[str]:
    """Yields why options do not fit together, a line each. A line may rely on those before it.

    Args:
        options: Options of the pipeline.
        layers: Number of layers of the model. None if it is not made yet.
        model: Options of the model, if known.
    """
    if layers is not None:
        yield from _recompute(options, layers)
    yield from _accumulation_groups(options, layers)
    yield from _schedule(options)
    yield from _placement(options, layers)
    yield from _memory_limits(options)
    if options.slices:
        yield from _slices(options)
    yield from _repack(options, layers)
    if options.elastic.reshape:
        yield from _reshape(options, layers)
    yield from _reshape_at(options, layers)
    if options.expert > 1:
        yield from _expert_parallelism(options, model)


def _recompute(options: PipelineOptions, layers: int) -> Iterator[str]:
    last = max(options.recompute, default=0) if isinstance(options.recompute, tuple) else 0
    if last >= layers:
        yield (
            f"train.recompute names layer {last}, but the model has {layers}, from 0 to "
            f"{layers - 1}"
        )


def _accumulation_groups(options: PipelineOptions, layers: int | None) -> Iterator[str]:
    replicas, groups = options.replicas, options.accumulation_groups
    problem = accumulation_problem(groups, replicas, options.all_microbatches)
    if problem:
        near = options.mesh_rule(layers).suggest_groups((replicas,))
        yield (
            f"train.reduction_slots = {groups} {problem}; leave it out for one per replica, "
            f"or use {near}"
        )


def _schedule(options: PipelineOptions) -> Iterator[str]:
    name = options.schedule
    try:
        chunks_of(name, options.chunks)
    except ScheduleError as error:
        yield f"pipeline.chunks: {error}"
    try:
        check_microbatches(name, options.pipeline, max(1, options.microbatches))
    except ScheduleError as error:
        yield (
            f"pipeline.schedule: {error} (train.global_batch / train.micro_batch / "
            "parallel.replicas)"
        )


def _placement(options: PipelineOptions, layers: int | None) -> Iterator[str]:
    ranks = options.pipeline
    chunks = options.stages_per_rank
    stages, initial = ranks * chunks, options.balance.initial
    if initial is not None and options.schedule == AUTO:
        # Any shape that has as many stages.
        stages = len(initial) if options.first_shapes(layers or LARGEST) else stages
        chunks = stages // ranks
    if initial is not None and len(initial) != stages:
        has = (
            f"parallel.pipeline = {ranks}"
            if chunks == 1
            else f"{options.schedule}: {stages} stages"
        )
        yield (
            f"balance.initial has {len(initial)} entries, but {has}; give one layer count per stage"
        )
    if layers is not None:
        if stages > layers:
            per_rank = f" x {chunks} stages a rank" if chunks > 1 else ""
            yield (
                f"parallel.pipeline = {ranks}{per_rank} is more than the model's {layers} "
                "layers; use fewer ranks or more layers"
            )
        if initial is not None and sum(initial) != layers:
            yield (
                f"balance.initial sums to {sum(initial)}, but the model has {layers} layers; "
                f"make it sum to {layers}"
            )


def _memory_limits(options: PipelineOptions) -> Iterator[str]:
    limits, elastic = options.memory_limit, options.elastic
    if not isinstance(limits, tuple):
        return
    if len(limits) != options.pipeline:
        yield (
            f"pipeline.memory_limit has {len(limits)} entries, but parallel.pipeline = "
            f"{options.pipeline}; give one per rank of a pipeline, or one number for all"
        )
    if elastic.reshape or elastic.reshape_at or elastic.changes_ranks:
        yield (
            "pipeline.memory_limit lists the ranks of a pipeline, but [elastic] changes them; "
            "give one number for all"
        )


def _slices(options: PipelineOptions) -> Iterator[str]:
    if options.schedule == AUTO:
        yield (
            "parallel.slices = true: slices keep their stages, so pipeline.schedule cannot be "
            '"auto"; choose one of its schedules, such as "zb-auto"'
        )
    if options.pipeline == 1:
        yield (
            "parallel.slices = true with parallel.pipeline = 1: one stage has the whole GPU "
            "anyway; use 2 or more, or leave slices out"
        )
    if options.post_validation:
        yield (
            "parallel.slices = true: one process ends the steps of all slices together, so "
            "pipeline.post_validation cannot be true"
        )
    if options.elastic.reshape or options.elastic.reshape_at:
        yield (
            "parallel.slices = true: slices cannot be reshaped; leave out elastic.reshape and "
            "elastic.reshape_at"
        )
    if options.elastic.changes_ranks:
        yield (
            "parallel.slices = true: slices of one GPU cannot leave; leave out elastic.repack "
            "and elastic.target_ranks"
        )


def _repack(options: PipelineOptions, layers: int | None) -> Iterator[str]:
    elastic, target = options.elastic, options.elastic.target_ranks
    if elastic.repack and elastic.min_ranks > options.world_size:
        yield (
            f"elastic.min_ranks = {elastic.min_ranks} is more than the run's {options.world_size} "
            f"ranks; use at most {options.world_size}"
        )
    if elastic.algorithm != "fewest":
        key = f'elastic.algorithm = "{elastic.algorithm}"'
        if options.memory_limit is None:
            yield (
                f"{key} merges ranks by memory and needs pipeline.memory_limit; set the bytes "
                "of a rank"
            )
        if options.schedule == AUTO:
            yield (
                f'{key} merges ranks of one stage, but pipeline.schedule = "auto" may give a rank '
                'more; use "zb-auto"'
            )
        if options.stages_per_rank > 1:
            yield (
                f"{key} merges ranks of one stage, but {options.schedule} has "
                f"{options.stages_per_rank} a rank; use another schedule"
            )
    if target is None:
        return
    shapes, most = options.mesh_rule(layers).shapes(target), options.replicas
    least = most if options.expert > 1 else 1  # replicas that share experts stay together
    if not any(least <= replicas <= most for _, replicas in shapes):
        told = f"the {most}" if least == most else f"at most {most}"
        yield (
            f"elastic.target_ranks = {target}: no mesh of so many ranks fits the model's layers, "
            f"pipeline.schedule, {told} replicas, {options.all_microbatches} microbatches and "
            f"train.reduction_slots = {options.accumulation_groups}; use another number"
        )


def _reshape(options: PipelineOptions, layers: int | None) -> Iterator[str]:
    if len(options.mesh_rule(layers).shapes(options.pipeline * options.replicas)) > 1:
        return
    microbatches = options.all_microbatches
    replicas = divisors(math.gcd(options.world_size, microbatches))
    if replicas == [options.replicas]:
        ranks = "1 rank" if options.world_size == 1 else f"{options.world_size} ranks"
        yield (
            f"elastic.reshape = true: {ranks} and {microbatches} microbatches allow no other "
            "mesh; leave it out, or change parallel.pipeline, parallel.replicas or "
            "train.global_batch"
        )
    else:
        yield (
            f"elastic.reshape = true: no other mesh of {options.world_size} ranks fits "
            f"train.reduction_slots = {options.accumulation_groups}; use "
            f"{options.mesh_rule(layers).suggest_groups(replicas)}"
        )


def _reshape_at(options: PipelineOptions, layers: int | None) -> Iterator[str]:
    """Every mesh that the run takes must pass the checks of the first one."""
    microbatches = options.all_microbatches
    replicas = (options.replicas, *(data for _, _, data in options.elastic.reshape_at))
    for step, pipeline, data in options.elastic.reshape_at:
        key = f"elastic.reshape_at: [{step}, {pipeline}, {data}]"
        if options.steps is not None and step >= options.steps:
            yield (
                f"{key} is at step {step}, but the run has {options.steps} steps; reshape sooner"
            )
        if microbatches % data:
            yield f"{key}: {data} replicas do not divide the {microbatches} microbatches of a step"
        problem = accumulation_problem(options.accumulation_groups, data, microbatches)
        if problem:
            near = options.mesh_rule(layers).suggest_groups(replicas)
            groups = options.accumulation_groups
            yield f"{key}: train.reduction_slots = {groups} {problem}; use {near}"
        stages = pipeline * options.stages_per_rank
        if layers is not None and stages > layers:
            yield (
                f"{key} has {stages} stages, more than the model's {layers} layers; use fewer "
                "ranks in a pipeline"
            )
        try:
            check_microbatches(options.schedule, pipeline, microbatches // data)
        except ScheduleError as error:
            yield f"{key}: {error} (train.global_batch / train.micro_batch / replicas)"


def _expert_parallelism(options: PipelineOptions, model: ModelOptions | None) -> Iterator[str]:
    """Checks experts that are spread over replicas, and options that exclude them."""
    ranks, data = options.expert, options.replicas
    key = f"parallel.expert = {ranks}"
    if model is not None and model.kind != "moe" and not model.kind.startswith("python:"):
        yield (
            f'{key}, but model.kind = "{model.kind}" has no experts of dynmo; use '
            'model.kind = "moe", or leave it out'
        )
    if data % ranks:
        yield (
            f"{key} does not divide parallel.replicas = {data}; the replicas of a stage share its "
            "experts in groups, so use a divisor"
        )
    if model is not None and model.kind == "moe" and model.experts % ranks:
        yield (
            f"{key} does not divide model.experts = {model.experts}; each replica of a group "
            "holds as many, so use a divisor"
        )
    if options.elastic.reshape or any(each != data for _, _, each in options.elastic.reshape_at):
        yield (
            f"{key}: a reshape changes the replicas that share experts; leave out "
            "elastic.reshape, and keep parallel.replicas in reshape_at"
        )
    if options.slices:
        yield (
            f"{key}: slices of one GPU cannot send rows to other replicas; leave out "
            "parallel.slices"
        )
