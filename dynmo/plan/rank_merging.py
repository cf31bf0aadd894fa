"""Fewer ranks by a rule that merges neighbouring ranks by memory: DynMo's own, or the user's.

    8 ranks   3 3 3 3 3 3 3 3        first-fit merges neighbours while their memory fits one rank
    4 ranks   6 6 6 6

It does not ask how long a step takes then, and never grows. `choose_ranks` is what dynmo does by
itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

from dynmo.errors import ConfigError, NoRoomError, PartitionError
from dynmo.options import find_own
from dynmo.plan.partition import Partition
from dynmo.plan.rank_choice import RankChoice, RankQuestion
from dynmo.plan.reshape import plan_as_now
from dynmo.plan.trigger import Decision

Merge = Callable[[Partition, Sequence[float], float, int], Partition]
"""From a placement, the bytes of each layer, the bytes of a rank and the fewest ranks to merge to,
to a placement on as many ranks or fewer."""


def first_fit(before: Partition, sizes: Sequence[float], limit: float, least: int) -> Partition:
    """Merges each rank into the next one if both fit (DynMo, algorithm 4).

    It stops when `least` ranks are left.
    """
    if len(sizes) != before.layers:
        raise PartitionError(f"{len(sizes)} sizes for {before.layers} layers; give one for each")
    counts, rank = list(before.counts), 0
    while rank + 1 < len(counts) and len(counts) > least:
        both, first = counts[rank] + counts[rank + 1], sum(counts[:rank])
        if math.fsum(sizes[first : first + both]) < limit:
            counts[rank : rank + 2] = [both]
        else:
            rank += 1
    return Partition(tuple(counts))


@cache
def find_rule(algorithm: str) -> Merge:
    """Finds the rule that `elastic.algorithm` names. The user's own is tried on a small placement.

    Raises:
        ConfigError: There is no such rule, or it returns no placement.
    """
    if algorithm == "first-fit":
        return first_fit
    given = find_own("elastic.algorithm", algorithm)

    def merge(before: Partition, sizes: Sequence[float], limit: float, least: int) -> Partition:
        after = given(before, sizes, limit, least)
        if (
            not isinstance(after, Partition)
            or after.layers != before.layers
            or after.stages > before.stages
        ):
            raise ConfigError(
                f"elastic.algorithm {algorithm!r}: returned {after!r}; return a Partition of all "
                f"{before.layers} layers on at most {before.stages} ranks"
            )
        return after

    with suppress(PartitionError):  # it has no placement of these layers
        merge(Partition((1,) * 4), (1.0,) * 4, 3.0, 1)
    return merge


def merge_ranks(question: RankQuestion, algorithm: str) -> RankChoice:
    """Merges ranks by the rule that `elastic.algorithm` names."""
    request, current, before = question.request, question.current, question.partition
    limit = request.memory_limit
    assert limit is not None, "merging goes by memory"
    sizes = [float(layer.static_bytes + layer.activation_bytes) for layer in request.profile.layers]
    least = -(-question.least // current.replicas)
    partition = find_rule(algorithm)(before, sizes, limit, least)
    mesh = replace(current, pipeline=partition.stages)
    now = plan_as_now(request, current, before)
    plan = now if partition == before else plan_as_now(request, mesh, partition)
    move = partition.stages < current.pipeline
    if move and max(plan.memory) > limit:
        need = max(plan.memory)
        raise NoRoomError(
            f"{algorithm} merges to {mesh.gpus} ranks, of which one needs {need} bytes, over "
            f"{limit}"
        )
    gain = 1 - plan.seconds / now.seconds if now.seconds else 0.0
    what = (
        f"{algorithm}: {mesh.gpus} of {current.gpus} ranks by memory"
        if move
        else f"stay: {algorithm} merges nothing"
    )
    return RankChoice(
        mesh=mesh,
        partition=partition,
        seconds=plan.seconds,
        seconds_now=now.seconds,
        seconds_best_now=now.seconds,
        moved_bytes=0,
        decision=Decision(move, gain, what),
    )
