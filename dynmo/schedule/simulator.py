"""Replays a schedule under given costs: (Schedule, Costs) -> Timeline.

Each rank runs its ops in order; an op starts when the rank is free and every dependency has ended
and crossed its link. Links are pure delay: a message never keeps a rank busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dynmo.cost.layer_cost import Costs
from dynmo.errors import ScheduleError
from dynmo.schedule.bounds import Objective
from dynmo.schedule.op import Kind, Op, Schedule, dependencies, in_order


class Span(NamedTuple):
    """One op on the clock."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank ran what, in the costs' unit of time; `peak_memory` per rank, in the costs'
    unit of memory."""

    ranks: tuple[tuple[Span, ...], ...]
    peak_memory: tuple[float, ...]

    @cached_property
    def busy(self) -> tuple[float, ...]:
        return tuple(sum(span.end - span.start for span in row) for row in self.ranks)

    @cached_property
    def makespan(self) -> float:
        """From the first op of any rank to the last op of any rank."""
        return max(row[-1].end for row in self.ranks) - min(row[0].start for row in self.ranks)

    @cached_property
    def span(self) -> float:
        """The longest of a rank's own first op to its own last op (what counts without an optimizer
        barrier)."""
        return max(row[-1].end - row[0].start for row in self.ranks)

    def length(self, objective: Objective) -> float:
        """Of a step in a run: its span, or with an optimizer's barrier its makespan."""
        return self.span if objective is Objective.SPAN else self.makespan

    @property
    def bubble_ratio(self) -> float:
        """Zero Bubble's measure: 1 - busiest rank / span."""
        return 1 - max(self.busy) / self.span if self.span else 0.0

    @property
    def makespan_bubble_ratio(self) -> float:
        return 1 - max(self.busy) / self.makespan if self.makespan else 0.0

    @property
    def idle_ratio(self) -> float:
        """DynMo's measure (figure 1): 1 - mean over ranks of busy time / span."""
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
    """Change of live memory: F's counts from its start, B's and W's from their end. A frozen prefix
    keeps nothing."""
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
    """Raises ScheduleError when the costs are for another number of stages, or the schedule can
    never finish.

    wrap_group: interleaving as Zero Bubble's table 5 counts it. Of what wraps around between the
    last rank and the first, only the microbatches j with j % wrap_group == 0 are waited for; a few
    ops then start before what they need is there, by p - 1 link times at most. None, which is what
    a run does: every message is waited for.
    """
    if len(costs.stages) != schedule.stages:
        raise ScheduleError(
            f"{schedule.name} has {schedule.stages} stages, but costs are given for {len(costs.stages)}"
        )
    placement, links, wrap = schedule.placement, costs.links, (schedule.ranks - 1, 0)
    ended: dict[Op, float] = {}
    clock = [0.0] * schedule.ranks
    rows: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    for rank, op in in_order(schedule):
        start = clock[rank]
        for before, boundary in dependencies(schedule, op):
            arrival = ended[before]
            if boundary is not None and placement[boundary] != placement[boundary + 1]:
                if (
                    wrap_group
                    and op.microbatch % wrap_group
                    and (placement[boundary], placement[boundary + 1]) == wrap
                ):
                    continue
                arrival += links[boundary]
            start = max(start, arrival)
        end = start + duration(costs, op)
        clock[rank] = ended[op] = end
        rows[rank].append(Span(op, start, end))
    return Timeline(tuple(map(tuple, rows)), peak_memory(schedule, costs))


def peak_memory(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Per rank, the most that is live at once. It depends on the order of the ops alone, not on
    their times."""
    peaks: list[float] = []
    for row in schedule.ops:
        live = peak = 0.0
        for op in row:
            live += memory_change(costs, op, schedule.first_trainable)
            peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)


def resident(schedule: Schedule) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per stage, the pairs (microbatches between F and B, microbatches between B and W) that are
    live at once and not dominated.

    A stage's live bytes are `pair[0] * activation_bytes + pair[1] * stash_bytes`, at most, over its
    pairs: this is how a memory limit can be checked for any placement without another simulation.
    """
    out: list[tuple[tuple[int, int], ...]] = []
    for stage in range(schedule.stages):
        forward = stashed = 0
        pairs: set[tuple[int, int]] = set()
        for op in schedule.ops[schedule.placement[stage]]:
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
