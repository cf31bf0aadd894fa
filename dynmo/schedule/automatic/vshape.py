"""Schedules in a V: two stages per rank, placed down the ranks and up again.

While a rank waits long for the B of one stage, the B of its other stage comes soon. On 3 ranks,
rank 0 holds the stages 0 and 5, rank 1 holds 1 and 4, and rank 2 holds 2 and 3, between which
nothing travels:

    stage  0 1 2 3 4 5
    rank   0 1 2 2 1 0

One search makes all of them. Their names are memory limits of a rank, in activations of a whole
rank (both its stages, one microbatch). Every one also keeps to the caller's caps:

    zb-v    p, as 1F1B. Next to no bubble if F = B = W.
    v-half  p / 2 + 1, half of 1F1B's. Still less bubble than 1F1B.
    v-min   p / 3 + 1, about the fewest with which the ranks can all be busy.
    v-auto  no limit of its own

V-Half and V-Min let a microbatch pass in less time (Zero Bubble, section 6; Pipeline Parallelism
with Controllable Memory).

Blocks. The search first lays down each rank's order of F's and B's, by one of two rules:

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
through before the next.

List scheduling. One clock runs all ranks. A free rank takes, of the ops that have arrived and fit
its memory, the one with the highest priority. Two kinds of runs take turns:

    forwards   from the first op on. Each op's priority is when it started in the run before.
    backwards  from the last op on, each op as late as it can. This pushes W's of the inner ranks
               behind their last B, where they delay nobody.

The first run's priority is when an op would start if microbatches followed each other at the
interval of the busiest rank. Runs in both directions are known from project scheduling as
forward-backward improvement (Li and Willis, 1992). An F is admitted only if the rank could empty
itself afterwards, the oldest microbatch first. Ranks therefore never wait for memory in a circle,
and every case in which one microbatch fits each rank has a schedule.

With little memory the blocks are shorter, with much the lists. Only v-auto takes the time for both.
The number of tries depends on the size of the case, never on time, so every rank finds the same
schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from dynmo.cost.layer_cost import Costs
from dynmo.errors import ScheduleError
from dynmo.schedule.automatic import _vshape_loops as core
from dynmo.schedule.automatic._list_loops import run_list
from dynmo.schedule.automatic.case import (
    NEVER,
    ROUNDING,
    Case,
    Lanes,
    make_case,
    microbatches_of,
    schedule_of,
)
from dynmo.schedule.bounds import Objective, lower_bound
from dynmo.schedule.generators import v_stage_ranks
from dynmo.schedule.graph import order_lanes, run_back
from dynmo.schedule.op import Schedule

# Shares of a W that a gap must hold for the W to fill it.
_SHARES = (1.0, 0.5)
# The steady state of ZB-V. F's of the lower and upper stage are 0 and 1, B's 3 and 2.
_CYCLES = ((0, 3, 1, 2), (3, 0, 1, 2))
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
# Numbers up to NEVER are times, and a block takes some multiple of all work.
_LARGEST = NEVER / 1e6
_SERIAL = ((0.0,) * 7, 0.0)
# Another share saves no order that is so many times longer than the best.
_HOPELESS = 1.1
# Number of ops that may be placed in all while the best block is searched, and the least and most
# number of times that they may be placed.
_BUDGET = 8_000_000
_TRIES = (60, 600)
# The shares of an op for which a rank waits for a more urgent one, in one run after the other.
_AHEAD = (0.2, 0.5, 0.2, 0.0)
# Number of ops that list scheduling may place in one direction, and the fewest and most runs.
_LIST_BUDGET = 150_000
_ROUNDS = (4, 60)

_Block = tuple[tuple[float, ...], float]

# The most activations of a whole rank that a schedule keeps on one of p ranks: p / part + more.
_MEMORY = {"zb-v": (1, 0.0), "v-half": (2, 1.0), "v-min": (3, 1.0), "v-auto": (1, NEVER)}


def v_shape(
    name: str,
    costs: Costs,
    microbatches: int,
    *,
    caps: Sequence[float] | None = None,
    first_trainable: int = 0,
    objective: Objective = Objective.SPAN,
) -> Schedule:
    """Search the shortest V within the memory that its name stands for, and within the caps.

    Raises:
        ScheduleError: A single microbatch does not fit a rank, or the times are too large. Every
            other case has a schedule.
    """
    m, ranks = microbatches, len(costs.stages) // 2
    work = sum(stage.seconds for stage in costs.stages) + 2 * sum(costs.links)
    if not m * work < _LARGEST:
        raise ScheduleError(
            f"{name}: the times are so large that their sum is no time any more; choose a larger "
            "unit"
        )
    stage_ranks = v_stage_ranks(ranks)
    case = make_case(costs, m, stage_ranks, caps, first_trainable, objective)
    both = case.hold[:ranks] + case.hold[: ranks - 1 : -1]
    for rank, cap in enumerate(caps or ()):
        if not case.cap[rank] >= both[rank]:
            raise ScheduleError(
                f"{name}: the memory limit of rank {rank} is {cap:.10g}, but one "
                f"microbatch of its stages {rank} and {2 * ranks - 1 - rank} takes "
                f"{both[rank]:.10g}; give it that much, or fewer layers"
            )
    part, more = _MEMORY[name]
    most = min(ranks / part + more, float(m))
    # The search of blocks is no proof: with more memory it may find a longer one. Blocks of v-auto
    # therefore run with the memory of zb-v, too.
    best, order = NEVER, np.zeros((ranks, 6 * m), np.int32)
    for limit in sorted({min(most, float(ranks)), most}):
        blocks = _Blocks(case._replace(cap=np.minimum(case.cap, limit * both * ROUNDING)))
        if blocks.time < best:
            best, order = blocks.time, blocks.ops
    if name == "v-auto":
        goal = lower_bound(costs, m, first_trainable, objective, stage_ranks=stage_ranks)
        order = _improve(case, goal * (1 + 1e-12), best, order)
    return schedule_of(name, case, order)


def _evenly(case: Case) -> NDArray[np.float64]:
    """Compute when ops start if microbatches follow each other at the busiest rank's interval."""
    f, b, w = case.took.reshape(3, -1)
    n = len(f)
    link = np.append(case.delay[1:n, 0], 0.0)
    down = np.concatenate([[0.0], np.cumsum(f[:-1] + link[:-1])])
    up = np.cumsum((b + link)[::-1])[::-1] - b - link + down[-1] + f[-1]
    interval = float(np.bincount(case.rank_of, f + b + w).max())
    first = np.concatenate([down, up, up + b])
    return first[:, None] + interval * np.arange(case.m, dtype=np.float64)


def _improve(case: Case, goal: float, best: float, order: Lanes) -> Lanes:
    """Run the ops forwards and backwards in turn. Each run's order is the next one's priority.

    Returns `order`, which takes `best`, or a shorter one. It stops at one as short as `goal`.
    """
    ranks, reached, keys = len(case.cap), NEVER, _evenly(case)
    start, clock, trial = np.zeros_like(keys), np.zeros((2, ranks)), np.zeros_like(order)
    policy = np.zeros((0, 0), np.int64)
    rounds = min(_ROUNDS[1], max(_ROUNDS[0], _LIST_BUDGET // order.size))
    for turn in range(2 * rounds + 1):
        forwards, ahead = turn % 2 == 0, _AHEAD[(turn - 1) // 2 % len(_AHEAD)] if turn else 0.0
        time, _ = run_list(case, turn, keys, ahead, policy, NEVER, clock, start, trial)
        reached = min(reached, time) if forwards else reached
        if time >= NEVER or (turn == 2 and reached > 1.05 * best):
            break
        if forwards and time < best:
            best, order, trial = time, trial, order
            if best <= goal:
                break
        # A rank that begins early ends early, if its own span counts.
        clock[0] = clock[0].max() - clock[0] if forwards and not case.whole else 0.0
        keys = np.ascontiguousarray(-(start + case.took[:, None])[:, ::-1])
    return order


class _Blocks:
    """The search of the shortest block. Every try of an order takes one from `left`.

    Attributes:
        time: The time of the best order.
        ops: The best order, with its W's.
    """

    def __init__(self, case: Case) -> None:
        least, most = _TRIES
        p, m = len(case.cap), case.m
        self._case = case
        self._work = float(np.bincount(np.tile(case.rank_of, 3), case.took).max())  # busiest rank
        self.left = min(most, max(least, _BUDGET // (6 * p * m)))
        self.time, self.ops, self._trial = NEVER, *np.zeros((2, p, 6 * m), np.int32)
        self._order = np.zeros((p, 4 * m), np.int32)
        self._latest, self._end = np.zeros((2, 4 * p, m))
        ranks, n = np.arange(p), 2 * p
        # The F's and B's that a microbatch meets on each rank, and how often each runs.
        self._lanes = np.stack([ranks, n - 1 - ranks, 2 * n - 1 - ranks, n + ranks], axis=1)
        self._runs = np.where(self._lanes < n + case.frozen, 0, m)
        self._runs[:, :2] = m
        self._block: _Block = _SERIAL
        self._block_time = NEVER
        self._lay(_SERIAL)
        self._play()
        for cycle in _CYCLES:
            core.cycles(self._lanes, self._runs.copy(), np.array(cycle), self._order)
            self._play()
        for turns, hops in product(_TURNS, _HOPS):
            self._shortest_interval((*hops, *turns))
        self._descend()
        self._wait()

    def _lay(self, block: _Block) -> None:
        shape, runs, work = np.array(block[0], np.float64), self._runs.copy(), self._work
        core.block(self._case, self._lanes, runs, work / 6, shape, block[1] * work, self._order)

    def _play(self) -> float:
        """Return the time of the order, or never if memory forbids it."""
        shortest = NEVER
        for share in _SHARES:
            self.left -= 1
            time = self._run(share)
            shortest = min(shortest, time)
            # The share only moves W's about: memory is also short with another share.
            if time > _HOPELESS * self.time:
                break
        return shortest

    def _run(self, share: float, patient: int = 0) -> float:
        spaces = self._latest, self._end, self._trial
        time = core.play(self._case, self._order, share, patient, *spaces)
        if time < self.time:
            self.time, self._share = time, share
            self.ops, self._trial = self._trial, self.ops
        return time

    def _try(self, block: _Block) -> float:
        self._lay(block)
        time = self._play()
        if time < self._block_time:
            self._block_time, self._block = time, block
        return time

    def _shortest_interval(self, shape: tuple[float, ...]) -> None:
        """Search the shortest interval of a block: most microbatches are on their way at once."""
        low = high = 1.0
        while self.left > 0 and high < 16 and self._try((shape, high)) == NEVER:
            low, high = high, high * 2
        for _ in range(_HALVINGS if high > 1.0 else 0):
            if self.left <= 0:
                return
            middle = (low + high) / 2
            low, high = (middle, high) if self._try((shape, middle)) == NEVER else (low, middle)

    def _descend(self) -> None:
        """Change the best block one number at a time, by ever smaller steps, while that helps."""
        for step in _STEPS:
            helped = True
            while helped:
                helped = False
                for at, sign in product(range(8), (1, -1)):
                    if self.left <= 0:
                        return
                    shape, interval = self._block
                    if at == 7:
                        interval *= 1 + 0.06 * sign * step
                    else:
                        by = sign * step
                        shape = tuple(max(0.0, x + by * (i == at)) for i, x in enumerate(shape))
                    before = self._block_time
                    helped = self._try((shape, interval)) < before or helped

    def _wait(self) -> None:
        """Find the number of first ranks on which W's may push back the last B's."""
        for rank, row in enumerate(self.ops):
            self._order[rank] = row[row < 4 * len(self.ops)][: self._order.shape[1]]
        self._run(self._share)
        self._find_latest()
        for patient in range(1, len(self._case.cap) + 1):
            self._run(self._share, patient)

    def _find_latest(self) -> None:
        """Compute when each F and B must start at the latest, if W's take no time.

        No rank may end later than the rank that ends last, after one more W of its first stage.
        """
        case, took, ends = self._case, self._case.took, self._end[self._lanes]
        began = (ends - took[self._lanes, None]).min(axis=(1, 2))
        ended = np.where(ends < NEVER, ends, 0.0).max(axis=(1, 2))
        last = took[4 * len(ended) :][: len(ended)]
        earliest = began.min() if case.whole else began
        rest = last - earliest - (ended + (last - earliest)).max()
        lengths = self._runs.sum(axis=1)
        ops = self._order[np.arange(self._order.shape[1]) < lengths[:, None]].astype(np.int64)
        numbers = microbatches_of(ops, case.m)
        rows = order_lanes(ops, numbers, lengths.tolist(), case.before, case.lag).rows
        tail, out = np.empty((2, len(rows)))
        run_back(rows, case.delay, took, rest, tail, out)
        lane = rows[:, 1]
        self._latest[lane, rows[:, 2]] = -(tail + took[lane])
