"""Schedules in a V: two stages per rank, placed down the ranks and up again.

While a rank waits long for the B of one stage, the B of its other stage comes soon. On 3 ranks,
rank 0 holds the stages 0 and 5, rank 1 holds 1 and 4, and rank 2 holds 2 and 3, between which
nothing travels:

    stage  0 1 2 3 4 5
    rank   0 1 2 2 1 0

ZB-V fills the pipeline as far as p activations of a whole rank (both its stages, one microbatch)
allow. V-Half and V-Min let a microbatch pass in less time and keep about p / 2 + 1 and p / 3 + 1 of
them (Zero Bubble, section 6; Pipeline Parallelism with Controllable Memory).

The search first lays down each rank's order of F's and B's, by one of two rules:

    cycles  the hand-made ZB-V: F's for as long as the first microbatch is on its way, then F and B
            of both stages in turn
    block   one microbatch's F's and B's, spread over time, repeated at one interval for all
            microbatches

Then the ranks run their orders at the true costs. A W goes where it costs least. That is a gap that
holds most of it, or the place before an F that has no memory without it. Before its last B's a rank
has gaps that are each too short for a W, but not all together. A W there may delay B's as far as
the last microbatch's way back allows.

The search takes the block that comes out shortest within memory, and changes it a little for as
long as that helps. One block always keeps within memory: it is so long that one microbatch is
through before the next. The number of tries depends on the size of the case, never on time, so
every rank finds the same schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from dynmo.cost.layer_cost import Costs
from dynmo.errors import ScheduleError
from dynmo.schedule.automatic import _vshape_loops as core
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import v_stage_ranks
from dynmo.schedule.generators import check_numbers
from dynmo.schedule.op import Kind, Op, Schedule

_Floats = NDArray[np.float64]
_Order = NDArray[np.int8]

# Shares of a W that a gap must hold for the W to fill it.
_SHARES = (1.0, 0.5)
# The steady state of ZB-V.
_CYCLES = (
    (core.F_LOWER, core.B_LOWER, core.F_UPPER, core.B_UPPER),
    (core.B_LOWER, core.F_LOWER, core.F_UPPER, core.B_UPPER),
)
# A block has four hops (F down, F up, B down, B up) and three turns (F to F, F to B, B to B). These
# are the least lengths of its hops, and below the rests at its turns. The unit is a sixth of the
# busiest rank's work for one microbatch.
_HOPS = (
    (0, 0, 0, 0),
    (1, 2, 1, 2),
    (2, 1, 2, 1),
    (2.5, 1, 2.5, 1),
    (2, 0, 2, 1.5),
    (1.5, 2, 1.5, 2),
    (2, 4, 2, 4),
    (4, 2, 4, 2),
)
_TURNS = ((0, 0, 0), (2, 0, 2), (0, 0, 1))
_STEPS = (1.0, 0.5, 0.25)
# The interval is in multiples of that work. It is doubled until memory holds the block, then halved
# back so many times.
_HALVINGS = 5
# Numbers up to core.NEVER are times, and a block takes some multiple of all work.
_LARGEST = core.NEVER / 1e6
_SERIAL = ((0.0,) * 7, 0.0)
# Number of ops that may be placed in all while the best order is searched, and the least and most
# number of times that they may be placed.
_BUDGET = 8_000_000
_TRIES = (60, 600)

_Block = tuple[tuple[float, ...], float]


# The most activations of a whole rank that a schedule keeps on one of p ranks.
_MEMORY: dict[str, Callable[[int], float]] = {
    "zb-v": lambda ranks: float(ranks),
    "v-half": lambda ranks: ranks / 2 + 1,
    "v-min": lambda ranks: ranks / 3 + 1,
}


def v_shape(
    name: str,
    costs: Costs,
    microbatches: int,
    *,
    caps: Sequence[float] | None = None,
    first_trainable: int = 0,
    objective: Objective = Objective.SPAN,
) -> Schedule:
    """Make the shortest V within the memory that its name stands for.

    zb-v    p activations of a whole rank, as 1F1B. Next to no bubble if F = B = W.
    v-half  p / 2 + 1 activations, half of 1F1B's. Still less bubble than 1F1B.
    v-min   p / 3 + 1 activations, about the fewest with which the ranks can all be busy.
    """
    check_stages(name, costs, microbatches, first_trainable)
    most = _MEMORY[name](len(costs.stages) // 2)
    case = _case(name, most, costs, microbatches, caps, first_trainable, objective)
    return _shortest(name, case)[1]()


def within_caps(
    name: str,
    costs: Costs,
    microbatches: int,
    caps: Sequence[float] | None,
    first_trainable: int,
    objective: Objective,
) -> tuple[float, Callable[[], Schedule]]:
    """Find the shortest repeating block in a V that the caps allow: its time, and the schedule.

    The search is no proof: with more memory it may find a longer block. It therefore runs with the
    memory of zb-v, too.
    """
    ranks = len(costs.stages) // 2
    # No more than all microbatches are ever on their way.
    limits = {float(min(ranks, microbatches)), float(microbatches)}
    found = (
        _shortest(name, _case(name, most, costs, microbatches, caps, first_trainable, objective))
        for most in sorted(limits)
    )
    return min(found, key=itemgetter(0))


def _shortest(name: str, case: _Case) -> tuple[float, Callable[[], Schedule]]:
    order, share, patient = _search(case)
    time = case.run(order, share, patient)
    assert time >= 0.0, "an order that was run before runs again"
    return time, partial(_schedule, name, case)


def check_stages(name: str, costs: Costs, microbatches: int, first_trainable: int) -> None:
    stages = len(costs.stages)
    if stages < 2 or stages % 2:
        raise ScheduleError(
            f"{name} has 2 stages a rank, but costs are given for {stages}; give the costs of 2 "
            "stages for each rank"
        )
    check_numbers(name, stages // 2, microbatches, stages, first_trainable)
    if (
        not microbatches * (sum(stage.seconds for stage in costs.stages) + 2 * sum(costs.links))
        < _LARGEST
    ):
        raise ScheduleError(
            f"{name}: the times are so large that their sum is no time any more; choose a larger "
            "unit"
        )


class _Case:
    """The costs and limits as arrays, and work space."""

    def __init__(self, problem: core.Problem) -> None:
        p, m = len(problem.cap), problem.m
        shape = (2, 2 * p, m)
        self.problem, self.ranks, self.microbatches = problem, p, m
        self.timetable = core.Timetable(
            latest=np.zeros(shape),
            arrival=np.zeros(shape),
            start=np.zeros(shape),
            began=np.zeros(p),
            ended=np.zeros(p),
            ops=np.zeros((p, 6 * m), np.int8),
        )
        self._given = tuple(problem), tuple(self.timetable)
        stages = problem.f + problem.b + problem.w
        self.work = float((stages[:p] + stages[: p - 1 : -1]).max())  # of the busiest rank

    def run(self, order: _Order, share: float, patient: int = 0) -> float:
        """Put W's into the order, and return its span (or makespan)."""
        return core.play(*self._given, order, share, patient)

    def cycles(self, cycle: tuple[int, ...]) -> _Order:
        order = np.zeros((self.ranks, 4 * self.microbatches), np.int8)
        core.cycles(self.microbatches, self.problem.frozen, np.array(cycle, np.int64), order)
        return order

    def block(self, block: _Block) -> _Order:
        shape, interval = block
        order = np.zeros((self.ranks, 4 * self.microbatches), np.int8)
        unit, period = self.work / 6, interval * self.work
        core.block(self._given[0], unit, np.array(shape, np.float64), period, order)
        return order


def _case(
    name: str,
    most: float,
    costs: Costs,
    microbatches: int,
    caps: Sequence[float] | None,
    first_trainable: int,
    objective: Objective,
) -> _Case:
    n = len(costs.stages)
    ranks = n // 2
    if caps is not None and len(caps) != ranks:
        raise ScheduleError(
            f"{name}: {len(caps)} memory limits for {ranks} ranks; give one limit per rank"
        )
    trains = np.arange(n) >= first_trainable
    stages = costs.stages
    # An F takes at once the most that its microbatch will hold. A B that adds memory therefore
    # never finds too little.
    hold = np.array([max(s.held, 0.0) for s in stages], np.float64) * trains
    stash = np.array([max(s.mem_f + s.mem_b, 0.0) for s in stages], np.float64) * trains
    both = hold[:ranks] + hold[: ranks - 1 : -1]
    cap = most * both
    if caps is not None:
        cap = np.minimum(cap, np.array(caps, np.float64))
    for rank in range(ranks):
        if not cap[rank] * (1 + 1e-9) >= both[rank]:
            raise ScheduleError(
                f"{name}: the memory limit of rank {rank} is {cap[rank]:.10g}, but one microbatch "
                f"of its stages {rank} and {n - 1 - rank}"
                f" takes {both[rank]:.10g}; give it that much, or fewer layers"
            )
    link = np.array([*costs.links, 0.0], np.float64)
    link[ranks - 1] = 0.0
    times = (np.array([getattr(s, key) for s in stages], np.float64) for key in ("f", "b", "w"))
    f, b, w = times
    return _Case(
        core.Problem(
            microbatches,
            first_trainable,
            objective is Objective.MAKESPAN,
            f,
            b * trains,
            w * trains,
            link,
            hold,
            stash,
            cap,
        )
    )


def _search(case: _Case) -> tuple[_Order, float, int]:
    """Find the order, the share of W that a gap must hold, and the number of patient ranks."""
    search = _Search(case)
    search.order(case.block(_SERIAL))
    for cycle in _CYCLES:
        search.order(case.cycles(cycle))
    for turns, hops in product(_TURNS, _HOPS):
        search.shortest_interval((*hops, *turns))
    search.descend()
    assert search.best is not None
    return search.best, search.share, _patience(case, search.best, search.share, search.time)


class _Search:
    """The best order so far, and the best block. Every try of an order takes one from `left`."""

    def __init__(self, case: _Case) -> None:
        least, most = _TRIES
        self.case = case
        self.left = min(most, max(least, _BUDGET // (6 * case.ranks * case.microbatches)))
        self.best: _Order | None = None
        self.time, self.share = np.inf, 1.0
        self.block: _Block = _SERIAL
        self.block_time = np.inf

    def order(self, order: _Order) -> float:
        """Return the time of the order, or infinity if memory forbids it."""
        shortest = np.inf
        for share in _SHARES:
            time = self.case.run(order, share)
            self.left -= 1
            if time < 0.0:
                break  # the share only moves W's about: memory is also short with another share
            shortest = min(shortest, time)
            if time < self.time:
                self.time, self.best, self.share = time, order, share
        return shortest

    def try_(self, block: _Block) -> float:
        time = self.order(self.case.block(block))
        if time < self.block_time:
            self.block_time, self.block = time, block
        return time

    def shortest_interval(self, shape: tuple[float, ...]) -> None:
        """Search the shortest interval of a block: most microbatches are on their way at once."""
        low = high = 1.0
        while self.left > 0 and high < 16 and self.try_((shape, high)) == np.inf:
            low, high = high, high * 2
        for _ in range(_HALVINGS if high > 1.0 else 0):
            if self.left <= 0:
                return
            middle = (low + high) / 2
            low, high = (middle, high) if self.try_((shape, middle)) == np.inf else (low, middle)

    def descend(self) -> None:
        """Change the best block one number at a time, by ever smaller steps, while that helps."""
        for step in _STEPS:
            helped = True
            while helped:
                helped = False
                for at, sign in product(range(8), (1, -1)):
                    if self.left <= 0:
                        return
                    shape, interval = self.block
                    if at == 7:
                        interval *= 1 + 0.06 * sign * step
                    else:
                        by = sign * step
                        shape = tuple(max(0.0, x + by * (i == at)) for i, x in enumerate(shape))
                    before = self.block_time
                    helped = self.try_((shape, interval)) < before or helped


def _patience(case: _Case, order: _Order, share: float, best: float) -> int:
    """Find the number of first ranks on which W's may push back the last B's."""
    case.run(order, share)
    problem, ranks = case.problem, case.ranks
    began, ended = case.timetable.began, case.timetable.ended
    tail = np.where(np.arange(ranks) >= problem.frozen, problem.w[:ranks], 0.0)
    began = np.full(ranks, began.min()) if problem.whole else began
    target = float((ended + tail - began).max())
    deadline = began + target - tail
    core.latest_starts(tuple(problem), order, deadline, case.timetable.latest)
    chosen = 0
    for patient in range(1, case.ranks + 1):
        time = case.run(order, share, patient)
        if 0.0 <= time < best:
            best, chosen = time, patient
    return chosen


def _schedule(name: str, case: _Case) -> Schedule:
    p, n, frozen = case.ranks, 2 * case.ranks, case.problem.frozen
    kinds = (Kind.F, Kind.F, Kind.B, Kind.B, Kind.W, Kind.W)  # of the codes in `_vshape_loops`
    rows: list[tuple[Op, ...]] = []
    for rank in range(p):
        stages = (rank, n - 1 - rank, n - 1 - rank, rank, rank, n - 1 - rank)
        length = case.microbatches * sum(3 if s >= frozen else 1 for s in set(stages))
        done = [0] * 6
        row: list[Op] = []
        for code in case.timetable.ops[rank, :length].tolist():
            row.append(Op(kinds[code], stages[code], done[code]))
            done[code] += 1
        rows.append(tuple(row))
    return Schedule(name, case.microbatches, v_stage_ranks(p), tuple(rows), frozen)
