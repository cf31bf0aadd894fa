"""The fewest ranks on which a workload stays fast enough, over time.

    moment        0 .. 99    100 .. 199    200 .. 299
    on 8 ranks    1.00 s     0.80 s        0.55 s
    needed        8          7             5

A step may take the 1.00 s of the first moment, and a tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dynmo.errors import InputError
from dynmo.plan.make_plan import make_plan
from dynmo.plan.partition import Partition
from dynmo.plan.workload import Replayer, Workload
from dynmo.schedule.catalogue import chunks_of


@dataclass(frozen=True)
class RanksNeeded:
    """The fewest ranks that are fast enough in the steps first .. last. All, if none are.

    Attributes:
        seconds: Seconds of a step on these ranks.
        layers: Layers on each stage.
    """

    first: int
    last: int
    ranks: int
    seconds: float
    layers: tuple[int, ...]


def ranks_needed(workload: Workload, tolerance: float) -> tuple[RanksNeeded, ...]:
    """Finds the fewest ranks for each moment of a workload.

    The costs are known at once, and moves are free. The microbatches stay. A step may take
    `tolerance` longer, as a share, than that of the first moment on all ranks.

    Raises:
        InputError: The first moment does not fit all ranks.
    """
    if workload.speeds is not None or isinstance(workload.memory_limit, tuple):
        key = "speeds" if workload.speeds is not None else "memory_limit"
        raise InputError(
            f"{key} names single ranks, but --fewest-ranks searches their number; leave one of the "
            "two out"
        )
    chunks = chunks_of(workload.schedule, workload.chunks)
    stops = [*(start for start, _ in workload.moments[1:]), workload.steps]
    limit = (1 + tolerance) * _best(workload, workload.ranks, 0)[1]
    rows: list[RanksNeeded] = []
    for moment, ((start, _), stop) in enumerate(zip(workload.moments, stops, strict=True)):
        most = min(workload.ranks, workload.layers // chunks)
        for ranks in range(1, most + 1):
            try:
                partition, seconds = _best(workload, ranks, moment)
            except InputError:  # it does not fit their memory, or the schedule needs more ranks
                continue
            if seconds <= limit:
                break
        else:
            ranks, (partition, seconds) = workload.ranks, _best(workload, workload.ranks, moment)
        rows.append(RanksNeeded(start, stop - 1, ranks, seconds, partition.counts))
    return tuple(rows)


def mean_ranks(rows: tuple[RanksNeeded, ...]) -> float:
    """The mean number of ranks over the steps."""
    steps = [row.last - row.first + 1 for row in rows]
    return sum(row.ranks * x for row, x in zip(rows, steps, strict=True)) / sum(steps)


def _best(workload: Workload, ranks: int, moment: int) -> tuple[Partition, float]:
    """The placement that the balancer proposes for a moment, and its seconds."""
    policy = workload.policy
    if policy.balancer == "none":
        policy = replace(policy, balancer="exact")
    replayer = Replayer(replace(workload, ranks=ranks, initial=None, policy=policy))
    plan = make_plan(replayer.request(moment, replayer.even))
    return plan.partition, replayer.finish(plan.timeline, plan).seconds
