"""The best schedule of a small case, with its proof, by OR-tools' CP-SAT.

OR-tools is the optional extra `exact`. Every F, B and W is an interval of time on its rank. Every
pair of ops on one rank whose order is open has a yes/no variable `before`. The proof is fast
because these pairs are few: the graph of what waits for what settles all others. On one stage only
these pairs are open, for j < i:

    B(j) or F(i) first      W(j) or F(i) first      W(j) or B(i) first

Memory depends on the order alone, so it needs no time variable: F(i) may start only if enough of
B(0..) and W(0..) come before it.
"""

# OR-tools types only_enforce_if in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, combinations
from math import ceil, floor, gcd, isfinite, lcm
from typing import TYPE_CHECKING

import numpy as np

from dynmo.cost.layer_cost import Costs, StageCost
from dynmo.errors import ScheduleError, not_installed
from dynmo.schedule.bounds import Objective, lower_bound
from dynmo.schedule.graph import delays
from dynmo.schedule.op import Kind, Op, Schedule
from dynmo.schedule.simulator import lane_changes, lane_times, peak_memory, simulate

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import Constraint, IntVar
    from ortools.sat.python.cp_model_helper import Literal

PROVEN = 1e-4
"""A schedule counts as proven when nothing can be shorter by more than this share."""

TICKS = 10**7
"""The start's length is cut into so many ticks if the times have no common unit."""

LARGEST = 20_000
"""Open pairs beyond which the solver is not asked: building the model alone would take seconds."""


@dataclass(frozen=True)
class Exact:
    """A schedule and the proven bound.

    Attributes:
        bound: A length that no schedule can beat, in the costs' unit.
        proven: Whether the schedule's length and the bound are equal within PROVEN.
        seconds: Seconds that the search took.
    """

    schedule: Schedule
    bound: float
    proven: bool
    seconds: float


def exact(
    start: Schedule,
    costs: Costs,
    *,
    caps: Sequence[float] | None = None,
    objective: Objective = Objective.SPAN,
    seconds: float = 5.0,
    workers: int = 2,
) -> Exact:
    """Find the shortest schedule in a limited time, with a proven bound.

    The bound holds for the given costs. B and W are separate ops in the search and in its result.
    With one worker the result is the same in every run that is not cut short.

    The bound: the solver works in whole ticks. Decimal times are whole numbers of ticks if the
    length has no more than 1e7 of them. Others are rounded down, each op and link for itself.
    Rounding down makes no order longer, because an order takes as long as its longest chain of ops
    and links. A rank's own span leaves out its lead, and that lead is in every chain that gets
    there. A bound proven for the rounded times therefore holds for the true ones. It is less than
    the true times would give by at most a tick, 1e-7 of the length, for each op and link of a
    chain. The larger of this bound and `lower_bound` is returned. A schedule's own length is
    always simulated with the true costs.

    Args:
        start: A schedule within `caps` that the result is never longer than. It gives the
            placement, too. The first stages must lie one on each rank.
        costs: Costs of each stage.
        caps: Most live memory of each rank, in the costs' unit. None means unlimited.
        objective: Whether the span or the makespan counts.
        seconds: Time limit of the search.
        workers: Number of threads of the solver.

    Raises:
        ScheduleError: The solver is needed and missing, or `start` cannot run.
    """
    began = time.perf_counter()
    if set(start.stage_ranks[: start.ranks]) != set(range(start.ranks)):
        raise ScheduleError(
            f"start {start.name!r} has placement {start.stage_ranks}; the first {start.ranks} "
            "stages must lie one on each rank"
        )
    best, length = start, simulate(start, costs).length(objective)
    bound = lower_bound(
        costs, start.microbatches, start.first_trainable, objective, caps, start.stage_ranks
    )
    apart = _split(start)
    # About (3m)^2 / 6 pairs of one stage's 3m ops are open.
    small = sum(len(row) ** 2 for row in apart.ops) // 6 <= LARGEST
    if length > bound * (1 + 1e-9) and small and _fits(apart, costs, caps):
        model = _Model(apart, costs, caps, objective, bound)
        found, proven = model.solve(seconds - (time.perf_counter() - began), workers)
        bound = max(bound, proven)
        if found is not None and _fits(found, costs, caps):
            best = min(best, found, key=lambda made: simulate(made, costs).length(objective))
            length = simulate(best, costs).length(objective)
    bound = min(bound, length)
    return Exact(best, bound, length <= bound * (1 + PROVEN), time.perf_counter() - began)


def _fits(schedule: Schedule, costs: Costs, caps: Sequence[float] | None) -> bool:
    # Sums of floats may end a little over it.
    peaks = zip(peak_memory(schedule, costs), caps or (), strict=False)
    return all(peak <= cap * (1 + 1e-9) for peak, cap in peaks)


def _split(schedule: Schedule) -> Schedule:
    """Split every BW into B, then W. No op ends later for it, and both can be moved apart."""
    parts = {kind: (kind,) for kind in Kind} | {Kind.BW: (Kind.B, Kind.W)}
    rows = ((Op(kind, *op[1:]) for op in row for kind in parts[op.kind]) for row in schedule.ops)
    return replace(schedule, ops=tuple(map(tuple, rows)))


def _scale(values: Iterable[float], whole: float, most: int) -> Fraction:
    """Choose how many ticks a unit has: whole numbers for all values, if `most` allows it."""
    given = [Fraction(str(value)) for value in values if value]
    parts = lcm(*(x.denominator for x in given))
    scale = Fraction(parts, gcd(*(int(x * parts) for x in given)) or 1)
    return scale if Fraction(whole) * scale <= most else Fraction(most) / Fraction(whole)


def _floor(values: Iterable[float], scale: Fraction) -> list[int]:
    return [floor(Fraction(str(value)) * scale) for value in values]


class _Model:
    """The CP-SAT model in whole ticks, with B and W apart. `start` is the hint and the longest.

    Ops have the numbers of their rows in the start's `order`.
    """

    def __init__(
        self,
        start: Schedule,
        costs: Costs,
        caps: Sequence[float] | None,
        objective: Objective,
        bound: float,
    ) -> None:
        try:
            from ortools.sat.python import cp_model
        except ImportError:
            raise ScheduleError(f"exact schedules: {not_installed('ortools')}") from None
        self.start = start
        self.cp = cp_model
        self.model = cp_model.CpModel()
        times = [x for stage in costs.stages for x in (stage.f, stage.b, stage.w)]
        whole = simulate(start, costs).length(objective)
        self.scale = _scale([*times, *costs.links], whole, TICKS)
        stages = (StageCost(*_floor((x.f, x.b, x.w), self.scale)) for x in costs.stages)
        ticks = Costs(tuple(stages), tuple(_floor(costs.links, self.scale)))
        timeline = simulate(start, ticks)
        longest = int(timeline.length(objective))
        least = floor(Fraction(bound) * self.scale * (1 - Fraction(1, 10**9)))
        length = self.model.new_int_var(min(longest, least), longest, "length")
        self.model.add_hint(length, longest)
        self.lanes = start.order.rows[:, 1].tolist()
        self.took = lane_times(ticks).astype(int)[self.lanes].tolist()
        hint = np.concatenate(timeline.starts)[start.order.at].astype(int).tolist()
        self.own: list[list[int]] = [[] for _ in start.ops]
        for x, rank in enumerate(start.order.rows[:, 0].tolist()):
            self.own[rank].append(x)
        self.at: dict[int, IntVar] = {}
        for row in self.own:
            # A rank's first op is the F of microbatch 0 on its first stage. It has the same time in
            # every schedule, because it follows only such first F's.
            opening = hint[row[0]]
            since = opening if objective is Objective.SPAN else 0
            for x in row:
                latest = opening if x == row[0] else since + longest - self.took[x]
                self.at[x] = self.model.new_int_var(opening, latest, "")
                self.model.add_hint(self.at[x], hint[x])
                self.model.add(length >= self.at[x] + self.took[x] - since)
        self._wait(ticks)
        self.before: dict[tuple[int, int], Literal] = {}
        for rank, row in enumerate(self.own):
            self._one_at_a_time(row)
            if caps is not None and isfinite(caps[rank]):
                self._memory(row, costs, caps[rank])
        self.model.minimize(length)

    def _after(self, x: int, y: int, delay: int = 0) -> Constraint:
        return self.model.add(self.at[y] >= self.at[x] + self.took[x] + delay)

    def _wait(self, ticks: Costs) -> None:
        """Model the graph, and note which ops come before which in every schedule."""
        rows = self.start.order.rows
        delay = delays(self.start.graph, ticks.links).astype(int)
        self.settled = np.zeros((len(rows), len(rows)), bool)
        latest: dict[int, int] = {}
        for y, (_, lane, _, *needs) in enumerate(rows.tolist()):
            waits = [(x, int(delay[lane, k])) for k, x in enumerate(needs) if x >= 0]
            if lane in latest:  # a lane's microbatches come in order
                waits.append((latest[lane], 0))
            latest[lane] = y
            for x, link in waits:
                self._after(x, y, link)
                self.settled[x, y] = True
                self.settled[:, y] |= self.settled[:, x]

    def _one_at_a_time(self, row: Sequence[int]) -> None:
        """Model the order of a rank's ops, without circles, and its effect on the times."""
        model, before = self.model, self.before
        model.add_no_overlap(
            model.new_fixed_size_interval_var(self.at[x], self.took[x], "") for x in row
        )
        for x, y in combinations(row, 2):  # in the order of the hint
            if not self.settled[x, y]:
                before[x, y] = model.new_bool_var("")
                before[y, x] = ~before[x, y]
                model.add_hint(before[x, y], True)
                self._after(x, y).only_enforce_if(before[x, y])
                self._after(y, x).only_enforce_if(before[y, x])
        # Settled pairs: x is just before y, and therefore before every op that y is before.
        settled = self.settled[np.ix_(row, row)]
        for pair in np.argwhere(settled & ~(settled @ settled)):
            x, y = (row[int(i)] for i in pair)
            self._after(x, y)
            for z in row:
                if (x, z) in before and (y, z) in before:
                    model.add_implication(before[y, z], before[x, z])
        # Triples of ops that are open to each other: x before y before z means x before z.
        for x, y, z in combinations(row, 3):
            if (x, y) in before and (y, z) in before and (x, z) in before:
                model.add_bool_or(~before[x, y], ~before[y, z], before[x, z])
                model.add_bool_or(before[x, y], before[y, z], ~before[x, z])

    def _is_before(self, x: int, y: int) -> Literal | bool:
        return self.before[x, y] if (x, y) in self.before else bool(self.settled[x, y])

    def _memory(self, row: Sequence[int], costs: Costs, cap: float) -> None:
        """Keep the sum of `peak_memory` under the cap, in whole parts of a unit.

        Changes are rounded down if there is no common part: the schedule found is checked again.
        """
        changes = lane_changes(costs, self.start.first_trainable)[self.lanes]
        scale = _scale(changes[row].tolist(), cap or 1.0, 10**12)
        parts = _floor(changes.tolist(), scale)
        room = floor(Fraction(cap) * (1 + Fraction(1, 10**9)) * scale)
        for x in row:
            if changes[x] > 0:
                held = sum(parts[y] * self._is_before(y, x) for y in row if y != x)
                self.model.add(held <= room - parts[x])

    def solve(self, seconds: float, workers: int) -> tuple[Schedule | None, float]:
        """Return the best schedule found, if any, and the proven bound in the costs' unit."""
        cp = self.cp
        solver = cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.0, seconds)
        solver.parameters.num_workers = workers
        # The last ticks of a rounded time are not worth the search.
        solver.parameters.relative_gap_limit = 1e-6
        status = solver.solve(self.model)
        assert status in (cp.OPTIMAL, cp.FEASIBLE, cp.UNKNOWN), solver.status_name(status)
        proven = solver.best_objective_bound
        bound = float(ceil(proven - 1e-6) / self.scale) if isfinite(proven) else 0.0
        if status == cp.UNKNOWN:
            return None, bound
        ops = tuple(chain.from_iterable(self.start.ops))
        rows: list[tuple[Op, ...]] = []
        for row in self.own:
            ahead = {
                y: sum(solver.boolean_value(self._is_before(x, y)) for x in row if x != y)
                for y in row
            }
            at = self.start.order.at[sorted(row, key=ahead.__getitem__)]
            rows.append(tuple(ops[int(i)] for i in at))
        return replace(self.start, ops=tuple(rows)), bound
