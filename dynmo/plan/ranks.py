"""The best mesh of each number of ranks, for the same costs and global batch.

    ranks      1       2       3       4           any number, not only halves or divisors
    mesh       1 x 1   2 x 1   3 x 1   2 x 2       pipeline x replicas, from `best`
    seconds    2.0     1.1     0.8     0.6

A search of one number of ranks takes up to half a second. Two cheap tests rule most numbers out
first. One is a lower bound: the busiest rank's work without any wait. The other is a quick search,
whose steps come out some percent longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import final

from dynmo.errors import InputError, PartitionError
from dynmo.plan.best import NoMeshFitsError, least_seconds, search
from dynmo.plan.evaluate import Plan
from dynmo.plan.problem import Allowed, Problem

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

    def look(self, ranks: int) -> Plan:
        """The result of a quick search for so many ranks."""
        return self._search(ranks, quick=True)

    def plan(self, ranks: int) -> Plan:
        """The fastest mesh of so many ranks."""
        return self._search(ranks, self._quick)

    def _search(self, ranks: int, quick: bool) -> Plan:
        key = ranks, quick
        if key not in self._found:
            try:
                allowed = replace(self._allowed, gpus=ranks)
                found = search(self.problem, allowed, quick).plans[0]
            except InputError as error:
                found = error
            self._found[key] = found
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
            if not known and self.look(ranks).seconds > limit * _QUICK_MISS:
                return None
            plan = self.plan(ranks)
        except InputError:
            return None
        return plan if plan.seconds <= limit else None

    def fewest(self, counts: Iterable[int], limit: float) -> Plan | None:
        """The first of these numbers of ranks on which a step is fast enough."""
        plans = (self.find(ranks, limit) for ranks in counts)
        return next((plan for plan in plans if plan is not None), None)

    def fastest(self, counts: Iterable[int]) -> Plan | None:
        """The number of ranks with the shortest step, the fewest of equally fast ones."""
        seconds_of = {ranks: self._seconds(ranks) for ranks in counts}
        best: Plan | None = None
        for ranks in sorted(seconds_of, key=lambda ranks: (seconds_of[ranks], ranks)):
            plan = self.find(ranks, math.inf if best is None else best.seconds)
            if plan is not None and (
                best is None or (plan.seconds, ranks) < (best.seconds, best.mesh.gpus)
            ):
                best = plan
        return best

    def _seconds(self, ranks: int) -> float:
        """Seconds of a step, by the quick search. Infinite if there is no mesh."""
        try:
            return self.look(ranks).seconds
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
    except NoMeshFitsError as error:
        return RankRow(ranks, None, error.shortage, retuned)
    except InputError as error:
        return RankRow(ranks, None, str(error), retuned)
    slower = retuned is None or retuned.seconds >= plan.seconds
    return RankRow(ranks, plan, None, plan if retuned is not None and slower else retuned)
