"""`simulator.simulate`, compiled: one schedule under many placements.

The replay computes the clock only, in floats. The simulator has the last word.

A schedule becomes rows of numbers, one per op. Every op stands behind the ops that it waits for:

    rank  stage  kind  | before  boundary | before  boundary

    before    the row of an op that must have ended, or -1
    boundary  the link that its result crosses, or -1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dynmo.balance._kernels import Ints
from dynmo.jit import jit
from dynmo.schedule.op import Kind, Op, Schedule, in_order

Floats = NDArray[np.float64]
_KINDS = {Kind.F: 0, Kind.B: 1, Kind.W: 2, Kind.BW: 3}


@dataclass(frozen=True)
class Shape:
    """A schedule as rows of numbers. `counts` has the ops of each stage and kind (F, B, W, BW)."""

    schedule: Schedule
    rows: Ints
    counts: Ints
    stage_ranks: Ints


def shape_of(schedule: Schedule) -> Shape:
    stage_ranks = schedule.stage_ranks
    row_of: dict[Op, int] = {}
    rows: list[int] = []
    counts = np.zeros((schedule.stages, 4), np.int64)
    for rank, op, needs in in_order(schedule):
        rows += (rank, op.stage, _KINDS[op.kind])
        counts[op.stage, _KINDS[op.kind]] += 1
        waits = 0
        for before, boundary in needs:
            crosses = boundary is not None and stage_ranks[boundary] != stage_ranks[boundary + 1]
            rows += (row_of[before], cast(int, boundary) if crosses else -1)
            waits += 1
        assert waits <= 2, "an op waits for two others at most"
        rows += (-1, -1) * (2 - waits)
        row_of[op] = len(row_of)
    return Shape(
        schedule, np.array(rows, np.int64).reshape(-1, 7), counts, np.array(stage_ranks, np.int64)
    )


@jit()
def replay(
    rows: Ints,
    counts: Ints,
    stage_ranks: Ints,
    works: Floats,
    sends: Floats,
    bounds: Ints,
    best: float,
    whole: bool,
) -> float:
    """The makespan (`whole`) or the span of a schedule (`Shape`) for one placement.

    Args:
        works: works[k, s, i] is the time of kind k (F, B, W) of the layers before i on the rank of
            stage s. There is one s only if all ranks are alike.
        sends: sends[s, i] is the time of the output of a stage s that stops at i.
        best: The result is infinity if some rank's work alone takes this long or longer.
    """
    stages, ranks = len(bounds) - 1, stage_ranks.max() + 1
    cost = np.empty((stages, 4))
    busy = np.zeros(ranks)
    for s in range(stages):
        for k in range(3):
            own = works[k, s % works.shape[1]]
            cost[s, k] = own[bounds[s + 1]] - own[bounds[s]]
        cost[s, 3] = cost[s, 1] + cost[s, 2]
        for k in range(4):
            busy[stage_ranks[s]] += counts[s, k] * cost[s, k]
    if busy.max() >= best:
        return np.inf
    ended = np.empty(rows.shape[0])
    clock = np.zeros(ranks)
    first = np.full(ranks, -1.0)
    for i in range(rows.shape[0]):
        rank = rows[i, 0]
        start = clock[rank]
        for at in (3, 5):
            before = rows[i, at]
            if before >= 0:
                arrival = ended[before]
                boundary = rows[i, at + 1]
                if boundary >= 0:
                    arrival += sends[boundary, bounds[boundary + 1]]
                start = max(start, arrival)
        if first[rank] < 0:
            first[rank] = start
        clock[rank] = ended[i] = start + cost[rows[i, 1], rows[i, 2]]
    if whole:
        return clock.max() - first.min()
    return (clock - first).max()
