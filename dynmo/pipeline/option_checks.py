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
    recompute = options.recompute
    if layers is not None and isinstance(recompute, tuple) and max(recompute, default=0) >= layers:
        yield (
            f"train.recompute names layer {max(recompute)}, but the model has {layers}, from 0 to "
            f"{layers - 1}"
        )
    try:
        chunks_of(options.schedule, options.chunks)
    except ScheduleError as error:
        yield f"pipeline.chunks: {error}"
    yield from _excluded(options)
    yield from _meshes(options, layers)
    yield from _placement(options, layers)
    yield from _memory_limits(options)
    yield from _elastic(options, layers)
    if options.expert > 1:
        yield from _experts(options, model)


def _meshes(options: PipelineOptions, layers: int | None) -> Iterator[str]:
    """Every mesh that the run takes must fit the batch, the schedule and the model."""
    microbatches, groups = options.all_microbatches, options.accumulation_groups
    first = (0, options.pipeline, options.replicas)
    meshes = (first, *options.elastic.reshape_at)
    for step, pipeline, replicas in meshes:
        is_first = step == 0
        key = f"elastic.reshape_at: [{step}, {pipeline}, {replicas}]"
        where = "" if is_first else f"{key}: "
        if options.steps is not None and step >= options.steps:
            yield f"{key} is at step {step}, but the run has {options.steps} steps; reshape sooner"
        if microbatches % replicas:
            yield f"{where}{replicas} replicas do not divide the {microbatches} microbatches"
        problem = accumulation_problem(groups, replicas, microbatches)
        if problem:
            known = (replicas,) if is_first else tuple(data for _, _, data in meshes)
            near = options.mesh_rule(layers).suggest_groups(known)
            out = "leave it out for one per replica, or " if is_first else ""
            yield f"{where}train.reduction_slots = {groups} {problem}; {out}use {near}"
        try:
            check_microbatches(options.schedule, pipeline, max(1, microbatches // replicas))
        except ScheduleError as error:
            sizes = "train.global_batch / train.micro_batch / parallel.replicas"
            yield f"{where or 'pipeline.schedule: '}{error} ({sizes})"
        stages = pipeline * options.stages_per_rank
        if layers is not None and stages > layers:
            yield (
                f"{f'parallel.pipeline = {pipeline}' if is_first else key} has {stages} stages, "
                f"more than the model's {layers} layers; use fewer ranks or more layers"
            )


def _placement(options: PipelineOptions, layers: int | None) -> Iterator[str]:
    initial, stages = options.balance.initial, options.pipeline * options.stages_per_rank
    if initial is None:
        return
    if options.schedule == AUTO and options.first_shapes(layers or LARGEST):
        stages = len(initial)  # some schedule has as many stages
    if len(initial) != stages:
        yield (
            f"balance.initial has {len(initial)} entries, but parallel.pipeline = "
            f"{options.pipeline} has {stages} stages with {options.schedule}; give one layer count "
            "per stage"
        )
    if layers is not None and sum(initial) != layers:
        yield (
            f"balance.initial sums to {sum(initial)}, but the model has {layers} layers; make it "
            f"sum to {layers}"
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


def _excluded(options: PipelineOptions) -> Iterator[str]:
    """Yields which options exclude each other."""
    elastic, replicas = options.elastic, options.replicas
    with_slices = {
        'pipeline.schedule = "auto"': options.schedule == AUTO,
        "pipeline.post_validation = true": options.post_validation,
        "elastic.reshape = true": elastic.reshape,
        "elastic.reshape_at": bool(elastic.reshape_at),
        "elastic.repack and elastic.target_ranks": elastic.changes_ranks,
    }
    with_experts = {
        "elastic.reshape = true": elastic.reshape,
        "elastic.reshape_at with other replicas": any(
            each != replicas for _, _, each in elastic.reshape_at
        ),
        "parallel.slices = true": options.slices,
    }
    if options.slices and options.pipeline == 1:
        yield (
            "parallel.slices = true puts the ranks of a pipeline on one GPU, but parallel.pipeline "
            "= 1 is one rank; set parallel.pipeline to the number of slices, or leave slices out"
        )
    for other, is_set in with_slices.items():
        if options.slices and is_set:
            yield (
                f"parallel.slices = true excludes {other}: slices keep their stages, and one "
                "process ends the steps of all; leave one of them out"
            )
    for other, is_set in with_experts.items():
        if options.expert > 1 and is_set:
            yield (
                f"parallel.expert = {options.expert} excludes {other}: the replicas of a stage "
                "share its experts; leave one of them out"
            )


def _elastic(options: PipelineOptions, layers: int | None) -> Iterator[str]:
    elastic, target, ranks = options.elastic, options.elastic.target_ranks, options.world_size
    rule, most, microbatches = options.mesh_rule(layers), options.replicas, options.all_microbatches
    if elastic.repack and elastic.min_ranks > ranks:
        yield (
            f"elastic.min_ranks = {elastic.min_ranks} is more than the run's {ranks} ranks; use at "
            f"most {ranks}"
        )
    if elastic.algorithm != "fewest":
        key = f'elastic.algorithm = "{elastic.algorithm}" merges ranks'
        if options.memory_limit is None:
            yield f"{key} by memory and needs pipeline.memory_limit; set the bytes of a rank"
        if options.schedule == AUTO or options.stages_per_rank > 1:
            yield (
                f'{key} of one stage, but pipeline.schedule = "{options.schedule}" has ranks of '
                'more; use "zb-auto"'
            )
    if target is not None:
        least = most if options.expert > 1 else 1  # replicas that share experts stay together
        if not any(least <= replicas <= most for _, replicas in rule.shapes(target)):
            allowed = f"the {most}" if least == most else f"at most {most}"
            yield (
                f"elastic.target_ranks = {target}: no mesh of so many ranks fits the model's "
                f"layers, pipeline.schedule, {allowed} replicas, {microbatches} microbatches and "
                f"train.reduction_slots = {options.accumulation_groups}; use another number"
            )
    if elastic.reshape and len(rule.shapes(options.pipeline * most)) <= 1:
        replicas = divisors(math.gcd(ranks, microbatches))
        sized = "1 rank" if ranks == 1 else f"{ranks} ranks"
        yield (
            f"elastic.reshape = true: {sized} and {microbatches} microbatches allow no other mesh; "
            "leave it out, or change parallel.pipeline, parallel.replicas or train.global_batch"
            if replicas == [most]
            else f"elastic.reshape = true: no other mesh of {sized} fits train.reduction_slots = "
            f"{options.accumulation_groups}; use {rule.suggest_groups(replicas)}"
        )


def _experts(options: PipelineOptions, model: ModelOptions | None) -> Iterator[str]:
    key, moe = f"parallel.expert = {options.expert}", model is not None and model.kind == "moe"
    has_own = model is None or model.kind == "hf" or model.kind.startswith("python:")
    if model is not None and not moe and not has_own:
        yield (
            f'{key}, but model.kind = "{model.kind}" has no experts of dynmo; use '
            'model.kind = "moe", or leave it out'
        )
    for name, number in (
        ("parallel.replicas", options.replicas),
        ("model.experts", model.experts if moe and model is not None else options.expert),
    ):
        if number % options.expert:
            yield f"{key} does not divide {name} = {number}, which it shares out; use a divisor"
