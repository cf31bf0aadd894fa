"""Other plans than the one that was asked for: alternatives, what "auto" chooses, what would fit,
and the best mesh of each number of ranks.

contiguous   zb-auto            one stage a rank, the fewest messages
V            v-auto             two stages a rank, which balances better where layers are uneven
looped       interleaved-1f1b   two stages a rank
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import final

from dynmo.errors import InputError, PartitionError, ScheduleError
from dynmo.plan.best import NoMeshFitsError, check_sizes, handicap, least_seconds, plan_on, search
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

    def attempt(trial: Trial) -> Alternative:
        mesh = trial[2]
        return _attempt(trial, quick=mesh.pipeline * mesh.microbatches > LARGE)

    def step(other: Alternative) -> float:
        return math.inf if other.plan is None else other.plan.step

    # Most time goes into compiled loops, which run beside each other. A user's balancer may not.
    pool = ThreadPoolExecutor(os.cpu_count() if allowed.balancer in BALANCERS else 1)
    try:
        found = {kind: pool.map(attempt, trials) for kind, trials in others.items()}
        return {kind: sorted(plans, key=step) for kind, plans in found.items()}
    finally:  # an interruption does not wait for the trials
        pool.shutdown(wait=False, cancel_futures=True)


def _resized(mesh: Mesh, factors: Iterable[float]) -> Iterator[Mesh]:
    """Yields the same batch in other numbers of microbatches.

    A microbatch of half the size is assumed to need half the time and half the activations.
    """
    for factor in factors:
        count, size = mesh.microbatches * factor, mesh.micro_batch / factor
        if count >= 1 and count == int(count) and size >= 1 and size == int(size):
            yield replace(mesh, microbatches=int(count), micro_batch=int(size))


def _near_ranks(plan: Plan) -> list[int]:
    if plan.problem.names_ranks:
        return []
    ranks, chunks = plan.mesh.pipeline, chunks_of(plan.mesh.schedule, plan.problem.work.chunks)
    most = len(plan.layers) // chunks
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
        return plan_or_suggest(problem, closest, allowed), tried
    except InputError as error:
        if not limited or len(meshes) == 1:
            raise
        raise PartitionError(
            f"{AUTO}: no schedule fits; {closest.schedule} comes closest: {error}"
        ) from None


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
    limits = rank_limits(problem.memory_limit, mesh.pipeline) or ()
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


def _layers_of(plan: Plan, rank: int) -> str:
    stages = (stage for stage, holder in enumerate(plan.stage_ranks) if holder == rank)
    return " and ".join(
        f"{own.start} to {own.stop - 1}" if len(own) > 1 else f"{own.start}"
        for own in map(plan.partition.range_of, stages)
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


# -- the best mesh of each number of ranks, for the same costs and global batch --------------------
#
#     ranks      1       2       3       4           any number, not only halves or divisors
#     mesh       1 x 1   2 x 1   3 x 1   2 x 2       pipeline x replicas, from `best`
#     seconds    2.0     1.1     0.8     0.6
#
# A search of one number of ranks takes up to half a second. Two cheap tests rule most numbers out
# first. One is a lower bound: the busiest rank's work without any wait. The other is a quick
# search, whose steps come out some percent longer.

# A number of ranks is ruled out if its quick search misses a limit by more than this factor. The
# whole search shortens a step by a few percent only.
_QUICK_MISS = 1.05


@final
class RankOptions:
    """Searches the best mesh of a number of ranks on demand, and once only."""

    def __init__(self, problem: Problem, allowed: Allowed, quick: bool = False) -> None:
        self.problem, self._allowed = problem, replace(allowed, keep=1)
        self._quick = quick
        self._bounds: dict[int, float] = {}
        self._found: dict[tuple[int, bool], Plan | InputError] = {}

    def bound(self, ranks: int) -> float:
        """Seconds that no mesh of so many ranks beats. Infinite if no mesh is possible."""
        if ranks not in self._bounds:
            try:
                self._bounds[ranks] = least_seconds(
                    self.problem, replace(self._allowed, gpus=ranks)
                )
            except PartitionError:
                self._bounds[ranks] = math.inf
        return self._bounds[ranks]

    def plan(self, ranks: int, quick: bool = False) -> Plan:
        """The fastest mesh of so many ranks, or the result of a quick search."""
        key = ranks, quick or self._quick
        if key not in self._found:
            try:
                allowed = replace(self._allowed, gpus=ranks)
                self._found[key] = search(self.problem, allowed, key[1]).plans[0]
            except InputError as error:
                self._found[key] = error
        answer = self._found[key]
        if isinstance(answer, InputError):
            raise answer
        return answer

    def find(self, ranks: int, limit: float = math.inf) -> Plan | None:
        """The fastest mesh of so many ranks, if its step is short enough."""
        if self.bound(ranks) > limit:
            return None
        try:
            known = (ranks, self._quick) in self._found
            if not known and self.plan(ranks, quick=True).seconds > limit * _QUICK_MISS:
                return None
            plan = self.plan(ranks)
        except InputError:
            return None
        return plan if plan.seconds <= limit else None

    def fewest(self, counts: Iterable[int], limit: float) -> Plan | None:
        """The first of these numbers of ranks on which a step is fast enough."""
        return next(filter(None, (self.find(ranks, limit) for ranks in counts)), None)

    def fastest(self, counts: Iterable[int]) -> Plan | None:
        """The number of ranks with the shortest step, the fewest of equally fast ones."""
        best, least = None, (math.inf, 0)
        for _, ranks in sorted((self._seconds(ranks), ranks) for ranks in counts):
            plan = self.find(ranks, least[0])
            if plan is not None and (plan.seconds, ranks) < least:
                best, least = plan, (plan.seconds, ranks)
        return best

    def _seconds(self, ranks: int) -> float:
        """Seconds of a step, by the quick search. Infinite if there is no mesh."""
        try:
            return self.plan(ranks, quick=True).seconds
        except InputError:
            return math.inf


@dataclass(frozen=True)
class RankRow:
    """The fastest mesh of one number of ranks, or why there is none.

    Attributes:
        retuned: The fastest mesh if the size of a microbatch may change, too. None if that was not
            asked, or if there is none.
    """

    ranks: int
    plan: Plan | None
    problem: str | None = None
    retuned: Plan | None = None


@dataclass(frozen=True)
class RankTable:
    """Every number of ranks, and the fewest that are fast enough.

    Attributes:
        rows: One for each number of ranks, fewest first. The last one has a plan.
        limit_seconds: The most seconds that a step may take.
    """

    rows: tuple[RankRow, ...]
    limit_seconds: float
    fewest: int

    @property
    def full_seconds(self) -> float:
        plan = self.rows[-1].plan
        assert plan is not None
        return plan.seconds


def rank_table(
    problem: Problem, allowed: Allowed, tolerance: float, retune: bool = False
) -> RankTable:
    """Plans every number of ranks, and finds the fewest that are fast enough.

    Args:
        problem: What is known.
        allowed: What a mesh may be. `gpus` is the most ranks.
        tolerance: By what share a step may take longer than on the most ranks.
        retune: Also look for a better size of the microbatches, at the same global batch.
    """
    options, most = RankOptions(problem, allowed), allowed.gpus
    limit = (1 + tolerance) * options.plan(most).seconds
    resized = RankOptions(problem, replace(allowed, sizes=()), quick=True) if retune else None
    rows = [_row(options, resized, ranks) for ranks in range(1, most + 1)]
    fewest = options.fewest(range(1, most + 1), limit)
    assert fewest is not None, "the most ranks are fast enough"
    return RankTable(tuple(rows), limit, fewest.mesh.gpus)


def _row(options: RankOptions, resized: RankOptions | None, ranks: int) -> RankRow:
    retuned = None if resized is None else resized.find(ranks)
    try:
        plan = options.plan(ranks)
    except InputError as error:
        why = error.shortage if isinstance(error, NoMeshFitsError) else str(error)
        return RankRow(ranks, None, why, retuned)
    slower = retuned is None or retuned.seconds >= plan.seconds
    return RankRow(ranks, plan, None, plan if retuned is not None and slower else retuned)
