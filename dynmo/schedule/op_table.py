"""A schedule as rows of numbers, for compiled loops.

There is one row per op. Every op stands behind the ops that it waits for:

    rank  stage  kind  | before  boundary | before  boundary

    kind      index in `Kind`: F, B, W, BW
    before    the row of an op that must have ended, or -1
    boundary  the link that its result crosses, or -1
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


class OpTable(NamedTuple):
    """The rows, and what else loops need.

    Attributes:
        ops: Kind, stage and microbatch of all ops, rank by rank in the rank's order.
        first: Index of each rank's first op in `ops`, and the number of all ops.
        rows: One row per op, as above. There are fewer if ranks wait for each other in a circle.
        at: Index in `ops` of each row.
        counts: counts[stage, kind] ops.
        stage_ranks: Rank of each stage.
    """

    ops: Ints
    first: Ints
    rows: Ints
    at: Ints
    counts: Ints
    stage_ranks: Ints


def make_table(
    ranks: Sequence[Sequence[tuple[int, int, int]]],
    stage_ranks: Sequence[int],
    first_trainable: int,
    credits: int,
) -> OpTable:
    """Makes the table of a schedule.

    Args:
        ranks: (kind, stage, microbatch) of the ops of each rank.
        stage_ranks: Rank of each stage.
        first_trainable: See `Schedule`.
        credits: See `Schedule`.

    Raises:
        ScheduleError: There is no such stage or microbatch.
    """
    ops = np.array([op for row in ranks for op in row], np.int64).reshape(-1, 3)
    # The loops check no bounds.
    if ops.min(initial=0) < 0 or ops[:, 1].max(initial=0) >= len(stage_ranks) or credits < 0:
        raise ScheduleError(
            f"an op is outside the {len(stage_ranks)} stages, or credits = {credits} is negative"
        )
    first = np.cumsum([0, *(len(row) for row in ranks)], dtype=np.int64)
    rank_of = np.array(stage_ranks, np.int64)
    counts = np.zeros((len(rank_of), 4), np.int64)
    np.add.at(counts, (ops[:, 1], ops[:, 0]), 1)
    rows, at = np.full((len(ops), 7), -1, np.int64), np.zeros(len(ops), np.int64)
    where = np.full((4, len(counts), ops[:, 2].max(initial=-1) + 1), -1, np.int64)
    where[ops[:, 0], ops[:, 1], ops[:, 2]] = np.arange(len(ops))
    done = _order(ops, first, where, rank_of, first_trainable, credits, rows, at)
    return OpTable(ops, first, rows[:done], at[:done], counts, rank_of)


@jit()
def _order(
    ops: Ints,
    first: Ints,
    where: Ints,
    stage_ranks: Ints,
    first_trainable: int,
    credits: int,
    rows: Ints,
    at: Ints,
) -> int:
    """Fills `rows` and `at` as `op.in_order` lists the ops. Returns the number of rows."""
    ranks, stages, done = len(first) - 1, len(stage_ranks), 0
    row_of = np.full(len(ops), -1)
    first_waiting, next_waiting = np.full(len(ops), -1), np.full(ranks, -1)
    position, ready, readies = first[:-1].copy(), np.arange(ranks), ranks
    before, boundary = np.empty(2, np.int64), np.empty(2, np.int64)
    while readies:
        readies -= 1
        rank = ready[readies]
        while position[rank] < first[rank + 1]:
            i = position[rank]
            needs = _needs(ops[i], where, stages, first_trainable, credits, before, boundary)
            late = 0
            while late < needs and before[late] >= 0 and row_of[before[late]] >= 0:
                late += 1
            if late < needs:
                if before[late] >= 0:
                    next_waiting[rank] = first_waiting[before[late]]
                    first_waiting[before[late]] = rank
                break
            rows[done, 0], rows[done, 1], rows[done, 2] = rank, ops[i, 1], ops[i, 0]
            for k in range(needs):
                rows[done, 3 + 2 * k] = row_of[before[k]]
                link = boundary[k]
                if link >= 0 and stage_ranks[link] != stage_ranks[link + 1]:
                    rows[done, 4 + 2 * k] = link
            row_of[i] = done
            at[done] = i
            done += 1
            position[rank] += 1
            other = first_waiting[i]
            while other >= 0:
                ready[readies] = other
                readies += 1
                other = next_waiting[other]
    return done


@jit()
def _needs(
    op: Ints,
    where: Ints,
    stages: int,
    first_trainable: int,
    credits: int,
    before: Ints,
    boundary: Ints,
) -> int:
    """Writes the indices of the ops before `op`, -1 for one that is nowhere. See `dependencies`."""
    kind, s, j = op[0], op[1], op[2]
    needs = 0
    if kind == F:
        if s > 0:
            before[0], boundary[0], needs = where[F, s - 1, j], s - 1, 1
        if s < first_trainable and j >= credits and s + 1 < stages:
            before[needs], boundary[needs] = where[F, s + 1, j - credits], s
            needs += 1
    elif kind == W:
        before[0], boundary[0], needs = where[B, s, j], -1, 1
    else:
        before[0], boundary[0], needs = where[F, s, j], -1, 1
        if s + 1 < stages:
            fused = where[BW, s + 1, j]
            before[1] = fused if fused >= 0 else where[B, s + 1, j]
            boundary[1], needs = s, 2
    return needs


@jit()
def run_clocks(
    rows: Ints, ranks: int, took: Floats, links: Floats, start: Floats, end: Floats
) -> None:
    """Fills in when each row's op starts and ends.

    Args:
        rows: Rows of a table.
        ranks: Number of ranks.
        took: took[stage, kind] is the time of an op.
        links: Time of each link.
        start: Start of each row's op. Written.
        end: End of each row's op. Written.
    """
    clock = np.zeros(ranks)
    for i in range(len(rows)):
        rank = rows[i, 0]
        begin = clock[rank]
        for column in (3, 5):
            before = rows[i, column]
            if before >= 0:
                arrival = end[before]
                if rows[i, column + 1] >= 0:
                    arrival += links[rows[i, column + 1]]
                begin = max(begin, arrival)
        start[i] = begin
        clock[rank] = end[i] = begin + took[rows[i, 1], rows[i, 2]]


@jit()
def most_live(ops: Ints, first: Ints, changes: Floats) -> Floats:
    """The largest sum of changes[stage, kind] over the first ops of each rank."""
    peaks = np.zeros(len(first) - 1)
    for rank in range(len(peaks)):
        live = 0.0
        for i in range(first[rank], first[rank + 1]):
            live += changes[ops[i, 1], ops[i, 0]]
            peaks[rank] = max(peaks[rank], live)
    return peaks
