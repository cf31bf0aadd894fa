"""The placement whose simulated time, under the schedule that will run, is least.

The least bottleneck is shared by many placements, and they do not take the same time: a heavy stage far upstream fills the pipeline more
slowly than one near its end, and a slightly larger bottleneck may be worth a shorter way. So the search starts from several placements of
the least bottleneck, and moves one layer at a time along the path between two stages as long as the simulated time falls:

    4 3 | 2 2 | 1 1 2      from stage 0 to stage 2:      4 | 3 2 | 2 1 1 2

Every step is judged by a compiled replay of one schedule (`_replay`); what is returned was judged by the simulator, with the schedule that
would be made for it. Nothing depends on the clock or on chance: equal inputs give equal placements, on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import numpy as np

from dynmo.balance._replay import Shape, replay, shape_of
from dynmo.balance.partition import Partition, ties, uniform
from dynmo.balance.placed import Make, check_lengths, freeze, pipeline_costs
from dynmo.costs import LayerCost, LinkCost
from dynmo.errors import ScheduleError
from dynmo.memory import MemoryLimits
from dynmo.schedule.bound import Objective
from dynmo.schedule.op import Schedule
from dynmo.simulator import simulate

Bounds = tuple[int, ...]

# Times nearer than this share are equal, and fewer bytes moved decide: sums in another order differ by as much.
_SAME = 1e-9
_STARTS = 3  # placements from which a round descends
_ROUNDS = 3  # a schedule that follows the costs is made anew for what was found, at most so often
_OPS = 40_000_000  # ops replayed in one round: some tenths of a second


@dataclass(frozen=True)
class Found:
    """`seconds`: simulated, in the costs' unit. `started`: the same of `exact`'s placement, where the search began."""

    partition: Partition
    seconds: float
    started: float
    evaluations: int


def schedule_aware(
    layers: Sequence[LayerCost],
    ranks: int,
    *,
    make: Make,
    links: Sequence[LinkCost] | None = None,
    memory: MemoryLimits | None = None,
    current: Partition | None = None,
    first_trainable_layer: int = 0,
    objective: Objective = Objective.SPAN,
    speeds: Sequence[float] | None = None,
    ties_only: bool = False,
) -> Partition:
    """The placement on `ranks` stages with the least simulated time that `search` finds."""
    found = search(
        *(layers, ranks),
        make=make,
        links=links,
        memory=memory,
        current=current,
        first_trainable_layer=first_trainable_layer,
        objective=objective,
        speeds=speeds,
        ties_only=ties_only,
    )
    return found.partition


def search(
    layers: Sequence[LayerCost],
    ranks: int,
    *,
    make: Make,
    links: Sequence[LinkCost] | None = None,
    memory: MemoryLimits | None = None,
    current: Partition | None = None,
    first_trainable_layer: int = 0,
    objective: Objective = Objective.SPAN,
    speeds: Sequence[float] | None = None,
    ties_only: bool = False,
) -> Found:
    """Looks for the placement on `ranks` stages with the least span or makespan of the schedule that `make` gives for its costs.

    The layers before `first_trainable_layer` are a frozen prefix: forward only, whatever their costs say. links: one per boundary,
    speeds: one per stage. Never worse, by the simulator, than `exact`'s placement, nor than `current` where that has as many stages and
    fits. Of placements of equal time, the one that moves the fewest bytes. `ties_only` keeps to the least bottleneck.

    Raises PartitionError as `exact` does, and ScheduleError as `make` does for `exact`'s placement.
    """
    check_lengths(ranks, links, speeds)
    layers = freeze(layers, first_trainable_layer)
    return _Search(layers, ranks, make, links, memory, current, objective, speeds, ties_only).run()


@dataclass(frozen=True)
class _Judged:
    bounds: Bounds
    seconds: float
    moved: int
    schedule: Schedule

    def beats(self, other: _Judged) -> bool:
        if abs(self.seconds - other.seconds) > _SAME * other.seconds:
            return self.seconds < other.seconds
        return self.moved < other.moved


@final
class _Search:
    def __init__(
        self,
        layers: tuple[LayerCost, ...],
        ranks: int,
        make: Make,
        links: Sequence[LinkCost] | None,
        memory: MemoryLimits | None,
        current: Partition | None,
        objective: Objective,
        speeds: Sequence[float] | None,
        ties_only: bool,
    ) -> None:
        self.layers, self.ranks, self.make, self.links, self.memory = layers, ranks, make, links, memory
        self.current, self.whole, self.speeds, self.ties_only = current, objective is Objective.MAKESPAN, speeds, ties_only
        sizes = [layer.static_bytes for layer in layers]
        self.sizes = sizes if any(sizes) else [1] * len(sizes)
        self.size_sums = [0, *accumulate(self.sizes)]
        # What the replay reads: sums of F, B, W before each layer, on each stage's rank; and each link's time wherever a stage may stop.
        sums = np.array([[0.0, *accumulate(times)] for times in zip(*((x.f, x.b, x.w) for x in layers), strict=True)])
        self.works = sums[:, None, :] / np.array([1.0] if speeds is None else speeds)[None, :, None]
        self.sends = np.zeros((max(1, ranks - 1), len(layers) + 1))
        for boundary, link in enumerate(links or ()):
            self.sends[boundary, 1:] = [link.seconds(x.output_bytes) for x in layers]
        # Layers before this one have neither B nor W. How many stages they fill decides which ops a schedule has.
        self.frozen = next((i for i, x in enumerate(layers) if x.b or x.w), len(layers))
        self.shapes: dict[int, Shape] = {}
        self.limit = math.inf
        self.evaluations = self.budget = 0

    def run(self) -> Found:
        starts = self.starts()
        first = best = self.judge(starts[0])
        if self.current is not None and self.current.bounds in starts:
            best = self.better(best, self.current.bounds)
        for _ in range(_ROUNDS):
            before = best
            self.shapes, self.budget = {self.frozen_stages(best.bounds): shape_of(best.schedule)}, _OPS
            nearest = sorted(dict.fromkeys([best.bounds, *starts]), key=self.replay)
            for bounds in nearest[:_STARTS]:
                best = self.better(best, self.descend(bounds))
            if best.schedule.ops == before.schedule.ops:
                break  # another round would look at the same
        return Found(Partition.from_bounds(best.bounds), best.seconds, first.seconds, self.evaluations)

    def starts(self) -> list[Bounds]:
        """Placements of the least bottleneck, the one with the fewest moves first; and, where they may be, the current and the even one."""
        weights = [layer.seconds for layer in self.layers]
        found = ties(weights, self.ranks, memory=self.memory, current=self.current, move_bytes=self.sizes, speeds=self.speeds)
        if self.ties_only:
            self.limit = self.bottleneck(found[0].bounds) * (1 + 1e-12)
        others = [uniform(len(self.layers), self.ranks)]
        if self.current is not None and self.current.ranks == self.ranks:
            others.append(self.current)
        return [x.bounds for x in found] + [x.bounds for x in others if self.allowed(x.bounds, None)]

    def allowed(self, bounds: Bounds, known: Bounds | None) -> bool:
        """Within memory and, if that is asked for, the least bottleneck. `known`: a placement that is, so that only what differs counts."""
        if self.memory is not None:
            for stage, (start, stop) in enumerate(pairwise(bounds)):
                if known is not None and known[stage] <= start and stop <= known[stage + 1]:
                    continue
                if not self.memory.fits(stage, start, stop):
                    return False
        return self.limit == math.inf or self.bottleneck(bounds) <= self.limit

    def bottleneck(self, bounds: Bounds) -> float:
        return float(np.diff(self.works.sum(0)[np.arange(self.ranks) % self.works.shape[1], [bounds[:-1], bounds[1:]]], axis=0).max())

    def moved(self, bounds: Bounds) -> int:
        """Bytes that are not where `current` has them."""
        if self.current is None:
            return 0
        sums, kept = self.size_sums, 0
        for (start, stop), (old_start, old_stop) in zip(pairwise(bounds), pairwise(self.current.bounds), strict=False):
            kept += max(0, sums[min(stop, old_stop)] - sums[max(start, old_start)])
        return sums[-1] - kept

    # -- how long it takes ------------------------------------------------------------------------------------------------------

    def judge(self, bounds: Bounds) -> _Judged:
        """By the simulator, under the schedule made for this placement."""
        costs = pipeline_costs(self.layers, Partition.from_bounds(bounds), links=self.links, speeds=self.speeds)
        schedule = self.make(costs)
        timeline = simulate(schedule, costs)
        return _Judged(bounds, timeline.makespan if self.whole else timeline.span, self.moved(bounds), schedule)

    def better(self, best: _Judged, bounds: Bounds) -> _Judged:
        if bounds == best.bounds:
            return best
        try:
            judged = self.judge(bounds)
        except ScheduleError:  # memory, say, that is enough for the stages but not for a schedule of its own
            return best
        return judged if judged.beats(best) else best

    def frozen_stages(self, bounds: Bounds) -> int:
        return sum(stop <= self.frozen for stop in bounds[1:-1])

    def shape(self, bounds: Bounds) -> Shape | None:
        frozen = self.frozen_stages(bounds)
        if frozen not in self.shapes:
            costs = pipeline_costs(self.layers, Partition.from_bounds(bounds), links=self.links, speeds=self.speeds)
            try:
                self.shapes[frozen] = shape_of(self.make(costs))
            except ScheduleError:
                return None
        return self.shapes[frozen]

    def replay(self, bounds: Bounds, best: float = math.inf) -> float:
        """The time under the round's schedule; infinity where it is not less than `best` for sure, or there is no schedule."""
        shape = self.shape(bounds)
        if shape is None:
            return math.inf
        self.evaluations += 1
        self.budget -= len(shape.rows)
        at = np.array(bounds, np.int64)
        return replay(shape.rows, shape.counts, shape.placement, self.works, self.sends, at, best, self.whole)

    # -- the descent --------------------------------------------------------------------------------------------------------------

    def descend(self, bounds: Bounds) -> Bounds:
        """One layer at a time along a path of stages, as long as the time falls, or stays and fewer bytes move."""
        least = value = self.replay(bounds)
        moved = self.moved(bounds)
        tried = {bounds}
        progress = True
        while progress and self.budget > 0:
            progress = False
            for other in self.neighbours(bounds):
                if other in tried or not self.allowed(other, bounds):
                    continue
                tried.add(other)
                value = self.replay(other, least * (1 + _SAME))
                if value < least * (1 - _SAME) or (value <= least * (1 + _SAME) and self.moved(other) < moved):
                    bounds, moved, least, progress = other, self.moved(other), min(least, value), True
                    break
                if self.budget <= 0:
                    break
        return bounds

    def neighbours(self, bounds: Bounds) -> Iterator[Bounds]:
        """From the most loaded stage to the least loaded first, though a load is not all that counts."""
        work = self.works.sum(0)
        load = [float(work[s % len(work), stop] - work[s % len(work), start]) for s, (start, stop) in enumerate(pairwise(bounds))]
        order = sorted(range(self.ranks), key=lambda stage: (-load[stage], stage))
        for source in order:
            for target in reversed(order):
                low, high, step = (source, target, -1) if source < target else (target, source, 1)
                if source == target or bounds[source + 1] - bounds[source] == 1:
                    continue
                yield tuple(bound + step * (low < i <= high) for i, bound in enumerate(bounds))
