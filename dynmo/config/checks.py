"""What no single key can know: whether the values of a config hold together. Each problem names its keys."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from dynmo.errors import ScheduleError
from dynmo.schedule.catalogue import check_microbatches, chunks_of

if TYPE_CHECKING:  # sections.py holds its Config together by this file
    from dynmo.config.sections import Config, Freezing


def problems(config: Config) -> Iterator[str]:
    """What is wrong with a config whose every value is right by itself. A refusal tells the first of them."""
    model, train, parallel, layers = config.model, config.train, config.parallel, config.model.layer_count
    if model.kind == "gpt":
        if model.hidden % model.heads:
            near = _nearest_divisors(model.heads, model.hidden)
            yield f"model.heads = {model.heads} does not divide model.hidden = {model.hidden}; nearest that do: {near}"
        elif model.hidden // model.heads % 2:
            yield (
                f"model.hidden / model.heads = {model.hidden // model.heads} is odd, but rotary positions turn pairs; "
                f"use hidden = {model.hidden + model.heads}, or other heads"
            )
    if model.kind == "emulated":
        for key, times in (("f", model.f), ("b", model.b), ("w", model.w)):
            if isinstance(times, tuple) and len(times) != model.layers:
                yield f"model.{key} lists {len(times)} layers, model.layers = {model.layers}; give one number, or one per layer"
        if train.precision != "float32":
            yield f'train.precision = "{train.precision}", but emulated layers compute nothing but float32; leave it out'

    if train.global_batch % parallel.data:
        near = _nearest_divisors(parallel.data, train.global_batch)
        yield f"parallel.data = {parallel.data} does not divide train.global_batch = {train.global_batch}; nearest that do: {near}"
    share = train.global_batch // parallel.data
    if share % train.micro_batch:
        near = _nearest_divisors(train.micro_batch, share)
        wrong = f"train.micro_batch = {train.micro_batch} does not divide train.global_batch / parallel.data = {share}"
        yield f"{wrong}; nearest that do: {near}"
    if train.precision == "float16" and train.loss_scale == 1:
        yield 'train.loss_scale = 1 with train.precision = "float16": small gradients vanish; use "dynamic", or precision = "bfloat16"'
    chosen = train.recompute if isinstance(train.recompute, tuple) else ()
    if layers is not None and max(chosen, default=0) >= layers:
        yield f"train.recompute names layer {max(chosen)}, but the model has {layers}, from 0 to {layers - 1}"
    yield from _slot_problems(config)

    name = config.pipeline.schedule
    try:
        chunks = chunks_of(name, config.pipeline.chunks)
    except ScheduleError as error:
        yield f"pipeline.chunks: {error}"
        return
    try:
        check_microbatches(name, parallel.pipeline, max(1, share // train.micro_batch))
    except ScheduleError as error:
        yield f"pipeline.schedule: {error} (train.global_batch / train.micro_batch / parallel.data)"
    stages = parallel.pipeline * chunks
    initial = config.balance.initial
    if initial is not None and len(initial) != stages:
        if chunks == 1:
            yield f"balance.initial has {len(initial)} entries, parallel.pipeline = {parallel.pipeline}; give one layer count per rank"
        else:
            yield f"balance.initial has {len(initial)} entries, but {name} has {stages} stages; give one layer count per stage"
    if layers is not None:
        if stages > layers:
            held = f" x {chunks} stages a rank" if chunks > 1 else ""
            yield f"parallel.pipeline = {parallel.pipeline}{held} is more than the model's {layers} layers; use fewer ranks or more layers"
        if initial is not None and sum(initial) != layers:
            yield f"balance.initial sums to {sum(initial)}, but the model has {layers} layers; make it sum to {layers}"

    yield from _slice_problems(config)
    yield from _reshape_problems(config)

    if "sparse_attention" in config.dynamism.cases:
        yield from _sparse_attention_problems(config)
    if "pruning" in config.dynamism.cases:
        yield from _pruning_problems(config)
    if "freezing" in config.dynamism.cases:
        freezing = config.dynamism.freezing
        if freezing.policy == "schedule" and not freezing.schedule:
            yield 'dynamism.freezing.schedule is empty, so nothing would freeze; give [[step, layers], ...] or policy = "autofreeze"'
        by_schedule = freezing.policy == "schedule"
        most = max((count for _, count in freezing.schedule), default=0) if by_schedule else freezing.max_layers or 0
        if layers is not None and most >= layers:
            key = "dynamism.freezing.schedule" if by_schedule else "dynamism.freezing.max_layers"
            yield f"{key} freezes {most} of the model's {layers} layers; the last must train, so freeze at most {layers - 1}"
        yield from _freezing_problems(freezing, train.steps)
        if freezing.cache_bytes:
            yield from _cache_problems(config)


def slots_fit(slots: int, replicas: int, microbatches: int) -> str | None:
    """What is wrong with so many reduction slots, for so many replicas and microbatches (of all replicas); None if they fit."""
    if microbatches % slots:
        return f"does not divide the {microbatches} microbatches of a step"
    each, rest = divmod(slots, replicas)
    if rest or (replicas > 1 and each & (each - 1)):
        return f"is not {replicas} (replicas) times a power of two"
    return None


def _slot_problems(config: Config) -> Iterator[str]:
    parallel, slots = config.parallel, config.slots
    problem = slots_fit(slots, parallel.data, config.all_microbatches)
    if problem:
        yield f"train.reduction_slots = {slots} {problem}; leave it out for one per replica, or use {_fitting(config, (parallel.data,))}"


def _fitting(config: Config, replicas: Collection[int]) -> str:
    """Numbers of slots that fit any of these numbers of replicas."""
    every = config.all_microbatches
    found = [str(n) for n in _divisors(every) if not any(slots_fit(n, r, every) for r in replicas)]
    return " or ".join(found[:4]) if found else "another train.global_batch"


def shapes(config: Config) -> tuple[tuple[int, int], ...]:
    """The meshes (ranks of a pipeline, replicas) that the run's ranks can be, with the same batch, slots and schedule."""
    ranks, every, layers = config.parallel.pipeline * config.parallel.data, config.all_microbatches, config.model.layer_count
    found: list[tuple[int, int]] = []
    for data in _divisors(math.gcd(ranks, every)):
        pipeline = ranks // data
        try:
            check_microbatches(config.pipeline.schedule, pipeline, every // data)
        except ScheduleError:
            continue
        if slots_fit(config.slots, data, every) is None and (layers is None or pipeline * config.chunks <= layers):
            found.append((pipeline, data))
    return tuple(found)


def _reshape_problems(config: Config) -> Iterator[str]:
    """Every mesh that the run will be must hold together as the first one does."""
    parallel, layers, every = config.parallel, config.model.layer_count, config.all_microbatches
    if config.elastic.reshape:
        if config.elastic.reshape_at:
            yield "elastic.reshape = true decides when to reshape, and elastic.reshape_at says when; leave one of them out"
        elif len(shapes(config)) == 1:
            counts = _divisors(math.gcd(config.ranks, every))
            if counts == [parallel.data]:
                ranks = "1 rank" if config.ranks == 1 else f"{config.ranks} ranks"
                yield (
                    f"elastic.reshape = true: {ranks} and {every} microbatches allow no other mesh; leave it out, or change "
                    "parallel.pipeline, parallel.data or train.global_batch"
                )
            else:
                yield (
                    f"elastic.reshape = true: no other mesh of {config.ranks} ranks fits train.reduction_slots = {config.slots}; use "
                    f"{_fitting(config, counts)}"
                )
    replicas = (parallel.data, *(data for _, _, data in config.elastic.reshape_at))
    for step, pipeline, data in config.elastic.reshape_at:
        key = f"elastic.reshape_at: [{step}, {pipeline}, {data}]"
        if step >= config.train.steps:
            yield f"{key} is at step {step}, but the run has {config.train.steps} steps; reshape sooner"
        if pipeline * data * parallel.expert != config.ranks:
            yield f"{key} is {pipeline} x {data} ranks, but the run has {config.ranks}; a reshape keeps them all, so change the sizes"
        if every % data:
            yield f"{key}: {data} replicas do not divide the {every} microbatches of a step"
        problem = slots_fit(config.slots, data, every)
        if problem:
            yield f"{key}: train.reduction_slots = {config.slots} {problem}; use {_fitting(config, replicas)}"
        stages = pipeline * config.chunks
        if layers is not None and stages > layers:
            yield f"{key} has {stages} stages, more than the model's {layers} layers; use fewer ranks in a pipeline"
        try:
            check_microbatches(config.pipeline.schedule, pipeline, every // data)
        except ScheduleError as error:
            yield f"{key}: {error} (train.global_batch / train.micro_batch / data)"


def _slice_problems(config: Config) -> Iterator[str]:
    if not config.parallel.slices:
        return
    if config.parallel.pipeline == 1:
        yield "parallel.slices = true with parallel.pipeline = 1: one stage has the whole GPU anyway; use 2 or more, or leave slices out"
    if config.pipeline.post_validation:
        yield "parallel.slices = true: one process ends the steps of all slices together, so pipeline.post_validation cannot be true"
    if config.elastic.reshape or config.elastic.reshape_at:
        yield "parallel.slices = true: slices cannot be reshaped; leave out elastic.reshape and elastic.reshape_at"


def _sparse_attention_problems(config: Config) -> Iterator[str]:
    sparse, model, steps, key = config.dynamism.sparse_attention, config.model, config.train.steps, "dynamism.sparse_attention"
    if model.kind == "emulated":
        yield f'{key}: model.kind = "emulated" has no attention; use "gpt" or a model of your own'
    if sparse.schedule and (sparse.start or sparse.blocks is not None):
        yield f"{key}.schedule says when and where, and so do start and blocks; leave them out"
    known = not model.kind.startswith("python:")
    named = {block for _, blocks in sparse.schedule for block in blocks} | set(sparse.blocks or ())
    if known and max(named, default=0) >= model.blocks:
        where = "schedule" if sparse.schedule else "blocks"
        yield f"{key}.{where} names block {max(named)}, but the model has {model.blocks}, from 0 to {model.blocks - 1}"
    if not named and (sparse.schedule or sparse.blocks is not None):
        yield f"{key} names no block, so all attention would stay dense; name one, or leave blocks out to mean all"
    first = sparse.schedule[0][0] if sparse.schedule else sparse.start
    if first >= steps:
        yield f"{key} starts at step {first}, but the run has {steps} steps, so all attention would stay dense; start sooner"
    if sparse.kind == "hash" and sparse.buckets > model.sequence:
        most = model.sequence // 2 * 2
        yield f"{key}.buckets = {sparse.buckets} is more than model.sequence = {model.sequence} tokens; use {most} or fewer"


def _pruning_problems(config: Config) -> Iterator[str]:
    pruning, steps = config.dynamism.pruning, config.train.steps
    start, end, every = pruning.steps_of(steps)
    key = "dynamism.pruning"
    if config.model.kind == "emulated":
        yield f'{key}: an emulated model has no weights to prune; use model.kind = "gpt", or leave the case out'
    if pruning.initial_sparsity > pruning.final_sparsity:
        over = f"{key}.initial_sparsity = {pruning.initial_sparsity} is over final_sparsity = {pruning.final_sparsity}"
        yield f"{over}; pruned weights do not return, so use at most that"
    late = [(name, step) for name, step in (("start", start), ("end", end)) if step >= steps]
    if late:
        name, step = late[0]
        yield f"{key}.{name} = {step}: the run has {steps} steps, so it would not prune to the end; use at most {steps - 1}"
    elif start > end:
        yield f"{key}.start = {start} is after end = {end}; prune from start to end"
    elif every > max(1, end - start):
        yield f"{key}.every = {every} is more than the {end - start} steps from start = {start} to end = {end}; use a smaller one"


def _freezing_problems(freezing: Freezing, steps: int) -> Iterator[str]:
    key, every, window = "dynamism.freezing", freezing.every, freezing.window
    first = freezing.schedule[0][0] if freezing.schedule else 0
    if freezing.policy == "schedule" and first >= steps:
        yield f"{key}.schedule starts at step {first}, but the run has {steps} steps, so nothing would freeze; start sooner"
    if freezing.policy == "autofreeze" and freezing.start + 2 * every >= steps:
        needs = f"{freezing.start} + 2 x {every}"
        yield f"{key}: two intervals end at step {needs}, but the run has {steps} steps, so nothing would freeze; lower start or every"
    if freezing.policy == "egeria":
        if freezing.refresh < window * every:
            yield (
                f"{key}.refresh = {freezing.refresh}: a reference must last a window of {window} readings, one each {every} steps; use "
                f"refresh = {window * every} or more"
            )
        elif _first_stale(freezing, steps) >= steps:
            yield (
                f"{key}.window = {window}: with a reading each {every} steps from step {freezing.start} on, and a new reference each "
                f"{freezing.refresh}, no module can have been stale for a window within the run's {steps} steps, so nothing would freeze; "
                "lower window, every or start, or refresh later"
            )


def _first_stale(freezing: Freezing, steps: int) -> int:
    """The first step before which Egeria may freeze something: it has `window` slopes after the first, which is what they are held
    against. A reading's reference is the last one taken before its step; each begins a new curve, whose first window has no slope."""
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


def _cache_problems(config: Config) -> Iterator[str]:
    """Where a frozen layer's output is another each time, there is nothing to keep."""
    key = f"dynamism.freezing.cache_bytes = {config.dynamism.freezing.cache_bytes}"
    if config.model.dropout:
        yield f"{key} with model.dropout = {config.model.dropout}: what is dropped is another each time; use cache_bytes = 0 or dropout = 0"
    if "sparse_attention" in config.dynamism.cases:
        yield f'{key} with the case "sparse_attention", which draws anew at each step; use cache_bytes = 0, or leave the case out'
    # Whether training itself has something come again may hang on the data (`Feed`); here it has not, however long that is.
    train = config.train
    if train.eval_every and train.steps // train.eval_every < 2 and config.data.shuffle == "windows" and train.micro_batch > 1:
        found = f"train.eval_every = {train.eval_every} gives {'one evaluation' if train.steps >= train.eval_every else 'no evaluation'}"
        yield (
            f"{key}: {found} in {train.steps} steps, and no microbatch comes again, so nothing would be cached; evaluate at least twice, "
            'or use data.shuffle = "batches" for more than an epoch'
        )


def _nearest_divisors(value: int, total: int) -> str:
    divisors = _divisors(total)
    below, above = [d for d in divisors if d < value], [d for d in divisors if d > value]
    return ", ".join(str(d) for d in ([max(below)] if below else []) + ([min(above)] if above else []))


def _divisors(total: int) -> list[int]:
    """The divisors in ascending order."""
    return sorted({d for i in range(1, math.isqrt(total) + 1) if total % i == 0 for d in (i, total // i)})
