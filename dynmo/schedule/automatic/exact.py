"""The best schedule of a small case, with its proof, by OR-tools' CP-SAT.

OR-tools is the optional extra `exact`. Every F, B and W is an interval of time on its rank. Every
pair of ops on one rank whose order is open has a yes/no variable `before`. The proof is fast
because these pairs are few. Each kind runs in microbatch order, and one microbatch runs F's down
and B's up the pipeline. Only these pairs of one stage are therefore open, for j < i:

    B(j) or F(i) first      W(j) or F(i) first      W(j) or B(i) first

Memory depends on the order alone, so it needs no time variable: F(i) may start only if enough of
B(0..) and W(0..) come before it.
"""

# OR-tools types only_enforce_if in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, pairwise
from math import ceil, floor, gcd, isfinite, lcm
from typing import TYPE_CHECKING

from dynmo.cost.layer_cost import Costs, StageCost
from dynmo.errors import ScheduleError, not_installed
from dynmo.schedule.automatic.zero_bubble import automatic
from dynmo.schedule.bounds import Objective, lower_bound
from dynmo.schedule.op import Kind, Op, Schedule, dependencies, validate
from dynmo.schedule.simulator import duration, memory_change, peak_memory, simulate

if TYPE_CHECKING:
    from ortools.sat.python import cp_model
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
    costs: Costs,
    microbatches: int,
    *,
    caps: Sequence[float] | None = None,
    first_trainable: int = 0,
    objective: Objective = Objective.SPAN,
    start: Schedule | None = None,
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
    chain. The larger of this bound and `lower_bound` is returned. A schedule's own length is always
    simulated with the true costs.

    Args:
        costs: Costs of each stage.
        microbatches: Microbatches of a step.
        caps: Most live memory of each rank, in the costs' unit. None means unlimited.
        first_trainable: The stages before this one run F only.
        objective: Whether the span or the makespan counts.
        start: A schedule that the result is never longer than. It also gives the placement, with
            one stage per rank or several. The first stages must lie one on each rank. None takes
            the schedule of `automatic`.
        seconds: Time limit of the search.
        workers: Number of threads of the solver.

    Raises:
        ScheduleError: The solver is needed and missing, `start` is for another case or over a cap,
            or a cap admits no schedule at all.
    """
    began = time.perf_counter()
    if start is None:
        schedule = automatic(
            costs, microbatches, caps=caps, first_trainable=first_trainable, objective=objective
        )
        start = replace(schedule, name="exact")
    _check_start(start, costs, microbatches, caps, first_trainable)
    known = start.stage_ranks == tuple(range(start.ranks))
    length = _length(start, costs, objective)
    bound = (
        lower_bound(costs, microbatches, first_trainable, objective, caps)
        if known
        else _busiest(start, costs)
    )
    best = start
    apart = _split(start)
    if length > bound * (1 + 1e-9) and _fits(apart, costs, caps):
        model = _Model(apart, costs, caps, objective, bound)
        if model.open_pairs <= LARGEST:
            solution, proven = model.solve(
                max(0.0, seconds - (time.perf_counter() - began)), workers
            )
            bound = max(bound, proven)
            if (
                solution is not None
                and _length(solution, costs, objective) < length
                and _fits(solution, costs, caps)
            ):
                best, length = solution, _length(solution, costs, objective)
    bound = min(bound, length)
    return Exact(best, bound, length <= bound * (1 + PROVEN), time.perf_counter() - began)


# -- the case --------------------------------------------------------------------------------------


def _length(schedule: Schedule, costs: Costs, objective: Objective) -> float:
    return simulate(schedule, costs).length(objective)


def _over(live: float, cap: float) -> bool:
    """Return whether `live` is over the cap. Sums of floats may end a little over it."""
    return not live <= cap * (1 + 1e-9)


def _fits(schedule: Schedule, costs: Costs, caps: Sequence[float] | None) -> bool:
    return caps is None or not any(map(_over, peak_memory(schedule, costs), caps))


def _busiest(schedule: Schedule, costs: Costs) -> float:
    """Return the work of the busiest rank, a bound for ranks with several stages."""
    return max(sum(duration(costs, op) for op in row) for row in schedule.ops)


def _check_start(
    start: Schedule,
    costs: Costs,
    microbatches: int,
    caps: Sequence[float] | None,
    first_trainable: int,
) -> None:
    if (start.microbatches, start.first_trainable) != (microbatches, first_trainable):
        raise ScheduleError(
            f"start {start.name!r} has {start.microbatches} microbatches and first trainable "
            f"stage {start.first_trainable}; "
            f"asked for are {microbatches} and {first_trainable}"
        )
    if start.stages != len(costs.stages):
        raise ScheduleError(
            f"start {start.name!r} has {start.stages} stages, but costs are given for "
            f"{len(costs.stages)}"
        )
    validate(start)
    if set(start.stage_ranks[: start.ranks]) != set(range(start.ranks)):
        raise ScheduleError(
            f"start {start.name!r} has placement {start.stage_ranks}; the first {start.ranks} "
            "stages must lie one on each rank"
        )
    if caps is None:
        return
    if len(caps) != start.ranks:
        raise ScheduleError(
            f"{len(caps)} memory limits for {start.ranks} ranks; give one per rank (inf: none)"
        )
    for rank, (peak, cap) in enumerate(zip(peak_memory(start, costs), caps, strict=True)):
        if _over(peak, cap):
            raise ScheduleError(
                f"start {start.name!r} holds {peak:g} on rank {rank}, over its cap of {cap:g}; "
                "give a start that fits, or none"
            )


def _split(schedule: Schedule) -> Schedule:
    """Split every BW into B, then W. No op ends later for it, and both can be moved apart."""

    def parts(op: Op) -> Iterable[Op]:
        return (op._replace(kind=Kind.B), op._replace(kind=Kind.W)) if op.kind is Kind.BW else (op,)

    return replace(
        schedule, ops=tuple(tuple(part for op in row for part in parts(op)) for row in schedule.ops)
    )


# -- whole numbers ---------------------------------------------------------------------------------


def _scale(values: Iterable[float], whole: float, most: int) -> Fraction:
    """Choose how many ticks a unit has: whole numbers for all values, if `most` allows it."""
    given = [Fraction(str(value)) for value in values if value]
    parts = lcm(*(x.denominator for x in given))
    scale = Fraction(parts, gcd(*(int(x * parts) for x in given)) or 1)
    return scale if Fraction(whole) * scale <= most else Fraction(most) / Fraction(whole)


def _times(costs: Costs) -> Iterator[float]:
    for stage in costs.stages:
        yield from (stage.f, stage.b, stage.w)
    yield from costs.links


def _in_ticks(costs: Costs, scale: Fraction) -> Costs:
    """Return the costs with times in whole ticks, rounded down."""

    def ticks(value: float) -> int:
        return floor(Fraction(str(value)) * scale)

    stages = (replace(c, f=ticks(c.f), b=ticks(c.b), w=ticks(c.w)) for c in costs.stages)
    return Costs(tuple(stages), tuple(map(ticks, costs.links)))


# -- the model -------------------------------------------------------------------------------------


def _settled(x: Op, y: Op) -> bool:
    """Return whether x comes before y on their rank in every schedule, by all dependencies."""
    if x == y or x.microbatch > y.microbatch:
        return False
    match x.kind, y.kind:
        case Kind.F, Kind.F:
            return x.stage <= y.stage
        case Kind.F, _:
            return True
        case (Kind.B, Kind.B) | (Kind.B, Kind.W):
            return x.stage >= y.stage
        case Kind.W, Kind.W:
            return x.stage == y.stage
        case _:
            return False


class _Model:
    """The CP-SAT model in whole ticks, with B and W apart. `start` is the hint and the longest."""

    def __init__(
        self,
        start: Schedule,
        costs: Costs,
        caps: Sequence[float] | None,
        objective: Objective,
        bound: float,
    ) -> None:
        self.start, self.costs, self.objective = start, costs, objective
        self.caps = caps
        self.scale = _scale(_times(costs), _length(start, costs, objective), TICKS)
        self.ticks = _in_ticks(costs, self.scale)
        self.least = bound
        # About (3m)^2 / 6 pairs of one stage's 3m ops are open.
        self.open_pairs = sum(len(row) ** 2 for row in start.ops) // 6

    def solve(self, seconds: float, workers: int) -> tuple[Schedule | None, float]:
        """Return the best schedule found, if any, and the proven bound in the costs' unit."""
        cp = _solver()
        began = time.perf_counter()
        self.model = cp.CpModel()
        self._build()
        solver = cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.0, seconds - (time.perf_counter() - began))
        solver.parameters.num_workers = workers
        # The last ticks of a rounded time are not worth the search.
        solver.parameters.relative_gap_limit = 1e-6
        status = solver.solve(self.model)
        assert status in (cp.OPTIMAL, cp.FEASIBLE, cp.UNKNOWN), solver.status_name(status)
        proven = solver.best_objective_bound
        bound = float(ceil(proven - 1e-6) / self.scale) if isfinite(proven) else 0.0
        if status == cp.UNKNOWN:
            return None, bound
        rows: list[tuple[Op, ...]] = []
        for row in self.start.ops:
            ahead = dict.fromkeys(row, 0)
            for x, y in combinations(row, 2):
                first = self._is_before(x, y)
                if not isinstance(first, bool):
                    first = solver.boolean_value(first)
                ahead[y if first else x] += 1
            rows.append(tuple(sorted(row, key=ahead.__getitem__)))
        return replace(self.start, ops=tuple(rows)), bound

    def _is_before(self, x: Op, y: Op) -> Literal | bool:
        if _settled(x, y):
            return True
        if _settled(y, x):
            return False
        return self.before[x, y]

    def _build(self) -> None:
        model, start, ticks = self.model, self.start, self.ticks
        timeline = simulate(start, ticks)
        hint = {span.op: int(span.start) for row in timeline.ranks for span in row}
        longest = int(timeline.length(self.objective))
        # A rank's first op is the F of microbatch 0 on its first stage. It has the same time in
        # every schedule, because it follows only such first F's.
        opening = [int(row[0].start) for row in timeline.ranks]
        length = model.new_int_var(
            min(longest, floor(Fraction(self.least) * self.scale * (1 - Fraction(1, 10**9)))),
            longest,
            "length",
        )
        model.add_hint(length, longest)
        self.at: dict[Op, cp_model.IntVar] = {}
        self.before: dict[tuple[Op, Op], Literal] = {}
        self.took = {op: int(duration(ticks, op)) for row in start.ops for op in row}
        for rank, row in enumerate(start.ops):
            since = opening[rank] if self.objective is Objective.SPAN else 0
            for index, op in enumerate(row):
                self.at[op] = model.new_int_var(
                    opening[rank],
                    opening[rank] if index == 0 else since + longest - self.took[op],
                    "",
                )
                model.add_hint(self.at[op], hint[op])
                model.add(length >= self.at[op] + self.took[op] - since)
            self._one_at_a_time(row)
            if self.caps is not None and isfinite(self.caps[rank]):
                self._memory(row, self.caps[rank])
        for row in start.ops:
            for op in row:
                for needed, boundary in dependencies(start, op):
                    crosses = (
                        boundary is not None
                        and start.stage_ranks[boundary] != start.stage_ranks[boundary + 1]
                    )
                    link = int(ticks.links[boundary]) if boundary is not None and crosses else 0
                    model.add(self.at[op] >= self.at[needed] + self.took[needed] + link)
        model.minimize(length)

    def _one_at_a_time(self, row: Sequence[Op]) -> None:
        """Model the order of a rank's ops, without circles, and its effect on the times."""
        model = self.model
        model.add_no_overlap(
            model.new_fixed_size_interval_var(self.at[op], self.took[op], "") for op in row
        )
        place = {op: index for index, op in enumerate(row)}
        open_to: dict[Op, dict[Op, None]] = {op: {} for op in row}  # as a set that keeps its order
        for x, y in combinations(row, 2):  # in the order of the hint
            if _settled(x, y):
                continue
            first = model.new_bool_var("")
            model.add_hint(first, True)
            self.before[x, y], self.before[y, x] = first, ~first
            open_to[x][y] = open_to[y][x] = None
            model.add(self.at[y] >= self.at[x] + self.took[x]).only_enforce_if(first)
            model.add(self.at[x] >= self.at[y] + self.took[y]).only_enforce_if(~first)
        # Settled pairs: x is before y, and therefore before every op that y is before.
        for y in row:
            for x in self._just_before(y):
                model.add(self.at[y] >= self.at[x] + self.took[x])
                for z in open_to[x]:
                    if z in open_to[y]:
                        model.add_implication(self.before[y, z], self.before[x, z])
        # Triples of ops that are open to each other: x before y before z means x before z.
        later = {op: [other for other in open_to[op] if place[other] > place[op]] for op in row}
        for x in row:
            for y, z in ((one, other) for one in later[x] for other in later[one]):
                if z in open_to[x]:
                    model.add_bool_or(~self.before[x, y], ~self.before[y, z], self.before[x, z])
                    model.add_bool_or(self.before[x, y], self.before[y, z], ~self.before[x, z])

    def _just_before(self, op: Op) -> Iterator[Op]:
        """List the ops on the same rank that are settled to come just before `op`."""
        own = self.start.stages_of(self.start.stage_ranks[op.stage])
        trained = [s for s in own if s >= self.start.first_trainable]
        if op.microbatch:
            yield op._replace(microbatch=op.microbatch - 1)
        match op.kind:
            case Kind.F:
                yield from (Op(Kind.F, s, op.microbatch) for s, t in pairwise(own) if t == op.stage)
            case Kind.B:
                yield from (
                    Op(Kind.B, t, op.microbatch) for s, t in pairwise(trained) if s == op.stage
                )
                yield Op(Kind.F, own[-1], op.microbatch)
            case _:
                yield Op(Kind.B, op.stage, op.microbatch)

    def _memory(self, row: Sequence[Op], cap: float) -> None:
        """Keep the sum of `peak_memory` under the cap."""
        stages = {op.stage for op in row}
        stage = self.costs.stages[row[0].stage]
        if len(stages) == 1 and stage.mem_b <= 0 and stage.mem_w <= 0:
            if row[0].stage >= self.start.first_trainable:
                self._few_enough(row[0].stage, stage, cap)
            return
        # In whole parts of a unit. Changes are rounded down if there is no common part: the
        # schedule found is checked again.
        changes = {op: memory_change(self.costs, op, self.start.first_trainable) for op in row}
        scale = _scale(changes.values(), cap or 1.0, 10**12)
        parts = {op: floor(Fraction(str(change)) * scale) for op, change in changes.items()}
        room = floor(Fraction(cap) * (1 + Fraction(1, 10**9)) * scale)
        for x in row:
            if changes[x] > 0:
                self.model.add(
                    sum(parts[y] * self._is_before(y, x) for y in row if y != x) <= room - parts[x]
                )

    def _few_enough(self, stage: int, cost: StageCost, cap: float) -> None:
        """Keep the memory of a rank with one stage under the cap.

        When F(i) starts with `y` B's done, so many W's must be done that i + 1 microbatches fit.
        """
        m = self.start.microbatches
        for i in range(m):
            for y in range(i + 1):
                needed = 0
                while needed <= y and _over(
                    (i + 1) * cost.mem_f + y * cost.mem_b + needed * cost.mem_w, cap
                ):
                    needed += 1
                if not needed:
                    break
                forward = Op(Kind.F, stage, i)
                enough: list[Literal | bool] = []
                if y < i:
                    enough.append(self._is_before(Op(Kind.B, stage, y), forward))
                if needed <= y:
                    enough.append(self._is_before(Op(Kind.W, stage, needed - 1), forward))
                self.model.add_bool_or(enough)


def _solver():  # the module's type is OR-tools' own
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ScheduleError(f"exact schedules: {not_installed('ortools')}") from None
    return cp_model
