"""Replays a schedule under given costs: (Schedule, Costs) -> Timeline.

Each rank runs its ops in order. An op starts when its rank is free and every dependency has ended
and crossed its link. Links are pure delay: a message never keeps a rank busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dynmo.cost.layer_cost import Costs
from dynmo.errors import ScheduleError
from dynmo.schedule.bounds import Objective
from dynmo.schedule.op import Kind, Op, Schedule, check_order

if TYPE_CHECKING:
    from dynmo.schedule.graph import Floats


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


def lane_times(costs: Costs) -> Floats:
    """The time of an op of each lane."""
    return np.array([(s.f, s.b, s.w, s.b + s.w) for s in costs.stages], np.float64).T.ravel()


def lane_changes(costs: Costs, first_trainable: int) -> Floats:
    """By how much an op of each lane changes the live memory.

    F's change counts from its start, B's and W's from their end.
    """
    stages = costs.stages
    changes = np.array([(s.mem_f, s.mem_b, s.mem_w, s.mem_b + s.mem_w) for s in stages], np.float64)
    changes[:first_trainable] = 0.0
    return changes.T.ravel()


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
    from dynmo.schedule.graph import delays, run_clocks  # numba takes a while to import

    if len(costs.stages) != schedule.stages:
        raise ScheduleError(
            f"{schedule.name} has {schedule.stages} stages, but costs are given for "
            f"{len(costs.stages)}"
        )
    check_order(schedule)
    graph, order = schedule.graph, schedule.order
    delay = np.repeat(delays(graph, costs.links)[None], wrap_group or 1, axis=0)
    ranks = np.array(schedule.stage_ranks, np.int64)
    wraps = (ranks == schedule.ranks - 1) & (np.roll(ranks, -1) == 0)
    delay[1:, (graph.boundary >= 0) & wraps[graph.boundary]] = -np.inf
    took = lane_times(costs)
    started, ended = np.empty((2, len(order.rows)))
    run_clocks(order.rows, delay, took, started, ended)
    start, end = np.empty_like(started), np.empty_like(ended)
    start[order.at], end[order.at] = started, ended
    return Timeline(
        schedule,
        tuple(row.tolist() for row in _by_rank(schedule, start)),
        tuple(row.tolist() for row in _by_rank(schedule, end)),
        peak_memory(schedule, costs),
    )


def _by_rank(schedule: Schedule, of_ops: Floats) -> list[Floats]:
    return np.split(of_ops, list(accumulate(map(len, schedule.ops)))[:-1])


def peak_memory(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Compute the most memory that is live at once on each rank, in the costs' unit.

    The result depends on the order of the ops alone, not on their times.
    """
    changes = lane_changes(costs, schedule.first_trainable)[schedule.order.lanes]
    live = map(np.cumsum, _by_rank(schedule, changes))
    return tuple(float(each.max(initial=0.0)) for each in live)


def resident(schedule: Schedule) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Count the microbatches that each stage keeps alive at once.

    A stage has pairs: microbatches between F and B, and between B and W, that are live at once and
    not dominated. Its live bytes are at most `pair[0] * activation_bytes + pair[1] * stash_bytes`
    over its pairs. So a memory limit can be checked for any placement without another simulation.
    """
    out: list[tuple[tuple[int, int], ...]] = []
    for stage, rank in enumerate(schedule.stage_ranks):
        forward, stashed, pairs = 0, 0, {(0, 0)}
        for op in schedule.ops[rank]:
            if op.stage == stage >= schedule.first_trainable:
                forward += (op.kind is Kind.F) - (op.kind in (Kind.B, Kind.BW))
                stashed += (op.kind is Kind.B) - (op.kind is Kind.W)
                pairs.add((forward, stashed))
        best = list[tuple[int, int]]()
        for pair in sorted(pairs, reverse=True):
            if not best or pair[1] > best[-1][1]:
                best.append(pair)
        out.append(tuple(best))
    return tuple(out)
