"""Other requests than one that was made: alternatives to a plan, and what would fit the memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dynmo.cost.profile_file import Profile
from dynmo.errors import InputError, PartitionError, ScheduleError
from dynmo.plan.make_plan import LARGE, make_plan
from dynmo.plan.mesh_plan import scale_layers
from dynmo.plan.options import BALANCERS
from dynmo.plan.plan_request import Plan, PlanRequest
from dynmo.schedule.catalogue import SCHEDULES, chunks_of


@dataclass(frozen=True)
class Alternative:
    """A plan with `choice` in place of the request's own.

    Attributes:
        choice: The balancer, schedule, number of microbatches or number of ranks.
        plan: None if there is no such plan.
        problem: Why there is none.
    """

    choice: str | int
    plan: Plan | None
    problem: str | None = None


def other_balancers(request: PlanRequest) -> list[Alternative]:
    names = [name for name in BALANCERS if name not in (request.balancer, "none")]
    return _attempt_all((name, replace(request, balancer=name)) for name in names)


def other_schedules(request: PlanRequest) -> list[Alternative]:
    return _attempt_all(
        (name, replace(request, schedule=name, chunks=None, any_links=True))
        for name in SCHEDULES
        if name != request.schedule
    )


def other_microbatches(request: PlanRequest) -> list[Alternative]:
    """Plans at the same global batch, with microbatches of other sizes.

    A microbatch of half the size is assumed to need half the time and half the activations.
    """
    resizes = resize(request.profile, request.microbatches, (0.25, 0.5, 2, 4))
    return _attempt_all(
        (m, replace(request, profile=profile, microbatches=m)) for m, profile in resizes
    )


def resize(
    profile: Profile, microbatches: int, factors: Iterable[float]
) -> Iterator[tuple[int, Profile]]:
    """Yields the profile for other numbers of microbatches of the same batch."""
    size = profile.microbatch
    for factor in factors:
        count = round(microbatches * factor)
        if (
            count < 1
            or count != microbatches * factor
            or (size is not None and size * microbatches % count)
        ):
            continue
        resized_to = None if size is None else size * microbatches // count
        layers = scale_layers(profile.layers, microbatches / count)
        yield count, replace(profile, layers=layers, microbatch=resized_to, microbatches=count)


def other_ranks(request: PlanRequest) -> list[Alternative]:
    if request.names_ranks:
        return []
    most = len(request.layers) // chunks_of(request.schedule, request.chunks)
    near = {request.ranks + by for by in (-2, -1, 1, 2)} | {request.ranks // 2, 2 * request.ranks}
    return _attempt_all(
        (p, replace(request, ranks=p, any_links=True))
        for p in sorted(near - {request.ranks})
        if 1 <= p <= most
    )


def _attempt_all(requests: Iterable[tuple[str | int, PlanRequest]]) -> list[Alternative]:
    """Makes the plans and sorts them by predicted step time, impossible ones last.

    Large plans get a quick search, because there are too many of them.
    """
    alternatives: list[Alternative] = []
    for choice, request in requests:
        try:
            alternatives.append(
                Alternative(
                    choice,
                    make_plan(replace(request, quick=request.ranks * request.microbatches > LARGE)),
                )
            )
        except InputError as error:
            alternatives.append(Alternative(choice, None, str(error)))
    return sorted(alternatives, key=lambda x: math.inf if x.plan is None else x.plan.step)


# -- what would fit the memory ---------------------------------------------------------------------


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
    limits = request.limits
    assert limits is not None
    over = max(range(request.ranks), key=lambda rank: free.memory[rank] - limits[rank])
    if free.memory[over] > limits[over]:
        where = (
            f"rank {over} (layers {_layers_of(free, over)}) needs {free.memory[over]} bytes "
            f"under {request.schedule}"
        )
        where += (
            f" with the placement {'+'.join(map(str, free.partition.counts))}, over the limit of "
            f"{limits[over]}"
        )
    else:
        where = (
            f"no placement by {request.balancer!r} was found that keeps every rank under "
            f"{' or '.join(map(str, dict.fromkeys(limits)))} bytes "
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
    if request.balancer != "exact":
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
    if request.names_ranks:
        return
    steps = (*range(1, 5), *(math.ceil(request.ranks * share) for share in (0.25, 0.5, 1, 2, 3)))
    for ranks in sorted(
        {request.ranks + by for by in steps if request.ranks + by <= len(request.layers)}
    ):
        for other in (base, *schedules[-1:]):
            yield f"{ranks} ranks with {other.schedule}", replace(other, ranks=ranks)
