"""The balancers by name: pure functions from a problem and the present plan to a placement.

Rules that merge ranks are here, too. Every rank that asks the same gets the same answer.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np

from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.errors import ConfigError, NoRoomError, PartitionError, ScheduleError
from dynmo.options import OWN, find_own
from dynmo.plan.bisection import Chain
from dynmo.plan.evaluate import Plan, evaluate
from dynmo.plan.options import BALANCERS, OWN_BALANCER, Elastic
from dynmo.plan.partition import Partition, uniform, weigh
from dynmo.plan.pays import Verdict, gain_of
from dynmo.plan.placement import place
from dynmo.plan.problem import Choice, Mesh, Problem
from dynmo.schedule.memory import MemoryLimits
from dynmo.schedule.simulator import resident

Balancer = Callable[[Problem, Plan], Partition]
"""Takes what is known and the plan that runs now, and returns a placement on as many stages.

Costs are `now.layers`, the present placement is `now.partition`. Raises PartitionError if it has no
placement."""

SLOW = 0.1
"""A link is slow if a message takes this share of the mean stage's time."""


def _exact(problem: Problem, now: Plan) -> Partition:
    return place(problem, now.mesh, now.partition).check_room().partition


def _diffusion(problem: Problem, now: Plan) -> Partition:
    replica, layers = now.replica, now.layers
    weights, limits = weigh(layers, problem.work.cost), replica.limits
    fits = None
    if limits is not None:
        own = tuple(limits[rank] for rank in replica.stage_ranks)
        fits = MemoryLimits(layers, resident(now.schedule), own).fits
    plain = diffuse(weights, now.partition, fits=fits)[-1]
    sizes = [layer.output_bytes for layer in layers]
    slowest = max((link.seconds(max(sizes)) for link in replica.links), default=0.0)
    several = len(replica.stage_ranks) > now.mesh.pipeline
    slow = slowest > SLOW * math.fsum(weights) / now.partition.stages
    if problem.work.cost != "time" or several or not slow:
        return plain
    linked = diffuse(weights, now.partition, fits=fits, links=replica.links, output_bytes=sizes)
    plans = [evaluate(problem, replace(now.choice, partition=plain))]
    with suppress(ScheduleError):  # say, the memory holds no such schedule
        plans.append(evaluate(problem, replace(now.choice, partition=linked[-1])))
    return min(plans, key=lambda plan: plan.rank).partition


_DYNMOS: dict[str, Balancer] = {
    "none": lambda _, now: now.partition,
    "uniform": lambda _, now: uniform(len(now.layers), now.partition.stages),
    "exact": _exact,
    "diffusion": _diffusion,
}


def balancer(name: str) -> Balancer:
    """The balancer called `name`: one of BALANCERS, or your own by `python:package.module:NAME`.

    Your own is imported, and tried on a small problem.

    Raises:
        PartitionError: The name is unknown. The message lists the known ones.
        ConfigError: There is no such balancer of your own, or it returns no placement.
    """
    if name in _DYNMOS:
        return _DYNMOS[name]
    if re.fullmatch(OWN, name):
        return _own(name)
    raise PartitionError(
        f"unknown balancer {name!r}; choose one of {', '.join(BALANCERS)}, or write "
        f"{OWN_BALANCER} for your own"
    )


def is_forced(name: str) -> bool:
    """True if layers move to the balancer's placement whatever a step takes there.

    Your own balancer is forced if it has an attribute `forced` that is true.
    """
    return name == "uniform" or (
        name not in _DYNMOS and bool(getattr(find_own("balancer", name), "forced", False))
    )


def _checked(who: str, after: object, before: Partition, least: int, words: str) -> Partition:
    """Checks what the user's function has returned."""
    if (
        isinstance(after, Partition)
        and after.layers == before.layers
        and least <= after.stages <= before.stages
    ):
        return after
    raise ConfigError(
        f"{who}: returned {after!r}; return a Partition of all {before.layers} layers on {words}"
    )


@cache
def _own(name: str) -> Balancer:
    given = find_own("balancer", name)
    kinds = list[object]()
    with suppress(ValueError, TypeError):  # a callable without a signature
        kinds += [x.kind for x in inspect.signature(given).parameters.values()]
    if len(kinds) == 1 and kinds[0] is not inspect.Parameter.VAR_POSITIONAL:
        raise ConfigError(
            f"balancer {name!r} takes one argument, as in earlier versions; write "
            "(problem, now) -> Partition: costs are now.layers, and the present placement is "
            "now.partition"
        )

    def balance(problem: Problem, now: Plan) -> Partition:
        stages = now.partition.stages
        words = f"{stages} stages"
        return _checked(f"balancer {name!r}", given(problem, now), now.partition, stages, words)

    profile = Profile((LayerCost(1.0, 1.0, 1.0),) * 4, ("0", "1", "2", "3"), microbatch=1)
    trial = Problem(profile)
    with suppress(PartitionError):  # it has no placement of these layers
        balance(trial, evaluate(trial, Choice(Mesh(2, 1, 4, 1, "1f1b"), Partition((3, 1)))))
    return balance


# -- diffusion along the pipeline, which keeps the order of the layers -----------------------------
#
#     loads        9       3       3      mean 5
#     flow     0   |  +4   |  +2   |   0          prefix of the loads - i * mean, over boundary i
#     layers     4 3 2 | 2 1 | 1 2
#
# One layer at a time may cross each boundary. It goes downstream if the flow is positive. With
# links, the time of sending a stage's output counts as a part of its load.

Fits = Callable[[int, int, int], bool]
"""(stage, start, stop) -> do the layers start..stop-1 fit the stage? See `MemoryLimits.fits`."""


def diffuse(
    weights: Sequence[float],
    current: Partition,
    *,
    fits: Fits | None = None,
    links: Sequence[LinkCost] | None = None,
    output_bytes: Sequence[int] = (),
) -> list[Partition]:
    """Path diffusion: per round at most one layer crosses each boundary, to the neighbouring stage.

    A round is accepted when the loads, sorted from the largest, fall lexicographically, and every
    stage that gains a layer `fits`. No placement therefore comes back, and the diffusion ends. It
    ends when neither the flows nor one path between two stages lower the loads further. The result
    is usually within one layer of `exact`, without a guarantee.

    `links` and `output_bytes` count as in `bisection.exact`: a stage's load is its work plus the
    time of sending its output (DynMo, E.1).

    Returns:
        The placement before the first round, and the one after each round.
    """
    chain = Chain(weights, current.stages, None, None, links, output_bytes)
    sends = np.rint(chain.sends).astype(np.int64).tolist()
    sums, placements = chain.sums.tolist(), [current]
    while better := next(_better(sums, sends, placements[-1].bounds, fits), None):
        placements.append(Partition.from_bounds(better))
    return placements


def _better(
    sums: list[int], sends: list[list[int]], bounds: Sequence[int], fits: Fits | None
) -> Iterator[list[int]]:
    before = sorted(_loads(sums, sends, bounds), reverse=True)
    for better in _candidates(sums, sends, bounds):
        stages = list(enumerate(pairwise(better)))
        if (
            all(start < stop for _, (start, stop) in stages)
            and sorted(_loads(sums, sends, better), reverse=True) < before
            and all(
                fits is None or fits(stage, start, stop)
                for stage, (start, stop) in stages
                if start < bounds[stage] or stop > bounds[stage + 1]
            )
        ):
            yield better


def _candidates(
    sums: list[int], sends: list[list[int]], bounds: Sequence[int]
) -> Iterator[list[int]]:
    """Placements to try in a round.

    The first one shifts every boundary over which a layer lessens the flow, together. Then one
    layer moves along the path from one stage to another. Paths from the most loaded to the least
    loaded come first. The paths get a load down a slope such as 4 3 2, where no neighbours can
    trade.
    """
    ranks = len(bounds) - 1
    load = _loads(sums, sends, bounds)
    total, sent = sum(load), 0
    shifted = list(bounds)
    for i in range(1, ranks):
        sent += sends[i - 1][bounds[i]]
        # The flow is multiplied by the number of ranks, to stay with integers.
        wanted = i * total - ranks * sent
        shifted[i] = min(
            (bounds[i], bounds[i] - 1, bounds[i] + 1),
            key=lambda b, wanted=wanted: abs(sums[b] * ranks - wanted),
        )
    yield shifted
    order = sorted(range(ranks), key=lambda stage: (-load[stage], stage))
    for source in order:
        for target in reversed(order):
            if load[target] < load[source]:
                low, high, step = (source, target, -1) if source < target else (target, source, 1)
                yield [bound + step * (low < i <= high) for i, bound in enumerate(bounds)]


def _loads(sums: list[int], sends: list[list[int]], bounds: Sequence[int]) -> list[int]:
    return [
        sums[stop] - sums[start] + sends[stage][stop]
        for stage, (start, stop) in enumerate(pairwise(bounds))
    ]


# -- fewer ranks, by a rule that merges neighbours by memory ---------------------------------------
#
#     8 ranks   3 3 3 3 3 3 3 3        first-fit merges neighbours while their memory fits one rank
#     4 ranks   6 6 6 6
#
# A rule is DynMo's own, or the user's. It does not ask how long a step takes then, and never grows.
# `elastic.algorithm = "fewest"` is what dynmo does by itself.

Merge = Callable[[Partition, Sequence[float], float, int], Partition]
"""From a placement, the bytes of each layer, the bytes of a rank and the fewest ranks to merge to,
to a placement on as many ranks or fewer."""


def first_fit(before: Partition, sizes: Sequence[float], limit: float, least: int) -> Partition:
    """Merges each rank into the next one if both fit (DynMo, algorithm 4).

    It stops when `least` ranks are left.
    """
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
        after, words = given(before, sizes, limit, least), f"at most {before.stages} ranks"
        return _checked(f"elastic.algorithm {algorithm!r}", after, before, 1, words)

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
    gain, reason = gain_of(now.seconds, plan.seconds), f"{mesh.gpus} of {before} ranks by memory"
    return plan, Verdict(True, gain, f"{algorithm}: {reason}")
