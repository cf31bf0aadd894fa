"""Other plans than the one that was asked for: alternatives, what "auto" chooses, what would fit.

contiguous   zb-auto            one stage a rank, the fewest messages
V            v-auto             two stages a rank, which balances better where layers are uneven
looped       interleaved-1f1b   two stages a rank
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dynmo.errors import InputError, PartitionError, ScheduleError
from dynmo.plan.best import check_sizes, handicap, plan_on
from dynmo.plan.evaluate import Plan
from dynmo.plan.options import BALANCERS
from dynmo.plan.problem import Allowed, Mesh, Problem
from dynmo.schedule.catalogue import AUTO, SCHEDULES, SHAPES, chunks_of, shapes_of
from dynmo.schedule.memory import rank_limits

LARGE = 6000  # ops of a kind: a simulation takes a tenth of a second


@dataclass(frozen=True)
class Alternative:
    """A plan with `choice` in place of the first one's own.

    Attributes:
        choice: The balancer, schedule, number of microbatches or number of ranks.
        plan: None if there is no such plan.
        problem: Why there is none.
    """

    choice: str | int
    plan: Plan | None
    problem: str | None = None


Trial = tuple[str | int, Problem, Mesh, Allowed]
"""A choice, and the plan that it asks for."""


def _attempt(trial: Trial, quick: bool = False) -> Alternative:
    choice, problem, mesh, allowed = trial
    try:
        return Alternative(choice, plan_on(problem, mesh, allowed, quick=quick).check_room())
    except InputError as error:
        return Alternative(choice, None, str(error))


def alternatives(plan: Plan, allowed: Allowed) -> dict[str, list[Alternative]]:
    """Makes the plans of other choices, sorted by their step time. Impossible ones come last.

    Large plans get a quick search, because there are too many of them.
    """
    problem, mesh = plan.problem, plan.mesh
    free = replace(problem, work=replace(problem.work, chunks=None))
    names = [name for name in BALANCERS if name not in (allowed.balancer, "none")]
    others: dict[str, list[Trial]] = {
        "balancers": [(x, problem, mesh, replace(allowed, balancer=x)) for x in names],
        "schedules": [
            (x, free, replace(mesh, schedule=x), allowed) for x in SCHEDULES if x != mesh.schedule
        ],
        "microbatches": [
            (x.microbatches, problem, x, allowed) for x in _resized(mesh, (0.25, 0.5, 2, 4))
        ],
        "ranks": [(p, problem, replace(mesh, pipeline=p), allowed) for p in _near_ranks(plan)],
    }
    found = {
        kind: [_attempt(x, x[2].pipeline * x[2].microbatches > LARGE) for x in trials]
        for kind, trials in others.items()
    }
    return {kind: sorted(plans, key=_step) for kind, plans in found.items()}


def _step(other: Alternative) -> float:
    return math.inf if other.plan is None else other.plan.step


def _resized(mesh: Mesh, factors: Iterable[float]) -> Iterator[Mesh]:
    """Yields the same batch in other numbers of microbatches.

    A microbatch of half the size is assumed to need half the time and half the activations.
    """
    for factor in factors:
        count, size = mesh.microbatches * factor, mesh.micro_batch / factor
        if count >= 1 and count == int(count) and size >= 1 and size == int(size):
            yield replace(mesh, microbatches=int(count), micro_batch=int(size))


def _near_ranks(plan: Plan) -> list[int]:
    ranks, most = plan.mesh.pipeline, len(plan.layers)
    if plan.problem.names_ranks:
        return []
    most //= chunks_of(plan.mesh.schedule, plan.problem.work.chunks)
    near = {ranks + by for by in (-2, -1, 1, 2)} | {ranks // 2, 2 * ranks}
    return [p for p in sorted(near - {ranks}) if 1 <= p <= most]


# -- what "auto" stands for ------------------------------------------------------------------------


def choose_schedule(
    problem: Problem, mesh: Mesh, allowed: Allowed
) -> tuple[Plan, list[Alternative]]:
    """Makes the plan of every schedule that "auto" stands for.

    Returns:
        The best plan, and how every schedule did, in the order of `SHAPES`.

    Raises:
        InputError: No schedule fits. The message has the bytes of the one that comes closest.
    """
    chunks_of(AUTO, problem.work.chunks)
    names = shapes_of(AUTO, mesh.pipeline, mesh.microbatches, len(problem.layers)) or SHAPES[:1]
    meshes = [replace(mesh, schedule=name) for name in names]
    tried = [_attempt((x.schedule, problem, x, allowed)) for x in meshes]
    plans = [x.plan for x in tried if x.plan is not None]
    if plans:
        return min(plans, key=lambda plan: plan.step * handicap(plan.mesh.schedule)), tried
    limited = problem.memory_limit is not None
    free = replace(problem, memory_limit=None)

    def need(mesh: Mesh) -> float:
        try:
            return max(plan_on(free, mesh, allowed, quick=True).memory)
        except InputError:
            return math.inf

    closest = min(meshes, key=need) if limited else meshes[0]
    try:
        plan_or_suggest(problem, closest, allowed)
    except InputError as error:
        if not limited or len(meshes) == 1:
            raise
        raise PartitionError(
            f"{AUTO}: no schedule fits; {closest.schedule} comes closest: {error}"
        ) from None
    raise AssertionError("no schedule fits, but the closest does")


# -- what would fit the memory ---------------------------------------------------------------------


def plan_or_suggest(problem: Problem, mesh: Mesh, allowed: Allowed) -> Plan:
    """Makes the plan, or raises an error that says what would fit.

    Raises:
        InputError: The problem is wrong, or it does not fit the memory. The message names the rank,
            its bytes and a change that fits.
    """
    check_sizes(problem)
    try:
        return plan_on(problem, mesh, allowed).check_room()
    except (PartitionError, ScheduleError):
        if problem.memory_limit is None:
            raise
    # Errors that have nothing to do with memory are raised as they are.
    free = plan_on(replace(problem, memory_limit=None), mesh, allowed)
    limits = plan_limits(problem, mesh)
    over = max(range(mesh.pipeline), key=lambda rank: free.memory[rank] - limits[rank])
    if free.memory[over] > limits[over]:
        where = (
            f"rank {over} (layers {_layers_of(free, over)}) needs {free.memory[over]} bytes "
            f"under {mesh.schedule} with the placement "
            f"{'+'.join(map(str, free.partition.counts))}, over the limit of {limits[over]}"
        )
    else:
        where = (
            f"no placement by {allowed.balancer!r} was found that keeps every rank under "
            f"{' or '.join(map(str, dict.fromkeys(limits)))} bytes with {mesh.schedule}"
        )
    raise PartitionError(f"{where}; {_suggestion(problem, free, allowed)}")


def plan_limits(problem: Problem, mesh: Mesh) -> tuple[int, ...]:
    limits = rank_limits(problem.memory_limit, mesh.pipeline)
    assert limits is not None
    return limits


def _layers_of(plan: Plan, rank: int) -> str:
    ranges = [
        plan.partition.range_of(stage)
        for stage, holder in enumerate(plan.stage_ranks)
        if holder == rank
    ]
    return " and ".join(
        f"{own.start} to {own.stop - 1}" if len(own) > 1 else f"{own.start}" for own in ranges
    )


# Schedules to try if memory is short. The least changes come first, then those that keep less.
_BY_MEMORY = ("zb-h1", "zb-auto", "zb-v", "1f1b", "v-half", "v-min")


def _suggestion(problem: Problem, free: Plan, allowed: Allowed) -> str:
    """The first plan that fits, in words.

    Another placement, schedule, size of microbatches or number of ranks is tried.
    """
    for trial in _smaller(problem, free.mesh, allowed):
        plan = _attempt(trial, quick=True).plan
        if plan is not None:
            return (
                f"{trial[0]} would fit: {max(plan.memory)} bytes at most, a step of "
                f"{plan.step:.4g} s instead of {free.step:.4g} s"
            )
    held = [layer.static_bytes + layer.activation_bytes for layer in free.layers]
    return (
        "nothing that was tried fits (other placements, schedules, microbatches, more ranks); "
        f"layer {held.index(max(held))} alone needs {max(held)} bytes"
    )


def _smaller(problem: Problem, mesh: Mesh, allowed: Allowed) -> Iterator[Trial]:
    exact = replace(allowed, balancer="exact")
    if allowed.balancer != "exact":
        yield "the balancer 'exact'", problem, mesh, exact
    free = replace(problem, work=replace(problem.work, chunks=None))
    schedules = [replace(mesh, schedule=x) for x in _BY_MEMORY if x != mesh.schedule]
    for other in schedules:
        yield f"the schedule {other.schedule}", free, other, exact
    smaller = list(_resized(mesh, (2, 4, 8, 16)))
    for other in smaller if mesh.pipeline * mesh.microbatches <= LARGE else smaller[:1]:
        words = f"{other.microbatches} microbatches for the same global batch"
        yield words, problem, other, exact
    if problem.names_ranks:
        return
    now, most = mesh.pipeline, len(problem.layers)
    steps = (*range(1, 5), *(math.ceil(now * share) for share in (0.25, 0.5, 1, 2, 3)))
    for ranks in sorted({now + by for by in steps if now + by <= most}):
        for known, other in ((problem, mesh), *((free, x) for x in schedules[-1:])):
            wide = replace(other, pipeline=ranks)
            yield f"{ranks} ranks with {other.schedule}", known, wide, exact
