"""What waits for what, and orders of ops, as numbers for compiled loops.

A lane is the ops of one kind on one stage: lane = kind * stages + stage, for F, B, W and BW.
All microbatches wait alike, so the graph has one row per lane. Op j of a lane waits for up to two
ops:

    before    the lane that it waits for, or -1
    lag       how many microbatches earlier: op j waits for op j - lag
    boundary  the link that the result crosses, or -1 within a rank

An op that waits for a B waits for the BW where there is one.

The graph knows neither seconds nor an order. Seconds stand beside it (`delays`), and so do orders
(`Order`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynmo.errors import ScheduleError
from dynmo.jit import jit

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
F, B, W, BW = range(4)
_NUMBERS = {"F": F, "B": B, "W": W, "BW": BW}


class Graph(NamedTuple):
    """The rows of the lanes, each [4 * stages, 2]."""

    before: Ints
    lag: Ints
    boundary: Ints


def make_graph(stage_ranks: Sequence[int], first_trainable: int, credits: int) -> Graph:
    """Writes down the rule. Nothing else in dynmo knows it.

    F(s,j) needs F(s-1,j). B(s,j) needs F(s,j) and B(s+1,j). W(s,j) needs B(s,j). On a frozen
    prefix F(s,j) also needs F(s+1, j-credits): this credit holds forward-only ranks back.
    """
    ranks, n = np.array(stage_ranks, np.int64), len(stage_ranks)
    lanes = np.arange(4 * n).reshape(4, n)
    before, lag, boundary = np.full((3, 4, n, 2), -1, np.int64)
    crossed = np.where(ranks[:-1] == ranks[1:], -1, np.arange(n - 1))
    held_back = slice(min(first_trainable, n - 1))
    before[F, 1:, 0], boundary[F, 1:, 0] = lanes[F, :-1], crossed
    before[F, held_back, 1] = lanes[F, 1:][held_back]
    boundary[F, held_back, 1] = crossed[held_back]
    before[B, :, 0] = lanes[F]
    before[B, :-1, 1], boundary[B, :-1, 1] = lanes[B, 1:], crossed
    before[W, :, 0] = lanes[B]
    before[BW], boundary[BW] = before[B], boundary[B]
    before[B:, :first_trainable] = -1
    lag[:] = 0
    lag[F, :, 1] = credits
    return Graph(*(each.reshape(4 * n, 2) for each in (before, lag, boundary)))


def mirrored(graph: Graph) -> Graph:
    """The graph of time that runs backwards: up to three lanes wait for each, [4 * stages, 3]."""
    lanes, n = len(graph.before), len(graph.before) // 4
    before, lag, boundary = np.full((3, lanes, 3), -1, np.int64)
    lag[:] = 0
    lane, k = np.nonzero(graph.before[: 3 * n] >= 0)
    source = graph.before[lane, k]
    # A lane that waits for one of the same stage has the last place.
    place = source, np.where(source % n == lane % n, 2, k)
    before[place], lag[place], boundary[place] = lane, graph.lag[lane, k], graph.boundary[lane, k]
    return Graph(before, lag, boundary)


def delays(graph: Graph, links: Sequence[float] | Floats) -> Floats:
    """The time that each result of `before` is on its way, [4 * stages, 2]."""
    return np.array([*links, 0.0], np.float64)[graph.boundary]


class Order(NamedTuple):
    """The ops of the ranks as numbers.

    Attributes:
        rows: Rank, lane and microbatch of each op, and the rows of the two ops that it waits for,
            or -1. These stand before it. There are fewer rows than ops if ranks wait for each other
            in a circle.
        at: Place of each row among the ops of all ranks, rank by rank.
        lanes: Lane of each op, rank by rank.
        counts: Number of ops of each lane.
    """

    rows: Ints
    at: Ints
    lanes: Ints
    counts: Ints


def make_order(ranks: Sequence[Sequence[tuple[str, int, int]]], stages: int, graph: Graph) -> Order:
    """Puts the ops of ranks into an order in which they can run.

    Raises:
        ScheduleError: There is no such stage or microbatch.
    """
    numbers = [(_NUMBERS[kind], stage, j) for row in ranks for kind, stage, j in row]
    ops = np.array(numbers, np.int64).reshape(-1, 3)
    # The loops check no bounds.
    if ops.min(initial=0) < 0 or ops[:, 1].max(initial=0) >= stages or graph.lag.min() < 0:
        raise ScheduleError(f"an op is outside the {stages} stages, or credits are negative")
    lanes = ops[:, 0] * stages + ops[:, 1]
    return order_lanes(lanes, ops[:, 2].copy(), [*map(len, ranks)], graph.before, graph.lag)


def order_lanes(
    lanes: Ints, microbatches: Ints, lengths: Sequence[int], before: Ints, lag: Ints
) -> Order:
    """Does the same for the lane and microbatch of each op, rank by rank."""
    first = np.cumsum([0, *lengths], dtype=np.int64)
    row_of = np.empty((len(before), microbatches.max(initial=0) + 1), np.int64)
    rows, at = np.empty((len(lanes), 5), np.int64), np.empty(len(lanes), np.int64)
    done = in_order(lanes, microbatches, first, before, lag, row_of, rows, at)
    return Order(rows[:done], at[:done], lanes, np.bincount(lanes, minlength=len(before)))


@jit()
def in_order(
    lanes: Ints,
    microbatches: Ints,
    first: Ints,
    before: Ints,
    lag: Ints,
    row_of: Ints,
    rows: Ints,
    at: Ints,
) -> int:
    """Fills `row_of`, `rows` and `at`. Each rank runs as far as it gets. Returns how many ran."""
    ranks, stages, done = len(first) - 1, len(before) // 4, 0
    first_waiting, next_waiting = np.empty_like(row_of), np.empty(ranks, np.int64)
    for lane in range(len(row_of)):
        for j in range(row_of.shape[1]):
            row_of[lane, j] = first_waiting[lane, j] = -1
    position, ready, readies = first.copy(), np.empty(ranks, np.int64), ranks
    for rank in range(ranks):
        ready[rank] = rank
    while readies:
        readies -= 1
        rank = ready[readies]
        while position[rank] < first[rank + 1]:
            i = position[rank]
            lane, j = lanes[i], microbatches[i]
            late = False
            for k in range(2):
                needed, which = before[lane, k], j - lag[lane, k]
                rows[done, 3 + k] = -1
                if needed >= 0 and which >= 0:
                    rows[done, 3 + k] = row_of[needed, which]
                    if row_of[needed, which] < 0:
                        next_waiting[rank] = first_waiting[needed, which]
                        first_waiting[needed, which] = rank
                        late = True
                        break
            if late:
                break
            rows[done, 0], rows[done, 1], rows[done, 2] = rank, lane, j
            if lane >= BW * stages:
                lane -= (BW - B) * stages
            row_of[lane, j] = done
            at[done] = i
            done += 1
            position[rank] += 1
            other = first_waiting[lane, j]
            first_waiting[lane, j] = -1
            while other >= 0:
                ready[readies] = other
                readies += 1
                other = next_waiting[other]
    return done


@jit()
def run_clocks(rows: Ints, delay: Floats, took: Floats, start: Floats, end: Floats) -> None:
    """Fills in when each row's op starts and ends.

    Args:
        rows: Rows of an order.
        delay: delay[g] are `delays` for the microbatches j with j % len(delay) == g.
        took: Time of an op of each lane.
        start: Start of each row's op. Written.
        end: End of each row's op. Written.
    """
    groups, clock = len(delay), np.zeros(len(took))
    for i in range(len(rows)):
        rank, lane = rows[i, 0], rows[i, 1]
        group = rows[i, 2] % groups if groups > 1 else 0
        begin = clock[rank]
        for k in range(2):
            before = rows[i, 3 + k]
            if before >= 0:
                begin = max(begin, end[before] + delay[group, lane, k])
        start[i] = begin
        clock[rank] = end[i] = begin + took[lane]


@jit()
def run_back(
    rows: Ints, delay: Floats, took: Floats, rest: Floats, tail: Floats, out: Floats
) -> None:
    """Fills in the longest way from the end of each row's op to the end of all.

    Args:
        rows: Rows of an order.
        delay: `delays`.
        took: Time of an op of each lane.
        rest: What comes after the last op of each rank. It is overwritten.
        tail: The longest way. Written.
        out: The longest way that leaves the rank at once. Written.
    """
    for i in range(len(rows)):
        out[i] = -np.inf
    for i in range(len(rows) - 1, -1, -1):
        rank, lane = rows[i, 0], rows[i, 1]
        tail[i] = max(rest[rank], out[i])
        rest[rank] = tail[i] + took[lane]
        for k in range(2):
            before = rows[i, 3 + k]
            if before >= 0 and rows[before, 0] != rank:
                out[before] = max(out[before], rest[rank] + delay[lane, k])
