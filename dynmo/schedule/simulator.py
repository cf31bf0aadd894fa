"""Replays a schedule under given costs: (Schedule, Costs) -> Timeline.

Each rank runs its ops in order. An op starts when its rank is free and every dependency has ended
and crossed its link. Links are pure delay: a message never keeps a rank busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dynmo.cost.layer_cost import Costs
from dynmo.errors import ScheduleError
from dynmo.schedule.bounds import Objective
from dynmo.schedule.op import Kind, Op, Schedule, in_order


class Span(NamedTuple):
    """One op on the clock."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank ran which op, and the most live memory of each rank, in the costs' units."""

    ranks: tuple[tuple[Span, ...], ...]
    peak_memory: tuple[float, ...]

    @cached_property
    def busy(self) -> tuple[float, ...]:
        return tuple(sum(span.end - span.start for span in row) for row in self.ranks)

    @cached_property
    def makespan(self) -> float:
        """Time from the first op of any rank to the last op of any rank."""
        return max(row[-1].end for row in self.ranks) - min(row[0].start for row in self.ranks)

    @cached_property
    def span(self) -> float:
        """Longest time of a rank from its own first op to its own last op.

        This time counts if no optimizer barrier separates the steps.
        """
        return max(row[-1].end - row[0].start for row in self.ranks)

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
    stage_ranks, links, wrap = schedule.stage_ranks, costs.links, (schedule.ranks - 1, 0)
    ended: dict[Op, float] = {}
    clock = [0.0] * schedule.ranks
    rows: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    took = {
        (kind, stage): duration(costs, Op(kind, stage, 0))
        for kind in Kind
        for stage in range(schedule.stages)
    }
    for rank, op, needs in in_order(schedule):
        start = clock[rank]
        for before, boundary in needs:
            arrival = ended[before]
            if boundary is not None and stage_ranks[boundary] != stage_ranks[boundary + 1]:
                if (
                    wrap_group
                    and op.microbatch % wrap_group
                    and (stage_ranks[boundary], stage_ranks[boundary + 1]) == wrap
                ):
                    continue
                arrival += links[boundary]
            start = max(start, arrival)
        end = start + took[op.kind, op.stage]
        clock[rank] = ended[op] = end
        rows[rank].append(Span(op, start, end))
    return Timeline(tuple(map(tuple, rows)), peak_memory(schedule, costs))


def peak_memory(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Compute the most memory that is live at once on each rank, in the costs' unit.

    The result depends on the order of the ops alone, not on their times.
    """
    peaks: list[float] = []
    changes = {
        (kind, stage): memory_change(costs, Op(kind, stage, 0), schedule.first_trainable)
        for kind in Kind
        for stage in range(schedule.stages)
    }
    for row in schedule.ops:
        live = peak = 0.0
        for kind, stage, _ in row:
            live += changes[kind, stage]
            peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)


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
