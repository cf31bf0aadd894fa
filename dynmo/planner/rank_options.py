"""The best mesh of each number of ranks, for the same costs and the same global batch.

    ranks      1       2       3       4           any number, not only halves or divisors
    mesh       1 x 1   2 x 1   3 x 1   2 x 2       pipeline x replicas, from `mesh_search`
    seconds    2.0     1.1     0.8     0.6

A search of one number of ranks takes up to half a second. A number is therefore searched only if
neither of two looks rules it out: its lower bound, which is the busiest rank's work without any
wait, and a quick search, whose steps come out some percent longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import final

from dynmo.errors import InputError, PartitionError
from dynmo.planner.mesh_plan import MeshPlan
from dynmo.planner.mesh_search import MeshRequest, least_seconds, search

# A quick search that misses a limit by more than this factor rules a number of ranks out: the
# whole search shortens a step by a few percent.
_QUICK_MISS = 1.05

_Found = dict[int, "MeshPlan | InputError"]


@final
class RankOptions:
    """Searches the best mesh of a number of ranks when it is asked for, and once only.

    Args:
        request: The costs, and what a mesh search may vary. Its `gpus` are ignored.
        quick: Be content with the quick search.
    """

    def __init__(self, request: MeshRequest, quick: bool = False) -> None:
        self.request = replace(request, keep=1)
        self._quick = quick
        self._bounds: dict[int, float] = {}
        self._looked: _Found = {}
        self._found: _Found = {}

    def bound(self, ranks: int) -> float:
        """Seconds that no mesh of so many ranks beats. Infinite if no mesh is possible."""
        if ranks not in self._bounds:
            try:
                self._bounds[ranks] = least_seconds(replace(self.request, gpus=ranks))
            except PartitionError:
                self._bounds[ranks] = math.inf
        return self._bounds[ranks]

    def look(self, ranks: int) -> MeshPlan:
        """What a quick search finds for so many ranks.

        Raises:
            InputError: As `plan`.
        """
        return self._search(ranks, self._looked, True)

    def plan(self, ranks: int) -> MeshPlan:
        """The fastest mesh of so many ranks.

        Raises:
            InputError: No mesh is possible, or none fits the memory (`NoMeshFitsError`).
        """
        return self._search(ranks, self._looked if self._quick else self._found, self._quick)

    def _search(self, ranks: int, known: _Found, quick: bool) -> MeshPlan:
        if ranks not in known:
            try:
                known[ranks] = search(replace(self.request, gpus=ranks), quick).candidates[0]
            except InputError as error:
                known[ranks] = error
        found = known[ranks]
        if isinstance(found, InputError):
            raise found
        return found

    def find(self, ranks: int, limit: float = math.inf) -> MeshPlan | None:
        """The fastest mesh of so many ranks, or None if its step takes longer than `limit`.

        None also if there is no mesh, or none that fits the memory.
        """
        if self.bound(ranks) > limit:
            return None
        try:
            if self.look(ranks).seconds > limit * _QUICK_MISS:
                return None
            plan = self.plan(ranks)
        except InputError:
            return None
        return plan if plan.seconds <= limit else None

    def fewest(self, counts: Iterable[int], limit: float) -> MeshPlan | None:
        """The first of these numbers of ranks on which a step takes at most `limit` seconds.

        Args:
            counts: Numbers of ranks, fewest first.
            limit: The most seconds that a step may take.
        """
        plans = (self.find(ranks, limit) for ranks in counts)
        return next((plan for plan in plans if plan is not None), None)

    def fastest(self, counts: Iterable[int]) -> MeshPlan | None:
        """The number of ranks with the shortest step, the fewest of equally fast ones.

        Args:
            counts: Numbers of ranks, fewest first.
        """
        looks = {ranks: self._seconds(ranks) for ranks in counts}
        best: MeshPlan | None = None
        for ranks in sorted(looks, key=lambda ranks: (looks[ranks], ranks)):
            plan = self.find(ranks, math.inf if best is None else best.seconds)
            if plan is None:
                continue
            if best is None or (plan.seconds, ranks) < (best.seconds, best.mesh.gpus):
                best = plan
        return best

    def _seconds(self, ranks: int) -> float:
        """Of a step, by the quick search. Infinite if there is no mesh."""
        try:
            return self.look(ranks).seconds
        except InputError:
            return math.inf
