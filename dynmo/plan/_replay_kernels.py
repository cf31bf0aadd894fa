"""Compiled inner loops of `placement`: one schedule under many placements.

The replay is `simulator.simulate` without its records. The simulator has the last word.
"""

from __future__ import annotations

import numpy as np

from dynmo.jit import jit
from dynmo.schedule.graph import Floats, Graph, Ints, Order, run_clocks


@jit()
def replay(
    order: Order,
    graph: Graph,
    stage_ranks: Ints,
    works: Floats,
    sends: Floats,
    bounds: Ints,
    best: float,
    whole: bool,
) -> float:
    """The makespan (`whole`) or the span of a schedule for one placement.

    Args:
        order: The schedule's order.
        graph: The schedule's graph.
        stage_ranks: Rank of each stage.
        works: works[k, s, i] is the time of kind k (F, B, W) of the layers before i on the rank of
            stage s. There is one s only if all ranks are alike.
        sends: sends[s, i] is the time of the output of a stage s that stops at i.
        best: The result is infinity if some rank's work alone takes this long or longer.
    """
    stages, ranks = len(bounds) - 1, stage_ranks.max() + 1
    cost, busy = np.empty(4 * stages), np.empty(ranks)
    rows, boundary = order.rows, graph.boundary
    _work(order.counts, stage_ranks, works, bounds, cost, busy)
    if busy.max() >= best:
        return np.inf
    delay = np.zeros((1, len(boundary), 2))
    for lane in range(len(boundary)):
        for k in range(2):
            link = boundary[lane, k]
            if link >= 0:
                delay[0, lane, k] = sends[link, bounds[link + 1]]
    started, ended = np.empty(len(rows)), np.empty(len(rows))
    run_clocks(rows, delay, cost, started, ended)
    first, last = np.full(ranks, np.inf), np.zeros(ranks)
    for i in range(len(rows)):
        rank = rows[i, 0]
        first[rank] = min(first[rank], started[i])
        last[rank] = ended[i]
    if whole:
        return last.max() - first.min()
    return (last - first).max()


@jit()
def promising(
    counts: Ints,
    stage_ranks: Ints,
    works: Floats,
    bounds: Ints,
    order: Ints,
    best: float,
) -> Ints:
    """The neighbours of a placement whose busiest rank's work alone takes less than `best`.

    A neighbour has one layer moved from a stage to another, along the path between them.

    Args:
        counts: Of the order.
        stage_ranks: See `replay`.
        works: See `replay`.
        bounds: The placement.
        order: The stages, the most loaded one first.
        best: See `replay`.

    Returns:
        The bounds of each, [neighbours, stages + 1]. Moves from the most loaded to the least loaded
        stage come first.
    """
    stages = len(bounds) - 1
    cost, busy = np.empty(4 * stages), np.empty(stage_ranks.max() + 1)
    found, count = np.empty((stages * stages, stages + 1), np.int64), 0
    for i in range(stages):
        source = order[i]
        if bounds[source + 1] - bounds[source] == 1:
            continue
        for j in range(stages - 1, -1, -1):
            target = order[j]
            if target == source:
                continue
            moved = found[count]
            step = -1 if source < target else 1
            # By hand: numba takes seconds to compile a statement about a whole array.
            for s in range(stages + 1):
                moved[s] = bounds[s]
            for s in range(min(source, target) + 1, max(source, target) + 1):
                moved[s] += step
            _work(counts, stage_ranks, works, moved, cost, busy)
            if busy.max() < best:
                count += 1
    return found[:count]


@jit()
def _work(
    counts: Ints, stage_ranks: Ints, works: Floats, bounds: Ints, cost: Floats, busy: Floats
) -> None:
    """Writes the time of an op of each lane to `cost`, and each rank's work to `busy`."""
    busy[:] = 0
    n = len(bounds) - 1
    for s in range(n):
        for k in range(3):
            own = works[k, s % works.shape[1]]
            cost[k * n + s] = own[bounds[s + 1]] - own[bounds[s]]
        cost[3 * n + s] = cost[n + s] + cost[2 * n + s]
        for k in range(4):
            busy[stage_ranks[s]] += counts[k * n + s] * cost[k * n + s]
