"""A schedule that is made from costs, within the memory of its ranks.

    caps --make--> schedule --memory--> bytes of each rank at its peak

A schedule is made to keep no more alive than its caps; messages that wait, what an op needs for itself, and sums over the replicas come
beside that, and how much they are is known of a whole schedule only. So where it needs more than there is, the caps are lowered by as much,
and it is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynmo.cost.layer_cost import Costs, LayerCost
from dynmo.errors import ScheduleError
from dynmo.schedule.memory import bare, live_limits, rank_memory, static_bytes
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import peak_memory

_ROUNDS = 8


def fit_memory(
    limit: int | None,
    make: Callable[[Sequence[float]], Schedule],
    layers: Sequence[LayerCost],
    counts: Sequence[int],
    costs: Costs,
    placement: Sequence[int],
    *,
    post_validation: bool = False,
    replicas: int = 1,
    accumulation_groups: int = 1,
) -> Schedule:
    """limit: bytes of a rank; None: twice what 1F1B keeps. make: the schedule for so much live memory of each rank, in the unit of `costs`,
    which are the stages'. post_validation, replicas, accumulation_groups: as `rank_memory` takes them.

    Where none fits, the one that needs least is returned: who calls looks. Raises ScheduleError where not even the first can be made.
    """
    if limit is None:
        return make(live_limits(layers, counts, placement, None))
    always = static_bytes(bare(layers), counts, placement)

    def needs(schedule: Schedule) -> tuple[int, ...]:
        return rank_memory(
            layers, counts, schedule, post_validation=post_validation, replicas=replicas, accumulation_groups=accumulation_groups
        )

    return lower_caps(limit, make, needs, [float(limit - held) for held in always], costs, placement)


def lower_caps(
    limit: int,
    make: Callable[[Sequence[float]], Schedule],
    needs: Callable[[Schedule], Sequence[int]],
    caps: Sequence[float],
    costs: Costs,
    placement: Sequence[int],
) -> Schedule:
    """The same, made within `caps` at first. needs: bytes of each rank under a schedule."""
    # A rank must find room for one microbatch.
    least = [0.0] * (max(placement) + 1)
    for stage, rank in zip(costs.stages, placement, strict=True):
        least[rank] += stage.held
    caps = [max(one, cap) for one, cap in zip(least, caps, strict=True)]
    best, most = make(caps), float("inf")
    schedule = best
    for turn in range(_ROUNDS):
        needed = needs(schedule)
        if max(needed) < most:
            best, most = schedule, max(needed)
        if most <= limit or caps == least:
            break
        alive = peak_memory(schedule, costs)
        over = [max(0, need - limit) for need in needed]
        lower = [max(one, min(a, b) - more) for one, a, b, more in zip(least, caps, alive, over, strict=True)]
        # One microbatch at a time is the last that there is to try.
        caps = least if lower == caps or turn == _ROUNDS - 2 else lower
        try:
            schedule = make(caps)
        except ScheduleError:
            break
    return best
