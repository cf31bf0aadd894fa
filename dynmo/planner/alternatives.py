"""What another choice than a plan's would give: each alternative is a plan of its own, made in the same way."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dynmo.balance.balancers import BALANCERS
from dynmo.errors import InputError
from dynmo.planner.evaluate import Job, Plan
from dynmo.planner.microbatches import resize
from dynmo.planner.stage_plan import LARGE, attempt
from dynmo.schedule.catalogue import SCHEDULES, chunks_of


@dataclass(frozen=True)
class Alternative:
    """`choice` in place of the plan's own; `plan` is None where there is none, and `problem` says why."""

    choice: str | int
    plan: Plan | None
    problem: str | None = None


def other_balancers(job: Job) -> list[Alternative]:
    names = [name for name in BALANCERS if name not in (job.balancer, "none", "random")]
    return _judged((name, replace(job, balancer=name)) for name in names)


def other_schedules(job: Job) -> list[Alternative]:
    return _judged((name, replace(job, schedule=name, chunks=None, any_links=True)) for name in SCHEDULES if name != job.schedule)


def other_microbatches(job: Job) -> list[Alternative]:
    """At the same global batch: a microbatch of half the size is taken to need half the time and half the activations."""
    found = resize(job.profile, job.microbatches, (0.25, 0.5, 2, 4))
    return _judged((m, replace(job, profile=profile, microbatches=m)) for m, profile in found)


def other_ranks(job: Job) -> list[Alternative]:
    most = len(job.layers) // chunks_of(job.schedule, job.chunks)
    near = {job.ranks + by for by in (-2, -1, 1, 2)} | {job.ranks // 2, 2 * job.ranks}
    return _judged((p, replace(job, ranks=p, any_links=True)) for p in sorted(near - {job.ranks}) if 1 <= p <= most)


def _judged(jobs: Iterable[tuple[str | int, Job]]) -> list[Alternative]:
    """By predicted step time; those that cannot be had last. Of large plans there are too many to search each as long."""
    found: list[Alternative] = []
    for choice, job in jobs:
        try:
            found.append(Alternative(choice, attempt(replace(job, quick=job.ranks * job.microbatches > LARGE))))
        except InputError as error:
            found.append(Alternative(choice, None, str(error)))
    return sorted(found, key=lambda x: math.inf if x.plan is None else x.plan.step)
