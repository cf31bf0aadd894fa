"""The best mesh of each number of ranks, for the same costs and global batch.

    ranks      1       2       3       4           any number, not only halves or divisors
    mesh       1 x 1   2 x 1   3 x 1   2 x 2       pipeline x replicas, from `mesh_search`
    seconds    2.0     1.1     0.8     0.6

A search of one number of ranks takes up to half a second. Two cheap tests rule most numbers out
first. One is a lower bound: the busiest rank's work without any wait. The other is a quick search,
whose steps come out some percent longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import final

from dynmo.errors import InputError, PartitionError
from dynmo.plan.mesh_plan import MeshPlan
from dynmo.plan.mesh_search import MeshRequest, least_seconds, search

# A number of ranks is ruled out if its quick search misses a limit by more than this factor. The
# whole search shortens a step by a few percent only.
_QUICK_MISS = 1.05


@final
class RankOptions:
    """Searches the best mesh of a number of ranks on demand, and once only."""

    def __init__(self, request: MeshRequest, quick: bool = False) -> None:
        self.request = replace(request, keep=1)
        self._quick = quick
        self._bounds: dict[int, float] = {}
        self._found: dict[tuple[int, bool], MeshPlan | InputError] = {}

    def bound(self, ranks: int) -> float:
        """Seconds that no mesh of so many ranks beats. Infinite if no mesh is possible."""
        if ranks not in self._bounds:
            try:
                self._bounds[ranks] = least_seconds(replace(self.request, gpus=ranks))
            except PartitionError:
                self._bounds[ranks] = math.inf
        return self._bounds[ranks]

    def look(self, ranks: int) -> MeshPlan:
        """The result of a quick search for so many ranks."""
        return self._search(ranks, quick=True)

    def plan(self, ranks: int) -> MeshPlan:
        """The fastest mesh of so many ranks."""
        return self._search(ranks, self._quick)

    def _search(self, ranks: int, quick: bool) -> MeshPlan:
        key = ranks, quick
        if key not in self._found:
            try:
                found = search(replace(self.request, gpus=ranks), quick).candidates[0]
            except InputError as error:
                found = error
            self._found[key] = found
        answer = self._found[key]
        if isinstance(answer, InputError):
            raise answer
        return answer

    def find(self, ranks: int, limit: float = math.inf) -> MeshPlan | None:
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

    def fewest(self, counts: Iterable[int], limit: float) -> MeshPlan | None:
        """The first of these numbers of ranks on which a step is fast enough."""
        plans = (self.find(ranks, limit) for ranks in counts)
        return next((plan for plan in plans if plan is not None), None)

    def fastest(self, counts: Iterable[int]) -> MeshPlan | None:
        """The number of ranks with the shortest step, the fewest of equally fast ones."""
        seconds_of = {ranks: self._seconds(ranks) for ranks in counts}
        best: MeshPlan | None = None
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
