"""The placement with the least simulated time under the schedule that will run.

Many placements share the least bottleneck, and they do not take the same time. A heavy stage far
upstream fills the pipeline more slowly than one near its end. A slightly larger bottleneck may be
worth a shorter way. The search therefore starts from several placements of the least bottleneck. It
moves one layer at a time along the path between two stages while the simulated time falls:

    4 3 | 2 2 | 1 1 2      from stage 0 to stage 2:      4 | 3 2 | 2 1 1 2

Every step is judged by a compiled replay of one schedule (`_replay`). The result is judged by the
simulator, with the schedule that would be made for it. Nothing depends on the clock or on chance:
equal inputs give equal placements, on every rank.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import numpy as np

from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.errors import PartitionError, ScheduleError
from dynmo.plan._replay import promising, replay
from dynmo.plan.bisection import chunked, exact, flowing, ties
from dynmo.plan.partition import Partition, uniform
from dynmo.plan.stage_costs import Make, check_lengths, freeze, pipeline_costs
from dynmo.schedule.bounds import Objective
from dynmo.schedule.graph import Floats
from dynmo.schedule.memory import MemoryLimits
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import simulate

Bounds = tuple[int, ...]

# Times nearer than this share count as equal, because sums in another order differ by as much. The
# fewer bytes moved decide then.
_SAME = 1e-9
_STARTS = 3  # placements from which a round descends
_ROUNDS = 3  # the most times that the schedule is made anew for the best placement
# Ops replayed in one round: some tenths of a second. With several stages per rank the schedule of a
# placement decides more than its order under another's schedule.
_OPS, _OPS_OF_SEVERAL = 40_000_000, 5_000_000


@dataclass(frozen=True)
class PlacementSearchResult:
    """`started` is the simulated time of the least bottleneck, where the search began."""

    partition: Partition
    seconds: float
    started: float


@dataclass(frozen=True)
class PlacementProblem:
    """The layers to place, and what a placement is judged by.

    Attributes:
        make: Gives the schedule that would run at some costs.
        links: One per boundary between stages. None: messages take no time.
        memory: Limit of each stage. None: unlimited.
        first_trainable_layer: The layers before it are a frozen prefix: forward only, whatever
            their costs say.
        speeds: One per rank. None: all are 1.
        stage_ranks: The rank of each stage in the schedule. None: one stage per rank, in order.
    """

    layers: Sequence[LayerCost]
    ranks: int
    make: Make
    links: Sequence[LinkCost] | None = None
    memory: MemoryLimits | None = None
    current: Partition | None = None
    first_trainable_layer: int = 0
    objective: Objective = Objective.SPAN
    speeds: Sequence[float] | None = None
    stage_ranks: Sequence[int] | None = None


def search(problem: PlacementProblem) -> PlacementSearchResult:
    """Looks for the placement with the least span or makespan under its own schedule.

    The result is never worse in the simulator than the placement of the least bottleneck, nor than
    `current` if that has as many stages and fits. Of placements of equal time, the one that moves
    the fewest bytes is returned.

    Raises:
        ScheduleError: `make` fails for the placement of the least bottleneck.
    """
    return _Search(problem).run()


def faster(problem: PlacementProblem, first: Partition, second: Partition) -> Partition:
    """The one of two placements with the least simulated time, each under its own schedule."""
    search = _Search(problem)
    return Partition.from_bounds(search.better(search.evaluate(first.bounds), second.bounds).bounds)


@dataclass(frozen=True)
class _Candidate:
    bounds: Bounds
    seconds: float
    moved: int
    schedule: Schedule

    def beats(self, other: _Candidate) -> bool:
        if abs(self.seconds - other.seconds) > _SAME * other.seconds:
            return self.seconds < other.seconds
        return self.moved < other.moved


@final
class _Search:
    def __init__(self, problem: PlacementProblem) -> None:
        ranks, speeds = problem.ranks, problem.speeds
        stage_ranks = tuple(range(ranks) if problem.stage_ranks is None else problem.stage_ranks)
        if max(stage_ranks, default=-1) + 1 != ranks:
            raise PartitionError(
                f"placement {list(stage_ranks)} for {ranks} ranks; "
                f"it must name the ranks 0 to {ranks - 1}"
            )
        if speeds is not None and len(speeds) != ranks:
            raise PartitionError(f"{len(speeds)} speeds for {ranks} ranks; give one per rank")
        check_lengths(len(stage_ranks), problem.links, None)
        layers = freeze(problem.layers, problem.first_trainable_layer)
        self.layers, self.links, self.memory = layers, problem.links, problem.memory
        self.stage_ranks, self.stages, self.ranks = stage_ranks, len(stage_ranks), ranks
        self.rank_of = np.array(stage_ranks, np.int64)
        self.make, self.current = problem.make, problem.current
        self.objective = problem.objective
        self.rates = speeds
        self.speeds = None if speeds is None else [speeds[rank] for rank in stage_ranks]
        sizes = [layer.moved_bytes for layer in layers]
        self.sizes = sizes if any(sizes) else [1] * len(sizes)
        self.size_sums = [0, *accumulate(self.sizes)]
        self.works = self._works()
        self.work = self.works.sum(0)
        self.sends = np.zeros((max(1, self.stages - 1), len(layers) + 1))
        for boundary, link in enumerate(self.links or ()):
            self.sends[boundary, 1:] = [link.seconds(x.output_bytes) for x in layers]
        # Layers before this one have neither B nor W. The number of stages that they fill decides
        # which ops a schedule has.
        self.frozen = next((i for i, x in enumerate(layers) if x.b or x.w), len(layers))
        self.schedules: dict[int, Schedule] = {}
        self.judged = set[Bounds]()
        self.budget = 0

    def _works(self) -> Floats:
        """Sums of F, B and W of the layers before each layer, on each stage's rank.

        There is one row for all stages if all ranks are alike.
        """
        sums = np.array(
            [
                [0.0, *accumulate(times)]
                for times in zip(*((x.f, x.b, x.w) for x in self.layers), strict=True)
            ]
        )
        return sums[:, None, :] / np.array(self.speeds or [1.0])[None, :, None]

    def run(self) -> PlacementSearchResult:
        starts = self.starts()
        first = best = self.evaluate(starts[0])
        if self.current is not None and self.current.bounds in starts:
            best = self.better(best, self.current.bounds)
        for partition in self.worth_a_schedule(best.schedule.microbatches):
            if self.allowed(partition.bounds):
                best = self.better(best, partition.bounds)
        for _ in range(_ROUNDS):
            before = best
            self.schedules = {self.frozen_stages(best.bounds): best.schedule}
            self.budget = _OPS if self.stages == self.ranks else _OPS_OF_SEVERAL
            by_time = sorted(dict.fromkeys([best.bounds, *starts]), key=self.replay)
            for bounds in by_time[:_STARTS]:
                best = self.better(best, self.descend(bounds))
            if best.schedule.ops == before.schedule.ops:
                break  # another round would look at the same
        return PlacementSearchResult(
            Partition.from_bounds(best.bounds), best.seconds, first.seconds
        )

    def starts(self) -> list[Bounds]:
        """Placements of the least bottleneck, the one with the fewest moves first, and others."""
        weights = [layer.seconds for layer in self.layers]
        if self.stages > self.ranks:
            best = chunked(
                weights,
                self.stage_ranks,
                memory=self.memory,
                current=self.current,
                speeds=self.rates,
            )
            least_bottleneck, others = [best], ties(weights, self.stages)[:1]
        else:
            least_bottleneck = ties(
                weights,
                self.stages,
                memory=self.memory,
                current=self.current,
                speeds=self.speeds,
            )
            others = []
        if self.links is not None and self.stages == self.ranks:
            others += self.with_links(weights, self.links)
        others.append(uniform(len(self.layers), self.stages))
        if self.current is not None and self.current.stages == self.stages:
            others.append(self.current)
        return [x.bounds for x in least_bottleneck] + [
            x.bounds for x in others if self.allowed(x.bounds)
        ]

    def worth_a_schedule(self, microbatches: int) -> list[Partition]:
        """Placements that are judged by a schedule of their own before the descent."""
        if self.stages == self.ranks:
            weights = [layer.seconds for layer in self.layers]
            return [exact(weights, self.stages, memory=self.memory, speeds=self.speeds)]
        return flowing(
            self.layers, self.stage_ranks, microbatches, memory=self.memory, speeds=self.rates
        )

    def with_links(self, weights: Sequence[float], links: Sequence[LinkCost]) -> list[Partition]:
        sizes = [layer.output_bytes for layer in self.layers]
        if not any(link.seconds(size) for link in links for size in sizes):
            return []
        return [
            exact(
                weights,
                self.stages,
                memory=self.memory,
                current=self.current,
                speeds=self.speeds,
                links=links,
                output_bytes=sizes,
            )
        ]

    def allowed(self, bounds: Bounds) -> bool:
        if self.memory is None:
            return True
        held = [0] * self.ranks
        for stage, (start, stop) in enumerate(pairwise(bounds)):
            held[self.stage_ranks[stage]] += self.memory.need(stage, start, stop)
        limits = zip(self.stage_ranks, self.memory.limits, strict=True)
        return all(held[rank] <= limit for rank, limit in limits)

    def loads(self, bounds: Bounds) -> list[float]:
        work = self.work
        return [
            float(work[s % len(work), stop] - work[s % len(work), start])
            for s, (start, stop) in enumerate(pairwise(bounds))
        ]

    def moved(self, bounds: Bounds) -> int:
        """Bytes of the layers that are not where `current` has them."""
        if self.current is None:
            return 0
        sums, kept = self.size_sums, 0
        for (start, stop), (old_start, old_stop) in zip(
            pairwise(bounds), pairwise(self.current.bounds), strict=False
        ):
            kept += max(0, sums[min(stop, old_stop)] - sums[max(start, old_start)])
        return sums[-1] - kept

    # -- how long it takes -------------------------------------------------------------------------

    def evaluate(self, bounds: Bounds) -> _Candidate:
        """Simulates a placement under the schedule made for it."""
        self.judged.add(bounds)
        costs = pipeline_costs(
            self.layers, Partition.from_bounds(bounds), links=self.links, speeds=self.speeds
        )
        schedule = self.make(costs)
        seconds = simulate(schedule, costs).length(self.objective)
        return _Candidate(bounds, seconds, self.moved(bounds), schedule)

    def better(self, best: _Candidate, bounds: Bounds) -> _Candidate:
        if bounds in self.judged:
            return best
        try:
            evaluated = self.evaluate(bounds)
        except ScheduleError:  # say, the memory is enough for the stages, but for no own schedule
            return best
        return evaluated if evaluated.beats(best) else best

    def frozen_stages(self, bounds: Bounds) -> int:
        return bisect_right(bounds, self.frozen, 1, len(bounds) - 1) - 1

    def schedule(self, bounds: Bounds) -> Schedule | None:
        frozen = self.frozen_stages(bounds)
        if frozen not in self.schedules:
            costs = pipeline_costs(
                self.layers, Partition.from_bounds(bounds), links=self.links, speeds=self.speeds
            )
            try:
                self.schedules[frozen] = self.make(costs)
            except ScheduleError:
                return None
        return self.schedules[frozen]

    def replay(self, bounds: Bounds, best: float = math.inf) -> float:
        """The time of a placement under the round's schedule."""
        schedule = self.schedule(bounds)
        if schedule is None:
            return math.inf
        self.budget -= len(schedule.order.rows)
        at = np.array(bounds, np.int64)
        whole = self.objective is Objective.MAKESPAN
        given = self.works, self.sends, at, best, whole
        return replay(schedule.order, schedule.graph, self.rank_of, *given)

    # -- the descent -------------------------------------------------------------------------------

    def descend(self, bounds: Bounds) -> Bounds:
        """Moves one layer at a time while the time falls, or fewer bytes move in the same time."""
        least = self.replay(bounds)
        moved = self.moved(bounds)
        tried = {bounds}
        progress = True
        while progress and self.budget > 0:
            progress = False
            for other in self.neighbours(bounds, least * (1 + _SAME)):
                if other in tried or not self.allowed(other):
                    continue
                tried.add(other)
                value = self.replay(other, least * (1 + _SAME))
                if value < least * (1 - _SAME) or (
                    value <= least * (1 + _SAME) and self.moved(other) < moved
                ):
                    bounds, moved = other, self.moved(other)
                    least, progress = min(least, value), True
                    break
                if self.budget <= 0:
                    break
        return bounds

    def neighbours(self, bounds: Bounds, best: float) -> Iterator[Bounds]:
        """Placements with one layer moved between two stages, whose work alone takes no longer.

        Moves from the most loaded to the least loaded stage come first. This is a heuristic.
        """
        load, schedule = self.loads(bounds), self.schedule(bounds)
        order = sorted(range(self.stages), key=lambda stage: (-load[stage], stage))
        found = promising(
            np.zeros(4 * self.stages, np.int64) if schedule is None else schedule.order.counts,
            self.rank_of,
            self.works,
            np.array(bounds, np.int64),
            np.array(order, np.int64),
            best,
        )
        return (tuple(row.tolist()) for row in found)
