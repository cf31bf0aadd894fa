"""Checks of the values of [dynamism], among themselves and with the model.

Each problem is one line that names its keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from dynmo.config.sections import Config
from dynmo.config.sections_dynamism import FreezingSection

Rule = Callable[[Config], Iterator[str]]


def _for_case(case: str) -> Callable[[Rule], Rule]:
    """Makes a rule that checks a config only if it names the case."""

    def restrict(rule: Rule) -> Rule:
        return lambda config: rule(config) if case in config.dynamism.cases else iter(())

    return restrict


def _needs(config: Config, case: str, part: str) -> Iterator[str]:
    """Yields that emulated layers lack the part of a model that a case changes."""
    if config.model.kind == "emulated":
        yield (
            f'dynamism.{case}: model.kind = "emulated" has no {part}; use "gpt" or a model of your '
            "own"
        )


@_for_case("sparse_attention")
def _sparse_attention(config: Config) -> Iterator[str]:
    sparse, model, steps = config.dynamism.sparse_attention, config.model, config.train.steps
    key = "dynamism.sparse_attention"
    yield from _needs(config, "sparse_attention", "attention")
    if sparse.schedule and (sparse.start or sparse.blocks is not None):
        yield f"{key}.schedule says when and where, and so do start and blocks; leave them out"
    known = not model.kind.startswith("python:")
    named = {block for _, blocks in sparse.schedule for block in blocks} | set(sparse.blocks or ())
    if known and max(named, default=0) >= model.blocks:
        where = "schedule" if sparse.schedule else "blocks"
        yield (
            f"{key}.{where} names block {max(named)}, but the model has {model.blocks}, from "
            f"0 to {model.blocks - 1}"
        )
    if not named and (sparse.schedule or sparse.blocks is not None):
        yield (
            f"{key} names no block, so all attention would stay dense; name one, or leave "
            "blocks out to mean all"
        )
    first = sparse.schedule[0][0] if sparse.schedule else sparse.start
    if first >= steps:
        yield (
            f"{key} starts at step {first}, but the run has {steps} steps, so all attention "
            "would stay dense; start sooner"
        )
    if sparse.kind == "hash" and sparse.buckets > model.sequence:
        most = model.sequence // 2 * 2
        yield (
            f"{key}.buckets = {sparse.buckets} is more than model.sequence = {model.sequence} "
            f"tokens; use {most} or fewer"
        )


@_for_case("early_exit")
def _early_exit(config: Config) -> Iterator[str]:
    options, model, steps = config.dynamism.early_exit, config.model, config.train.steps
    key = "dynamism.early_exit"
    yield from _needs(config, "early_exit", "tokens that could exit")
    yield from _chosen_tokens(config, "early_exit")
    if model.is_gpt:
        exits = options.exits_of(model.blocks)
        if not exits:
            yield (
                f"{key}: a model of {model.blocks} blocks has no place for an exit; use more "
                f"blocks, or name one in {key}.exits"
            )
        elif list(exits) != sorted(set(exits)):
            yield f"{key}.exits = {list(exits)} must ascend, each block once"
        elif exits[-1] >= model.blocks - 1:
            yield (
                f"{key}.exits names block {exits[-1]}, but an exit can stand after the blocks 0 to "
                f"{model.blocks - 2}; behind the last block is the head"
            )
    if options.policy == "adp-c" and options.confidence != "softmax":
        yield (
            f'{key}.confidence = "{options.confidence}" is of policy "calm"; leave it out, '
            'for "adp-c" compares the largest probability'
        )
    if options.start_of(steps) >= steps:
        yield (
            f"{key}.start = {options.start_of(steps)}, but the run has {steps} steps, so no "
            "token would exit; start sooner"
        )


def _experts(config: Config) -> Iterator[str]:
    model, cases = config.model, config.dynamism.cases
    if model.kind != "moe":
        if "moe" in cases and not model.kind.startswith("python:"):
            yield (
                f'dynamism.cases: "moe", but model.kind = "{model.kind}" has no experts; use '
                'model.kind = "moe"'
            )
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
    if model.routing == "bias" and "moe" not in cases:
        yield (
            'model.routing = "bias" needs the load of the experts, which dynamism.cases = '
            '["moe"] measures; add it'
        )
    if config.train.compile:
        yield (
            'train.compile = true with model.kind = "moe": shapes vary, and each would be '
            "compiled anew; use compile = false"
        )


def _expert_parallelism(config: Config) -> Iterator[str]:
    """Checks experts that are spread over replicas, and options that exclude them."""
    ranks, data, model = config.parallel.expert, config.parallel.data, config.model
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
            f"{key} does not divide parallel.data = {data}; the replicas of a stage share its "
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
            "elastic.reshape, and keep parallel.data in reshape_at"
        )
    if config.parallel.slices:
        yield (
            f"{key}: slices of one GPU cannot send rows to other replicas; leave out "
            "parallel.slices"
        )
    freezing = config.dynamism.freezing
    if "freezing" in config.dynamism.cases:
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


@_for_case("mixture_of_depths")
def _mixture_of_depths(config: Config) -> Iterator[str]:
    options, model, steps = config.dynamism.mixture_of_depths, config.model, config.train.steps
    key = "dynamism.mixture_of_depths"
    yield from _needs(config, "mixture_of_depths", "tokens to select")
    yield from _chosen_tokens(config, "mixture_of_depths")
    if "early_exit" in config.dynamism.cases:
        yield (
            'dynamism.cases: "early_exit" and "mixture_of_depths" both choose tokens for a '
            "block; leave one of them out"
        )
    if model.is_gpt and options.every > model.blocks:
        yield (
            f"{key}.every = {options.every} routes none of the model's {model.blocks} blocks; "
            f"use {model.blocks} or less"
        )
    if options.capacity * model.sequence < 0.5:
        least = math.ceil(5000 / model.sequence) / 10000
        yield (
            f"{key}.capacity = {options.capacity} selects no token of model.sequence = "
            f"{model.sequence}; use {least} or more"
        )
    if options.threshold_from is not None and options.threshold_from >= steps:
        yield (
            f"{key}.threshold_from = {options.threshold_from}, but the run has {steps} steps; "
            "use less, or leave it out"
        )


def _chosen_tokens(config: Config, case: str) -> Iterator[str]:
    """Yields the options that exclude a case that chooses tokens."""
    if "sparse_attention" in config.dynamism.cases:
        yield (
            f'dynamism.cases: "{case}" and "sparse_attention" both say what attention '
            "computes; leave one of them out"
        )
    if "freezing" in config.dynamism.cases and config.dynamism.freezing.policy == "egeria":
        yield (
            'dynamism.freezing.policy = "egeria" compares the outputs of a layer and its '
            f'reference, which choose other tokens under "{case}"; use "autofreeze" or a schedule'
        )
    if config.train.compile:
        yield (
            f'train.compile = true with "{case}": shapes vary, and each would be compiled '
            "anew; use compile = false"
        )


@_for_case("pruning")
def _pruning(config: Config) -> Iterator[str]:
    pruning, steps = config.dynamism.pruning, config.train.steps
    start, end, every = pruning.steps_of(steps)
    key = "dynamism.pruning"
    if config.model.kind == "emulated":
        yield (
            f'{key}: an emulated model has no weights to prune; use model.kind = "gpt", or '
            "leave the case out"
        )
    if pruning.initial_sparsity > pruning.final_sparsity:
        over = (
            f"{key}.initial_sparsity = {pruning.initial_sparsity} is over final_sparsity = "
            f"{pruning.final_sparsity}"
        )
        yield f"{over}; pruned weights do not return, so use at most that"
    late = [(name, step) for name, step in (("start", start), ("end", end)) if step >= steps]
    if late:
        name, step = late[0]
        yield (
            f"{key}.{name} = {step}: the run has {steps} steps, so it would not prune to the "
            f"end; use at most {steps - 1}"
        )
    elif start > end:
        yield f"{key}.start = {start} is after end = {end}; prune from start to end"
    elif every > max(1, end - start):
        yield (
            f"{key}.every = {every} is more than the {end - start} steps from start = {start} "
            f"to end = {end}; use a smaller one"
        )


@_for_case("freezing")
def _freezing(config: Config) -> Iterator[str]:
    freezing, steps, layers = config.dynamism.freezing, config.train.steps, config.layer_count
    if freezing.policy == "schedule":
        if not freezing.schedule:
            yield (
                "dynamism.freezing.schedule is empty, so nothing would freeze; give [[step, "
                'layers], ...] or policy = "autofreeze"'
            )
        key, most = (
            "dynamism.freezing.schedule",
            max((count for _, count in freezing.schedule), default=0),
        )
    else:
        key, most = "dynamism.freezing.max_layers", freezing.max_layers or 0
    if layers is not None and most >= layers:
        yield (
            f"{key} freezes {most} of the model's {layers} layers; the last must train, so "
            f"freeze at most {layers - 1}"
        )
    if freezing.policy == "schedule" and freezing.schedule[0][0] >= steps:
        first = freezing.schedule[0][0]
        yield (
            f"{key} starts at step {first}, but the run has {steps} steps, so nothing would "
            "freeze; start sooner"
        )
    if freezing.policy == "autofreeze":
        yield from _autofreeze(freezing, steps)
    if freezing.policy == "egeria":
        yield from _egeria(freezing, steps)
    if freezing.cache_bytes:
        yield from _output_cache(config)


def _autofreeze(freezing: FreezingSection, steps: int) -> Iterator[str]:
    if freezing.start + 2 * freezing.every >= steps:
        needs = f"{freezing.start} + 2 x {freezing.every}"
        yield (
            f"dynamism.freezing: two intervals end at step {needs}, but the run has {steps} steps, "
            "so nothing would freeze; lower start or every"
        )


def _egeria(freezing: FreezingSection, steps: int) -> Iterator[str]:
    key, every, window = "dynamism.freezing", freezing.every, freezing.window
    if freezing.refresh < window * every:
        yield (
            f"{key}.refresh = {freezing.refresh}: a reference must last a window of {window} "
            f"readings, one each {every} steps; use refresh = {window * every} or more"
        )
    elif first_stale_step(freezing, steps) >= steps:
        yield (
            f"{key}.window = {window}: with a reading each {every} steps from step "
            f"{freezing.start} on, and a new reference each {freezing.refresh}, no module can have "
            f"been stale for a window within the run's {steps} steps, so nothing would freeze; "
            "lower window, every or start, or refresh later"
        )


def first_stale_step(freezing: FreezingSection, steps: int) -> int:
    """The first step before which Egeria can freeze a module.

    Egeria needs `window` slopes after the first one, which they are compared with. A reading uses
    the last reference taken before its step. Each reference begins a new curve, whose first window
    has no slope.

    Args:
        freezing: The section `[dynamism.freezing]`.
        steps: Steps of the run.

    Returns:
        The step, or `steps` if no module can freeze within the run.
    """
    every, window, refresh = freezing.every, freezing.window, freezing.refresh
    slopes = readings = reference = 0
    for offset in range(every, steps - freezing.start, every):
        latest = (offset - 1) // refresh
        readings = 1 if latest != reference else readings + 1
        reference = latest
        slopes += readings >= window
        if slopes > window:
            return freezing.start + offset + 1
    return steps


def _output_cache(config: Config) -> Iterator[str]:
    """Checks that a cache of outputs can be useful.

    It is useless if a frozen layer gives another output each time, or if no microbatch comes again.
    """
    key = f"dynamism.freezing.cache_bytes = {config.dynamism.freezing.cache_bytes}"
    if config.model.dropout:
        yield (
            f"{key} with model.dropout = {config.model.dropout}: what is dropped is another "
            "each time; use cache_bytes = 0 or dropout = 0"
        )
    if "sparse_attention" in config.dynamism.cases:
        yield (
            f'{key} with the case "sparse_attention", which draws anew at each step; use '
            "cache_bytes = 0, or leave the case out"
        )
    # With these settings no microbatch comes again at any length of the data. In other cases the
    # length decides, which `DataLoader` knows.
    train = config.train
    if (
        train.eval_every
        and train.steps // train.eval_every < 2
        and config.data.shuffle == "windows"
        and train.micro_batch > 1
    ):
        evaluations = "one evaluation" if train.steps >= train.eval_every else "no evaluation"
        yield (
            f"{key}: train.eval_every = {train.eval_every} gives {evaluations} in {train.steps} "
            "steps, and no microbatch comes again, so nothing would be cached; evaluate at least "
            'twice, or use data.shuffle = "batches" for more than an epoch'
        )


DYNAMISM_RULES: tuple[Rule, ...] = (
    _sparse_attention,
    _early_exit,
    _mixture_of_depths,
    _experts,
    _expert_parallelism,
    _pruning,
    _freezing,
)
