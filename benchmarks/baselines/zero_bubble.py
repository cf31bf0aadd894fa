"""The Zero Bubble paper's heuristic for schedules (section 3.1), written from its description.

The paper describes these rules. Each rank has one stage.

1.  Before its first B, a rank runs as many F's as its memory holds and as end before that B can
    start. A gap shorter than F may remain.
2.  Then F and B take turns. W fills a gap that is at least as long as W. W also runs if memory is
    full, and in a shorter gap if the rank's idle time would otherwise become the longest of all.
3.  A rank has run at least one F more than the next rank, until its F's are used up. If it has run
    more than that, it may skip an F.
4.  W's that are left run last.

The authors search over three yes/no choices. The paper names two of them, and the third is a guess:

    extra   one more F before the first B, which it delays
    skip    an F is skipped if the next B could otherwise start at once
    short   W may run in a gap that is shorter than W

The best of the eight runs is returned. Rule 3 needs memory for p - r microbatches on rank r, or for
all of them. Otherwise the heuristic has no schedule, and fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, product
from statistics import median

from dynmo.cost.layer_cost import Costs, StageCost
from dynmo.errors import ScheduleError
from dynmo.schedule.op import Kind, Op, Schedule

NAME = "published heuristic"
_ROUNDING = 1e-9


def heuristic(costs: Costs, microbatches: int, caps: Sequence[float]) -> Schedule:
    """Returns the shortest of the eight schedules.

    Args:
        costs: Costs of each stage.
        microbatches: Microbatches of a step.
        caps: The most live memory of each rank.

    Raises:
        ScheduleError: A rank's memory does not hold one microbatch more than the next rank's.
    """
    limits = _limits(costs, microbatches, caps)
    runs = [
        _Run(costs, microbatches, caps, limits, *choice)
        for choice in product((False, True), repeat=3)
    ]
    best = min(runs, key=lambda run: run.span)
    rows = tuple(map(tuple, best.rows))
    return Schedule(NAME, microbatches, tuple(range(len(rows))), rows)


def median_costs(costs: Costs) -> Costs:
    """Returns the costs with all times at their median, as the authors' planner is fed.

    Memory stays that of each stage.
    """
    f, b, w = (median(getattr(stage, kind) for stage in costs.stages) for kind in "fbw")
    stages = tuple(StageCost(f, b, w, x.mem_f, x.mem_b, x.mem_w) for x in costs.stages)
    return Costs(stages, (median(costs.links),) * len(costs.links) if costs.links else ())


def _limits(costs: Costs, microbatches: int, caps: Sequence[float]) -> list[int]:
    """Returns how many microbatches each rank may have between F and B."""
    limits: list[int] = []
    before = math.inf
    for rank, (stage, cap) in enumerate(zip(costs.stages, caps, strict=True)):
        held = max(stage.held, 1e-300)
        most = before if before >= microbatches else before - 1
        limit = min(microbatches, most, int(cap * (1 + _ROUNDING) / held))
        if limit < 1:
            raise ScheduleError(
                f"{NAME}: rank {rank} has no memory for a microbatch, because each rank before it "
                "must have one more than the next"
            )
        limits.append(int(limit))
        before = limit
    return limits


class _Run:
    """One run of the heuristic with three choices."""

    def __init__(
        self,
        costs: Costs,
        microbatches: int,
        caps: Sequence[float],
        limits: Sequence[int],
        extra: bool,
        skip: bool,
        short: bool,
    ) -> None:
        p = len(costs.stages)
        self.stages = costs.stages
        self.links = costs.links
        self.microbatches = microbatches
        self.caps = [cap * (1 + _ROUNDING) for cap in caps]
        self.skip = skip
        self.short = short
        self.clock = list(
            accumulate(
                (x.f + c for x, c in zip(costs.stages, costs.links, strict=False)), initial=0
            )
        )
        self.started = list(self.clock)
        self.idle = [0.0] * p
        self.live = [0.0] * p
        self.f_ends: list[list[float]] = [[] for _ in range(p)]
        self.b_ends: list[list[float]] = [[] for _ in range(p)]
        self.w_done = [0] * p
        self.rows: list[list[Op]] = [[] for _ in range(p)]
        for rank, count in enumerate(self._warm_up(limits, extra)):
            for _ in range(count):
                self._forward(rank)
        for _ in range(microbatches):
            for rank in reversed(range(p)):
                self._backward(rank)
            for rank in range(p):
                if len(self.f_ends[rank]) < microbatches and not self._skips(rank):
                    self._forward(rank)
        for rank in range(p):
            while self.w_done[rank] < microbatches:
                self._weight(rank)

    @property
    def span(self) -> float:
        return max(end - start for end, start in zip(self.clock, self.started, strict=True))

    def _warm_up(self, limits: Sequence[int], extra: bool) -> list[int]:
        """Returns the number of F's before the first B of each rank."""
        m, last = self.microbatches, len(self.stages) - 1
        ends = self._forwards_alone(max(limits))
        counts = [1] * (last + 1)
        arrival = ends[last][0]
        for rank in range(last, -1, -1):
            own = ends[rank]
            count = 1 if rank == last else min(m, counts[rank + 1] + 1)
            while count < limits[rank] and own[count] <= arrival * (1 + _ROUNDING):
                count += 1
            more = extra and count < limits[rank] and own[count - 1] < arrival * (1 - _ROUNDING)
            counts[rank] = count + more
            first = max(arrival, own[counts[rank] - 1]) + self.stages[rank].b
            arrival = first + (self.links[rank - 1] if rank else 0.0)
        return counts

    def _forwards_alone(self, count: int) -> list[list[float]]:
        """Returns when each rank ends its F's if it runs nothing else."""
        ends: list[list[float]] = []
        for rank, stage in enumerate(self.stages):
            clock, own = self.clock[rank], []
            for j in range(count):
                came = ends[rank - 1][j] + self.links[rank - 1] if rank else 0.0
                clock = max(clock, came) + stage.f
                own.append(clock)
            ends.append(own)
        return ends

    def _skips(self, rank: int) -> bool:
        ahead = len(self.f_ends[rank]) - (
            len(self.f_ends[rank + 1]) if rank + 1 < len(self.stages) else math.inf
        )
        if not self.skip or ahead < 2:
            return False
        after = self.stages[rank + 1]
        soonest = self.b_ends[rank + 1][-1] + after.f + after.b + self.links[rank]
        return soonest <= self.clock[rank]

    def _forward(self, rank: int) -> None:
        j, stage = len(self.f_ends[rank]), self.stages[rank]
        self._make_room(rank, stage.mem_f)
        arrival = self.f_ends[rank - 1][j] + self.links[rank - 1] if rank else 0.0
        self._fill(rank, arrival)
        self.f_ends[rank].append(self._put(rank, Kind.F, j, arrival, stage.f, stage.mem_f))

    def _backward(self, rank: int) -> None:
        j, stage = len(self.b_ends[rank]), self.stages[rank]
        self._make_room(rank, stage.mem_b)
        last = rank + 1 == len(self.stages)
        arrival = self.f_ends[rank][j] if last else self.b_ends[rank + 1][j] + self.links[rank]
        self._fill(rank, arrival)
        self.b_ends[rank].append(self._put(rank, Kind.B, j, arrival, stage.b, stage.mem_b))

    def _weight(self, rank: int) -> None:
        stage = self.stages[rank]
        self._put(rank, Kind.W, self.w_done[rank], 0.0, stage.w, stage.mem_w)
        self.w_done[rank] += 1

    def _put(
        self, rank: int, kind: Kind, j: int, arrival: float, seconds: float, memory: float
    ) -> float:
        start = max(self.clock[rank], arrival)
        self.idle[rank] += start - self.clock[rank]
        self.clock[rank] = start + seconds
        self.live[rank] += memory
        self.rows[rank].append(Op(kind, rank, j))
        return self.clock[rank]

    def _waiting(self, rank: int) -> int:
        return len(self.b_ends[rank]) - self.w_done[rank]

    def _make_room(self, rank: int, memory: float) -> None:
        while self.live[rank] + memory > self.caps[rank] and self._waiting(rank):
            self._weight(rank)

    def _fill(self, rank: int, arrival: float) -> None:
        """Runs W's in the gap before an arrival."""
        w = self.stages[rank].w
        while self._waiting(rank) and arrival - self.clock[rank] >= w * (1 - _ROUNDING):
            self._weight(rank)
        gap = arrival - self.clock[rank]
        if gap > 0 and self._waiting(rank) and self.short and self._longest(rank, gap):
            self._weight(rank)

    def _longest(self, rank: int, gap: float) -> bool:
        """Whether the rank's idle time would become the longest of all ranks."""
        return self.idle[rank] + gap > max(self.idle)
