"""Makes a plan, or says what would fit the memory.

If nothing fits the memory, the error names the smallest change to the request that fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from dynmo.errors import InputError, PartitionError, ScheduleError
from dynmo.planner.evaluate import Plan, PlanRequest
from dynmo.planner.make_plan import LARGE, make_plan
from dynmo.planner.microbatches import resize


def plan_or_suggest(request: PlanRequest) -> Plan:
    """Makes the plan, or raises an error that says what would fit.

    Raises:
        InputError: The request is wrong, or it does not fit the memory. The message names the rank,
            its bytes and a change that fits.
    """
    try:
        return make_plan(request)
    except (PartitionError, ScheduleError):
        if request.memory_limit is None:
            raise
    # Errors that have nothing to do with memory are raised as they are.
    free = make_plan(replace(request, memory_limit=None))
    over = max(range(request.ranks), key=lambda rank: free.memory[rank])
    if free.memory[over] > request.memory_limit:
        where = (
            f"rank {over} (layers {_layers_of(free, over)}) needs {free.memory[over]} bytes "
            f"under {request.schedule}"
        )
        where += (
            f" with the placement {'+'.join(map(str, free.partition.counts))}, over the limit of "
            f"{request.memory_limit}"
        )
    else:
        where = (
            f"no placement by {request.balancer!r} was found that keeps every rank under "
            f"{request.memory_limit} bytes "
        )
        where += f"with {request.schedule}"
    raise PartitionError(f"{where}; {_suggestion(request, free)}")


def _layers_of(plan: Plan, rank: int) -> str:
    ranges = [
        plan.partition.range_of(stage)
        for stage, holder in enumerate(plan.request.stage_ranks)
        if holder == rank
    ]
    return " and ".join(
        f"{own.start} to {own.stop - 1}" if len(own) > 1 else f"{own.start}" for own in ranges
    )


# Schedules to try if memory is short. The least changes come first, then those that keep less.
_BY_MEMORY = ("zb-h1", "zb-auto", "zb-v", "1f1b", "v-half", "v-min")


def _suggestion(request: PlanRequest, free: Plan) -> str:
    """The first plan that fits, in words.

    Another placement, schedule, size of microbatches or number of ranks is tried.
    """
    for what, other in _candidates(request):
        try:
            plan = make_plan(other)
        except InputError:
            continue
        return (
            f"{what} would fit: {max(plan.memory)} bytes at most, a step of {plan.step:.4g} s "
            f"instead of {free.step:.4g} s"
        )
    largest = max(
        range(len(request.layers)),
        key=lambda i: request.layers[i].static_bytes + request.layers[i].activation_bytes,
    )
    held = request.layers[largest].static_bytes + request.layers[largest].activation_bytes
    return (
        "nothing that was tried fits (other placements, schedules, microbatches, more ranks); "
        f"layer {largest} alone needs {held} bytes"
    )


def _candidates(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    base = replace(request, balancer="exact", any_links=True, quick=True)
    if request.balancer not in ("exact", "schedule-aware"):
        yield "the balancer 'exact'", base
    schedules = [
        replace(base, schedule=name, chunks=None) for name in _BY_MEMORY if name != request.schedule
    ]
    for other in schedules:
        yield f"the schedule {other.schedule}", other
    smaller = [
        replace(base, profile=profile, microbatches=m)
        for m, profile in resize(base.profile, base.microbatches, (2, 4, 8, 16))
    ]
    for other in smaller if request.ranks * request.microbatches <= LARGE else smaller[:1]:
        yield f"{other.microbatches} microbatches for the same global batch", other
    steps = (*range(1, 5), *(math.ceil(request.ranks * share) for share in (0.25, 0.5, 1, 2, 3)))
    for ranks in sorted(
        {request.ranks + by for by in steps if request.ranks + by <= len(request.layers)}
    ):
        for other in (base, *schedules[-1:]):
            yield f"{ranks} ranks with {other.schedule}", replace(other, ranks=ranks)
