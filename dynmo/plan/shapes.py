"""Chooses the schedule that "auto" stands for: the fastest one that fits, placed its own way.

    contiguous   zb-auto            one stage a rank, the fewest messages
    V            v-auto             two stages a rank, which balances better where layers are uneven
    looped       interleaved-1f1b   two stages a rank

A live run compares them in `decisions.decide_move`, by the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dynmo.errors import InputError, PartitionError
from dynmo.plan.alternatives import Alternative, plan_or_suggest
from dynmo.plan.make_plan import make_plan
from dynmo.plan.plan_request import Plan, PlanRequest
from dynmo.schedule.catalogue import AUTO, SHAPES, chunks_of, shapes_of

_ALIKE = 0.01


def handicap(name: str) -> float:
    """Returns the factor of a shape's step time in comparisons.

    A shape with more messages must gain 1 % over the one before it.
    """
    return 1 + _ALIKE * SHAPES.index(name)


@dataclass(frozen=True)
class ShapeChoice:
    """The plan of the best shape, and how every shape did, in the order of `SHAPES`."""

    plan: Plan
    shapes: tuple[Alternative, ...]


def choose_shape(request: PlanRequest) -> ShapeChoice:
    """Makes the plan of every shape, and chooses.

    Args:
        request: Its schedule is "auto".

    Raises:
        InputError: No shape fits. The message has the bytes of the one that comes closest.
    """
    assert request.schedule == AUTO
    chunks_of(AUTO, request.chunks)
    names = shapes_of(AUTO, request.ranks, request.microbatches, len(request.kept))
    requests = {name: _as(request, name) for name in names or SHAPES[:1]}
    shapes = tuple(_attempt(each) for each in requests.values())
    plans = [each.plan for each in shapes if each.plan is not None]
    if not plans:
        raise _none_fits(list(requests.values()))
    best = min(plans, key=lambda plan: plan.step * handicap(plan.request.schedule))
    return ShapeChoice(best, shapes)


def _as(request: PlanRequest, name: str) -> PlanRequest:
    """Returns the request for one shape. A file lists the boundaries of one shape only."""
    own = name == (request.profile.schedule or SHAPES[0])
    return replace(request, schedule=name, chunks=None, any_links=request.any_links or not own)


def _attempt(request: PlanRequest) -> Alternative:
    try:
        return Alternative(request.schedule, make_plan(request))
    except InputError as error:
        return Alternative(request.schedule, None, str(error))


def _none_fits(requests: list[PlanRequest]) -> InputError:
    limited = requests[0].memory_limit is not None
    closest = min(requests, key=_need) if limited else requests[0]
    try:
        plan_or_suggest(closest)
    except InputError as error:
        if not limited or len(requests) == 1:
            return error
        return PartitionError(
            f"{AUTO}: no schedule fits; {closest.schedule} comes closest: {error}"
        )
    raise AssertionError


def _need(request: PlanRequest) -> float:
    """Returns the bytes of the fullest rank in the best plan without a limit."""
    try:
        return max(make_plan(replace(request, memory_limit=None, quick=True)).memory)
    except InputError:
        return float("inf")
