"""Fewer ranks by a rule that merges neighbouring ranks by memory: DynMo's own, or the user's.

    8 ranks   3 3 3 3 3 3 3 3        first-fit merges neighbours while their memory fits one rank
    4 ranks   6 6 6 6

It does not ask how long a step takes then, and never grows. `elastic.algorithm = "fewest"` is what
dynmo does by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

from dynmo.errors import ConfigError, NoRoomError, PartitionError
from dynmo.options import find_own
from dynmo.plan.evaluate import Plan, evaluate
from dynmo.plan.options import Elastic
from dynmo.plan.partition import Partition
from dynmo.plan.pays import Verdict
from dynmo.plan.problem import Choice

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


def merge(now: Plan, elastic: Elastic) -> tuple[Plan, Verdict]:
    """Merges ranks by the rule that `elastic.algorithm` names.

    Raises:
        NoRoomError: The merged ranks cannot hold the model.
    """
    problem, algorithm, before = now.problem, elastic.algorithm, now.mesh.gpus
    limit = problem.memory_limit
    assert isinstance(limit, int), "merging goes by memory"
    sizes = [float(layer.static_bytes + layer.activation_bytes) for layer in problem.layers]
    least = -(-min(elastic.min_ranks, before) // now.mesh.replicas)
    partition = find_rule(algorithm)(now.partition, sizes, limit, least)
    if partition.stages == now.mesh.pipeline:
        return now, Verdict(False, 0.0, f"stay: {algorithm} merges nothing")
    mesh = replace(now.mesh, pipeline=partition.stages)
    plan = evaluate(problem, Choice(mesh, partition))
    need = max(plan.memory)
    if need > limit:
        raise NoRoomError(
            f"{algorithm} merges to {mesh.gpus} ranks, of which one needs {need} bytes, over "
            f"{limit}"
        )
    gain = 1 - plan.seconds / now.seconds if now.seconds else 0.0
    return plan, Verdict(True, gain, f"{algorithm}: {mesh.gpus} of {before} ranks by memory")
