"""Replays a schedule under given costs: (Schedule, Costs) -> Timeline.

Each rank runs its ops in order. An op starts when its rank is free and every dependency has ended
and crossed its link. Links are pure delay: a message never keeps a rank busy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dynmo.cost.layer_cost import Costs
from dynmo.errors import ScheduleError
from dynmo.schedule.bounds import Objective
from dynmo.schedule.op import Kind, Op, Schedule, check_order
from dynmo.schedule.op_table import Floats, Ints, OpTable, most_live, run_clocks


class Span(NamedTuple):
    """One op on the clock."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each rank ran which op, and the most live memory of each rank, in the costs' units.

    Attributes:
        schedule: The schedule that ran.
        starts: Start of each op of each rank, in the rank's order.
        ends: End of each op of each rank.
        peak_memory: The most live memory of each rank.
    """

    schedule: Schedule
    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]
    peak_memory: tuple[float, ...]

    @cached_property
    def ranks(self) -> tuple[tuple[Span, ...], ...]:
        """The ops of each rank on the clock."""
        rows = zip(self.schedule.ops, self.starts, self.ends, strict=True)
        return tuple(tuple(map(Span, *row)) for row in rows)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        rows = zip(self.starts, self.ends, strict=True)
        return tuple(sum(end - start for start, end in zip(*row, strict=True)) for row in rows)

    @cached_property
    def makespan(self) -> float:
        """Time from the first op of any rank to the last op of any rank."""
        return max(row[-1] for row in self.ends) - min(row[0] for row in self.starts)

    @cached_property
    def span(self) -> float:
        """Longest time of a rank from its own first op to its own last op.

        This time counts if no optimizer barrier separates the steps.
        """
        return max(end[-1] - start[0] for start, end in zip(self.starts, self.ends, strict=True))

    def length(self, objective: Objective) -> float:
        return self.span if objective is Objective.SPAN else self.makespan

    @property
    def bubble_ratio(self) -> float:
        """Bubble ratio of Zero Bubble: 1 - busiest rank / span."""
        return 1 - max(self.busy) / self.span if self.span else 0.0

    @property
    def makespan_bubble_ratio(self) -> float:
        return 1 - max(self.busy) / self.makespan if self.makespan else 0.0

    @property
    def idle_ratio(self) -> float:
        """Idle ratio of DynMo (figure 1): 1 - mean over ranks of busy time / span."""
        return 1 - sum(self.busy) / len(self.busy) / self.span if self.span else 0.0


def duration(costs: Costs, op: Op) -> float:
    stage = costs.stages[op.stage]
    match op.kind:
        case Kind.F:
            return stage.f
        case Kind.B:
            return stage.b
        case Kind.W:
            return stage.w
        case Kind.BW:
            return stage.b + stage.w


def memory_change(costs: Costs, op: Op, first_trainable: int = 0) -> float:
    """Compute by how much an op changes the live memory.

    F's change counts from its start, B's and W's from their end.
    """
    if op.stage < first_trainable:
        return 0.0
    stage = costs.stages[op.stage]
    match op.kind:
        case Kind.F:
            return stage.mem_f
        case Kind.B:
            return stage.mem_b
        case Kind.W:
            return stage.mem_w
        case Kind.BW:
            return stage.mem_b + stage.mem_w


def simulate(schedule: Schedule, costs: Costs, wrap_group: int | None = None) -> Timeline:
    """Replay a schedule under the given costs.

    Args:
        schedule: The order of the ops on each rank.
        costs: Costs of each stage.
        wrap_group: None waits for every message, as a run does. A number counts interleaving as
            Zero Bubble's table 5 does. An op then waits for messages between the last rank and
            the first only for microbatches j with j % wrap_group == 0. A few ops start before
            their input is there, by at most p - 1 link times.

    Raises:
        ScheduleError: The costs are for another number of stages, or the schedule can never
            finish.
    """
    if len(costs.stages) != schedule.stages:
        raise ScheduleError(
            f"{schedule.name} has {schedule.stages} stages, but costs are given for "
            f"{len(costs.stages)}"
        )
    check_order(schedule)
    table = schedule.table
    rows = table.rows if not wrap_group else _without_waits(table, wrap_group)
    started, ended = np.empty(len(rows)), np.empty(len(rows))
    took = _by_stage_and_kind(duration, costs)
    links = np.array(costs.links, np.float64)
    run_clocks(rows, schedule.ranks, took, links, started, ended)
    start, end = np.empty_like(started), np.empty_like(ended)
    start[table.at], end[table.at] = started, ended
    spans = [slice(*span) for span in pairwise(table.first.tolist())]
    return Timeline(
        schedule,
        tuple(start[span].tolist() for span in spans),
        tuple(end[span].tolist() for span in spans),
        peak_memory(schedule, costs),
    )


def _without_waits(table: OpTable, wrap_group: int) -> Ints:
    """The rows of a table without waits for messages that `wrap_group` leaves out."""
    rows, ranks = table.rows.copy(), table.stage_ranks
    ignored = table.ops[table.at, 2] % wrap_group != 0
    for column in (3, 5):
        boundary = rows[:, column + 1]
        wraps = (ranks[boundary] == ranks.max()) & (ranks[(boundary + 1) % len(ranks)] == 0)
        rows[ignored & (boundary >= 0) & wraps, column] = -1
    return rows


def _by_stage_and_kind(value: Callable[[Costs, Op], float], costs: Costs) -> Floats:
    stages = range(len(costs.stages))
    return np.array([[value(costs, Op(kind, s, 0)) for kind in Kind] for s in stages], np.float64)


def peak_memory(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Compute the most memory that is live at once on each rank, in the costs' unit.

    The result depends on the order of the ops alone, not on their times.
    """

    def change(costs: Costs, op: Op) -> float:
        return memory_change(costs, op, schedule.first_trainable)

    table = schedule.table
    return tuple(most_live(table.ops, table.first, _by_stage_and_kind(change, costs)).tolist())


def resident(schedule: Schedule) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Count the microbatches that each stage keeps alive at once.

    A stage has pairs: microbatches between F and B, and between B and W, that are live at once and
    not dominated. Its live bytes are at most `pair[0] * activation_bytes + pair[1] * stash_bytes`
    over its pairs. So a memory limit can be checked for any placement without another simulation.
    """
    out: list[tuple[tuple[int, int], ...]] = []
    for stage in range(schedule.stages):
        forward = stashed = 0
        pairs: set[tuple[int, int]] = set()
        for op in schedule.ops[schedule.stage_ranks[stage]]:
            if op.stage != stage or stage < schedule.first_trainable:
                continue
            forward += (op.kind is Kind.F) - (op.kind in (Kind.B, Kind.BW))
            stashed += (op.kind is Kind.B) - (op.kind is Kind.W)
            pairs.add((forward, stashed))
        out.append(_undominated(pairs))
    return tuple(out)


def _undominated(pairs: set[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    best: list[tuple[int, int]] = []
    for pair in sorted(pairs, reverse=True):
        if all(pair[1] > kept[1] for kept in best):
            best.append(pair)
    return tuple(best) or ((0, 0),)
