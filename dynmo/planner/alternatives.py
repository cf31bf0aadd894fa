"""Other choices than a plan's. Each alternative is a plan of its own, made alike."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dynmo.balance.balancers import BALANCERS
from dynmo.errors import InputError
from dynmo.planner.evaluate import Plan, PlanRequest
from dynmo.planner.make_plan import LARGE, make_plan
from dynmo.planner.microbatches import resize
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
    names = [name for name in BALANCERS if name not in (request.balancer, "none", "random")]
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


def other_ranks(request: PlanRequest) -> list[Alternative]:
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
