"""Checks of values that must fit together.

Each problem is one line that names its keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from dynmo.balance.meshes import accumulation_problem, divisors
from dynmo.config.sections import Config
from dynmo.dynamism.options import Freezing
from dynmo.errors import ScheduleError
from dynmo.schedule.catalogue import check_microbatches, chunks_of

Rule = Callable[[Config], Iterator[str]]


def first_problem(config: Config) -> str | None:
    """Finds the first reason why the values of a config do not fit together.

    Args:
        config: A config whose values are valid by themselves.

    Returns:
        One line that names the keys and says what to do. None if the values fit.
    """
    # A rule may rely on those before it.
    return next((problem for rule in _RULES for problem in rule(config)), None)


def _model(config: Config) -> Iterator[str]:
    model = config.model
    if model.is_gpt:
        if model.hidden % model.heads:
            near = _nearest_divisors(model.heads, model.hidden)
            yield (
                f"model.heads = {model.heads} does not divide model.hidden = {model.hidden}; "
                f"nearest that do: {near}"
            )
        elif model.hidden // model.heads % 2:
            yield (
                f"model.hidden / model.heads = {model.hidden // model.heads} is odd, but rotary "
                f"positions turn pairs; use hidden = {model.hidden + model.heads}, or other heads"
            )
    if model.kind == "emulated":
        for key, times in (("f", model.f), ("b", model.b), ("w", model.w)):
            if isinstance(times, tuple) and len(times) != model.layers:
                yield (
                    f"model.{key} lists {len(times)} layers, model.layers = {model.layers}; "
                    "give one number, or one per layer"
                )
        if config.train.precision != "float32":
            yield (
                f'train.precision = "{config.train.precision}", but emulated layers compute '
                "nothing but float32; leave it out"
            )


def _batch(config: Config) -> Iterator[str]:
    train, replicas = config.train, config.parallel.replicas
    if train.global_batch % replicas:
        near = _nearest_divisors(replicas, train.global_batch)
        yield (
            f"parallel.replicas = {replicas} does not divide train.global_batch = "
            f"{train.global_batch}; nearest that do: {near}"
        )
    share = train.global_batch // replicas
    if share % train.micro_batch:
        near = _nearest_divisors(train.micro_batch, share)
        wrong = (
            f"train.micro_batch = {train.micro_batch} does not divide train.global_batch / "
            f"parallel.replicas = {share}"
        )
        yield f"{wrong}; nearest that do: {near}"


def _loss_scale(config: Config) -> Iterator[str]:
    if config.train.precision == "float16" and config.train.loss_scale == 1:
        yield (
            'train.loss_scale = 1 with train.precision = "float16": small gradients vanish; '
            'use "dynamic", or precision = "bfloat16"'
        )


def _recompute(config: Config) -> Iterator[str]:
    recompute, layers = config.train.recompute, config.layer_count
    last = max(recompute, default=0) if isinstance(recompute, tuple) else 0
    if layers is not None and last >= layers:
        yield (
            f"train.recompute names layer {last}, but the model has {layers}, from 0 to "
            f"{layers - 1}"
        )


def _accumulation_groups(config: Config) -> Iterator[str]:
    replicas, groups = config.parallel.replicas, config.accumulation_groups
    problem = accumulation_problem(groups, replicas, config.all_microbatches)
    if problem:
        near = config.mesh_rule.suggest_groups((replicas,))
        yield (
            f"train.reduction_slots = {groups} {problem}; leave it out for one per replica, "
            f"or use {near}"
        )


def _schedule(config: Config) -> Iterator[str]:
    name = config.pipeline.schedule
    try:
        chunks_of(name, config.pipeline.chunks)
    except ScheduleError as error:
        yield f"pipeline.chunks: {error}"
    try:
        check_microbatches(name, config.parallel.pipeline, max(1, config.microbatches))
    except ScheduleError as error:
        yield (
            f"pipeline.schedule: {error} (train.global_batch / train.micro_batch / "
            "parallel.replicas)"
        )


def _placement(config: Config) -> Iterator[str]:
    layers, ranks, chunks, stages = (
        config.layer_count,
        config.parallel.pipeline,
        config.chunks,
        config.stages,
    )
    initial = config.balance.initial
    if initial is not None and len(initial) != stages:
        if chunks == 1:
            yield (
                f"balance.initial has {len(initial)} entries, parallel.pipeline = {ranks}; "
                "give one layer count per rank"
            )
        else:
            has = f"{config.pipeline.schedule} has {stages} stages"
            yield (
                f"balance.initial has {len(initial)} entries, but {has}; give one layer count "
                "per stage"
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


def _slices(config: Config) -> Iterator[str]:
    if not config.parallel.slices:
        return
    if config.parallel.pipeline == 1:
        yield (
            "parallel.slices = true with parallel.pipeline = 1: one stage has the whole GPU "
            "anyway; use 2 or more, or leave slices out"
        )
    if config.pipeline.post_validation:
        yield (
            "parallel.slices = true: one process ends the steps of all slices together, so "
            "pipeline.post_validation cannot be true"
        )
    if config.elastic.reshape or config.elastic.reshape_at:
        yield (
            "parallel.slices = true: slices cannot be reshaped; leave out elastic.reshape and "
            "elastic.reshape_at"
        )
    if config.elastic.changes_ranks:
        yield (
            "parallel.slices = true: slices of one GPU cannot leave; leave out elastic.repack "
            "and elastic.target_ranks"
        )


def _repack(config: Config) -> Iterator[str]:
    elastic = config.elastic
    if elastic.changes_ranks:
        which = (
            "elastic.repack = true"
            if elastic.repack
            else f"elastic.target_ranks = {elastic.target_ranks}"
        )
        if elastic.reshape or elastic.reshape_at:
            other = "elastic.reshape" if elastic.reshape else "elastic.reshape_at"
            yield f"{which} chooses the mesh, too; leave out {other}"
    if elastic.repack and elastic.min_ranks > config.ranks:
        yield (
            f"elastic.min_ranks = {elastic.min_ranks} is more than the run's {config.ranks} "
            f"ranks; use at most {config.ranks}"
        )
    if elastic.retune and not elastic.changes_ranks:
        yield (
            "elastic.retune = true is for elastic.repack or elastic.target_ranks; set one of "
            "them, or leave retune out"
        )
    if elastic.algorithm != "fewest":
        key = f'elastic.algorithm = "{elastic.algorithm}"'
        if not elastic.repack:
            yield f"{key} is for elastic.repack = true; set that, or leave the algorithm out"
        if config.pipeline.memory_limit is None:
            yield (
                f"{key} merges ranks by memory and needs pipeline.memory_limit; set the bytes "
                "of a rank"
            )
        if config.chunks > 1:
            yield (
                f"{key} merges ranks of one stage, but {config.pipeline.schedule} has "
                f"{config.chunks} a rank; use another schedule"
            )
    target = elastic.target_ranks
    if target is not None and target < elastic.min_ranks:
        yield (
            f"elastic.target_ranks = {target} is less than elastic.min_ranks = "
            f"{elastic.min_ranks}; use at least that many"
        )
    if target is not None and not config.mesh_rule.shapes(target):
        yield (
            f"elastic.target_ranks = {target}: no mesh of so many ranks fits the model's layers, "
            f"pipeline.schedule, {config.all_microbatches} microbatches and train.reduction_slots "
            f"= {config.accumulation_groups}; use another number"
        )
    if elastic.releaser == "command" and not (elastic.release_command or elastic.grow_command):
        yield 'elastic.releaser = "command" needs elastic.release_command or elastic.grow_command'
    if elastic.releaser != "command" and (elastic.release_command or elastic.grow_command):
        key = "release_command" if elastic.release_command else "grow_command"
        yield (
            f'elastic.{key} is for elastic.releaser = "command"; set that, or leave the command out'
        )


def _reshape(config: Config) -> Iterator[str]:
    if not config.elastic.reshape:
        return
    if config.elastic.reshape_at:
        yield (
            "elastic.reshape = true decides when to reshape, and elastic.reshape_at says "
            "when; leave one of them out"
        )
    elif len(_meshes(config)) == 1:
        microbatches = config.all_microbatches
        replicas = divisors(math.gcd(config.ranks, microbatches))
        if replicas == [config.parallel.replicas]:
            ranks = "1 rank" if config.ranks == 1 else f"{config.ranks} ranks"
            yield (
                f"elastic.reshape = true: {ranks} and {microbatches} microbatches allow no other "
                "mesh; leave it out, or change parallel.pipeline, parallel.replicas or "
                "train.global_batch"
            )
        else:
            yield (
                f"elastic.reshape = true: no other mesh of {config.ranks} ranks fits "
                f"train.reduction_slots = {config.accumulation_groups}; use "
                f"{config.mesh_rule.suggest_groups(replicas)}"
            )


def _reshape_at(config: Config) -> Iterator[str]:
    """Every mesh that the run takes must pass the checks of the first one."""
    layers, microbatches = config.layer_count, config.all_microbatches
    replicas = (config.parallel.replicas, *(data for _, _, data in config.elastic.reshape_at))
    for step, pipeline, data in config.elastic.reshape_at:
        key = f"elastic.reshape_at: [{step}, {pipeline}, {data}]"
        if step >= config.train.steps:
            yield (
                f"{key} is at step {step}, but the run has {config.train.steps} steps; "
                "reshape sooner"
            )
        if microbatches % data:
            yield f"{key}: {data} replicas do not divide the {microbatches} microbatches of a step"
        problem = accumulation_problem(config.accumulation_groups, data, microbatches)
        if problem:
            near = config.mesh_rule.suggest_groups(replicas)
            yield (
                f"{key}: train.reduction_slots = {config.accumulation_groups} {problem}; use {near}"
            )
        stages = pipeline * config.chunks
        if layers is not None and stages > layers:
            yield (
                f"{key} has {stages} stages, more than the model's {layers} layers; use fewer "
                "ranks in a pipeline"
            )
        try:
            check_microbatches(config.pipeline.schedule, pipeline, microbatches // data)
        except ScheduleError as error:
            yield f"{key}: {error} (train.global_batch / train.micro_batch / data)"


def _meshes(config: Config) -> tuple[tuple[int, int], ...]:
    return config.mesh_rule.shapes(config.parallel.pipeline * config.parallel.replicas)


def _experts(config: Config) -> Iterator[str]:
    model, cases = config.model, config.dynamism.cases
    if model.kind != "moe":
        return
    if model.top_k > model.experts:
        yield (
            f"model.top_k = {model.top_k} is more than model.experts = {model.experts}; use "
            f"{model.experts} or less"
        )
    if model.moe_every > model.blocks:
        yield (
            f"model.moe_every = {model.moe_every} gives none of the {model.blocks} blocks "
            f"experts; use {model.blocks} or less"
        )
    tokens = config.train.micro_batch * model.sequence
    if (
        model.capacity_factor is not None
        and model.capacity_factor * tokens * model.top_k < model.experts
    ):
        least = math.ceil(10000 * model.experts / tokens / model.top_k) / 10000
        yield (
            f"model.capacity_factor = {model.capacity_factor} leaves an expert room for no token "
            f"of a microbatch of {tokens}; use {least} or more"
        )
    if model.routing == "bias" and "experts" not in cases:
        yield (
            'model.routing = "bias" needs the load of the experts, which dynamism.cases = '
            '["experts"] measures; add it'
        )
    if config.train.compile:
        yield (
            'train.compile = true with model.kind = "moe": shapes vary, and each would be '
            "compiled anew; use compile = false"
        )


def _expert_parallelism(config: Config) -> Iterator[str]:
    """Checks experts that are spread over replicas, and options that exclude them."""
    ranks, data, model = config.parallel.expert, config.parallel.replicas, config.model
    if ranks == 1:
        return
    key = f"parallel.expert = {ranks}"
    if model.kind != "moe" and not model.kind.startswith("python:"):
        yield (
            f'{key}, but model.kind = "{model.kind}" has no experts; use model.kind = "moe", '
            "or leave it out"
        )
    if data % ranks:
        yield (
            f"{key} does not divide parallel.replicas = {data}; the replicas of a stage share its "
            "experts in groups, so use a divisor"
        )
    if model.kind == "moe" and model.experts % ranks:
        yield (
            f"{key} does not divide model.experts = {model.experts}; each replica of a group "
            "holds as many, so use a divisor"
        )
    if config.elastic.reshape or any(each != data for _, _, each in config.elastic.reshape_at):
        yield (
            f"{key}: a reshape changes the replicas that share experts; leave out "
            "elastic.reshape, and keep parallel.replicas in reshape_at"
        )
    if config.parallel.slices:
        yield (
            f"{key}: slices of one GPU cannot send rows to other replicas; leave out "
            "parallel.slices"
        )
    freezing = config.dynamism.named.get("freezing")
    if isinstance(freezing, Freezing):
        if freezing.policy == "egeria":
            yield (
                f'{key}: dynamism.freezing.policy = "egeria" runs layers of one replica '
                'alone; use "autofreeze" or a schedule'
            )
        if freezing.cache_bytes:
            yield (
                f"{key}: a replica that finds an output in its cache sends no rows; use "
                "dynamism.freezing.cache_bytes = 0"
            )


def _cases(config: Config) -> Iterator[str]:
    facts = config.facts(config.layer_count, on_cuda=False)
    for options in facts.cases.values():
        yield from options.problems(facts)


def _output_cache(config: Config) -> Iterator[str]:
    """Checks that some microbatch comes again."""
    freezing, train = config.dynamism.named.get("freezing"), config.train
    if not isinstance(freezing, Freezing) or not freezing.cache_bytes:
        return
    # With these settings no microbatch comes again at any length of the data. In other cases the
    # length decides, which `DataLoader` knows.
    if (
        train.eval_every
        and train.steps // train.eval_every < 2
        and config.data.shuffle == "windows"
        and train.micro_batch > 1
    ):
        evaluations = "one evaluation" if train.steps >= train.eval_every else "no evaluation"
        yield (
            f"dynamism.freezing.cache_bytes = {freezing.cache_bytes}: train.eval_every = "
            f"{train.eval_every} gives {evaluations} in {train.steps} steps, and no microbatch "
            "comes again, so nothing would be cached; evaluate at least twice, or use "
            'data.shuffle = "batches" for more than an epoch'
        )


_RULES: tuple[Rule, ...] = (
    _model,
    _batch,
    _loss_scale,
    _recompute,
    _accumulation_groups,
    _schedule,
    _placement,
    _slices,
    _repack,
    _reshape,
    _reshape_at,
    _experts,
    _expert_parallelism,
    _cases,
    _output_cache,
)


def _nearest_divisors(value: int, total: int) -> str:
    all_divisors = divisors(total)
    below, above = [d for d in all_divisors if d < value], [d for d in all_divisors if d > value]
    return ", ".join(
        str(d) for d in ([max(below)] if below else []) + ([min(above)] if above else [])
    )
