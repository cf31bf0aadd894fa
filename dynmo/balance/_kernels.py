"""Compiled inner loops of `partition.exact`: exact sums and memory of stages.

A prefix sum is an integer of any length. It is kept as limbs of 32 bits, the most significant
first, one row per layer boundary. Loads are therefore compared exactly, whatever the floats were.
Bytes are int64. The caller checks that they fit.

Windows: stage s may start at low[s] .. high[s]. `offset[s]` is where its states begin in the flat
tables.

These arguments are the same everywhere:

    sums     limbs of the prefix sums of the weights: [boundary, limb]
    limits   limbs of the largest loads: [stage or one row for all, size sent, limb]
    classes  for each stop, the index of the size sent (the second axis of `limits`)
    memory   what the stages hold, four arrays:
        held     prefix sums of static, activation and stash bytes: [3, boundary]
        pairs    resident microbatches of all stages, one pair (forward, stashed) per row
        pair_at  where each stage's pairs begin
        caps     bytes of each stage; empty: no limits

A function that runs once for each placement takes `memory` as one tuple. The small functions in its
loops take single arrays, because Numba counts references for each array that it takes from a tuple.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dynmo.jit import jit

Ints = NDArray[np.int64]

Memory = tuple[Ints, Ints, Ints, Ints]
"""held, pairs, pair_at and caps."""

FAILED, FOUND, STUCK = 0, 1, 2


@jit()
def weighs_at_most(sums: Ints, start: int, stop: int, limit: Ints) -> bool:
    """Tells if the layers start..stop-1 weigh at most `limit`."""
    over = 0
    for k in range(sums.shape[1]):
        over = over * 4294967296 + sums[stop, k] - sums[start, k] - limit[k]
        if over >= 3:
            return False
        if over <= -3:
            return True
    return over <= 0


@jit()
def lighter(sums: Ints, start: int, stop: int, other_start: int, other_stop: int) -> bool:
    """Tells if the layers start..stop-1 weigh less than other_start..other_stop-1."""
    over = 0
    for k in range(sums.shape[1]):
        over = (
            over * 4294967296
            + sums[stop, k]
            - sums[start, k]
            - sums[other_stop, k]
            + sums[other_start, k]
        )
        if over >= 3:
            return False
        if over <= -3:
            return True
    return over < 0


@jit()
def fits(
    held: Ints, pairs: Ints, pair_at: Ints, caps: Ints, stage: int, start: int, stop: int
) -> bool:
    """`MemoryLimits.fits`."""
    if caps.size == 0:
        return True
    static = held[0, stop] - held[0, start]
    activation = held[1, stop] - held[1, start]
    stash = held[2, stop] - held[2, start]
    for i in range(pair_at[stage], pair_at[stage + 1]):
        if static + pairs[i, 0] * activation + pairs[i, 1] * stash > caps[stage]:
            return False
    return True


@jit()
def farthest(sums: Ints, start: int, limit: Ints, high: int) -> int:
    """The largest stop for which the layers from `start` on weigh at most `limit`.

    Searches by doubling, then by halving.
    """
    if limit[0] < 0:
        return start
    step, low = 1, start
    while low < high:
        trial = min(high, low + step)
        if not weighs_at_most(sums, start, trial, limit):
            high = trial - 1
            break
        low = trial
        step *= 2
    while low < high:
        trial = (low + high + 1) // 2
        if weighs_at_most(sums, start, trial, limit):
            low = trial
        else:
            high = trial - 1
    return low


@jit()
def reach(
    held: Ints, pairs: Ints, pair_at: Ints, caps: Ints, stage: int, start: int, high: int
) -> int:
    """The largest stop up to `high` for which the layers from `start` on fit `stage`."""
    if caps.size == 0 or fits(held, pairs, pair_at, caps, stage, start, high):
        return high
    low = start
    high -= 1
    while low < high:
        trial = (low + high + 1) // 2
        if fits(held, pairs, pair_at, caps, stage, start, trial):
            low = trial
        else:
            high = trial - 1
    return low


@jit()
def greedy(
    sums: Ints,
    limits: Ints,
    memory: Memory,
    stages: int,
    bounds: Ints,
    rise: Ints,
) -> tuple[int, int]:
    """Fills the stages in order, each as far as possible.

    Returns:
        FOUND, FAILED or STUCK, and the number of stages looked at. STUCK: a stage cannot hold the
        very layer that it starts with, so an earlier stage would have to stop short.
    """
    held, pairs, pair_at, caps = memory
    layers, start = sums.shape[0] - 1, 0
    bounds[0] = 0
    for stage in range(stages):
        last = layers - (stages - 1 - stage)
        stop = farthest(sums, start, limits[stage % limits.shape[0], 0], last)
        rise[stage, 0, 0], rise[stage, 0, 1] = start, -1
        room = reach(held, pairs, pair_at, caps, stage, start, stop)
        if room < stop:
            stop = room
        elif stop < last and fits(held, pairs, pair_at, caps, stage, start, stop + 1):
            rise[stage, 0, 1] = stop + 1
        if stop <= start:
            return STUCK, stage + 1
        bounds[stage + 1] = start = stop
    return (FOUND if start == layers else FAILED), stages


@jit()
def widest(limits: Ints, row: int) -> Ints:
    """The largest of a row's limits, as limbs."""
    best = 0
    for d in range(1, limits.shape[1]):
        for k in range(limits.shape[2]):
            if limits[row, d, k] != limits[row, best, k]:
                if limits[row, d, k] > limits[row, best, k]:
                    best = d
                break
    return limits[row, best]


@jit()
def every(
    sums: Ints,
    limits: Ints,
    classes: Ints,
    memory: Memory,
    low: Ints,
    high: Ints,
    bounds: Ints,
    rise: Ints,
) -> tuple[int, int]:
    """Like `greedy`, but tries every stop.

    This is for memory that makes a stage stop short, and for links whose time depends on the stop.

    The layers before stop e weigh and hold the least behind the latest start before e. That start
    alone therefore decides whether e is reached. Starts before low[s] lead nowhere.
    """
    held, pairs, pair_at, caps = memory
    layers, stages = sums.shape[0] - 1, len(low) - 1
    kinds = limits.shape[1]
    reached = np.zeros((stages + 1, layers + 1), np.uint8)
    reached[0, 0] = 1
    blocked = np.zeros(kinds, np.uint8)
    first = high[0] = 0
    for stage in range(stages):
        row = stage % limits.shape[0]
        rise[stage] = -1
        start, at, earliest, missing = -1, first, -1, kinds
        most = widest(limits, row)
        for stop in range(max(first + 1, low[stage + 1]), layers - (stages - 1 - stage) + 1):
            while at < stop:
                if reached[stage, at]:
                    start, missing = at, kinds
                    blocked[:] = 0
                at += 1
            if not fits(held, pairs, pair_at, caps, stage, start, stop):
                if start == high[stage]:
                    break
                continue
            d = classes[stop] if kinds > 1 else 0
            if limits[row, d, 0] >= 0 and weighs_at_most(sums, start, stop, limits[row, d]):
                reached[stage + 1, stop] = 1
                high[stage + 1] = stop
                if earliest < 0:
                    earliest = stop
            else:
                if not blocked[d]:
                    blocked[d] = 1
                    missing -= 1
                if rise[stage, d, 1] < 0 or lighter(
                    sums, start, stop, rise[stage, d, 0], rise[stage, d, 1]
                ):
                    rise[stage, d, 0], rise[stage, d, 1] = start, stop
                if (
                    missing == 0
                    and start == high[stage]
                    and not weighs_at_most(sums, start, stop, most)
                ):
                    break
        if earliest < 0:
            return FAILED, stage + 1
        first = earliest
    if not reached[stages, layers]:
        return FAILED, stages
    _latest_starts(reached, bounds)
    return FOUND, stages


@jit()
def _latest_starts(reached: NDArray[np.uint8], bounds: Ints) -> None:
    """Writes the placement in which every stage starts as late as it can, last stage first."""
    stages, layers = reached.shape[0] - 1, reached.shape[1] - 1
    bounds[stages] = layers
    for stage in range(stages - 1, -1, -1):
        start = bounds[stage + 1] - 1
        while not reached[stage, start]:
            start -= 1
        bounds[stage] = start


@jit()
def floors(
    sums: Ints,
    limits: Ints,
    memory: Memory,
    stages: int,
    low: Ints,
) -> None:
    """Finds the first start of each stage.

    The stages from s on would carry or hold too much if s started before low[s].
    """
    held, pairs, pair_at, caps = memory
    low[stages] = sums.shape[0] - 1
    for stage in range(stages - 1, -1, -1):
        stop = low[stage + 1]
        left, right = stage, stop
        limit = widest(limits, stage % limits.shape[0])
        while left < right:
            trial = (left + right) // 2
            if weighs_at_most(sums, trial, stop, limit) and fits(
                held, pairs, pair_at, caps, stage, trial, stop
            ):
                right = trial
            else:
                left = trial + 1
        low[stage] = left


@jit()
def best_tie(
    sums: Ints,
    limits: Ints,
    classes: Ints,
    memory: Memory,
    windows: tuple[Ints, Ints, Ints],
    moves: tuple[Ints, Ints],
    times: tuple[Ints, Ints, Ints],
    bounds: Ints,
) -> bool:
    """Finds the best placement within the windows.

    Uses dynamic programming over (stage, stop). The best placement has the least (bytes moved,
    squared times, squared counts), then the least stops. A stage's time is
    load * slowness / 2^30 + extra.
    """
    held, pairs, pair_at, caps = memory
    low, high, offset = windows
    own, sizes = moves
    loads, extra, slowness = times
    stages, states = len(low) - 1, offset[len(low)]
    moved = np.zeros(states, np.int64)
    squares = np.zeros(states, np.int64)
    counts = np.zeros(states, np.int64)
    came = np.full(states, -1, np.int64)
    came[0] = 0
    stops = np.zeros(limits.shape[1], np.int64)
    for stage in range(stages):
        row = stage % limits.shape[0]
        last = min(high[stage + 1], sums.shape[0] - 1 - (stages - 1 - stage))
        for start in range(low[stage], high[stage] + 1):
            at = offset[stage] + start - low[stage]
            if came[at] < 0:
                continue
            stop = 0
            for d in range(limits.shape[1]):
                stops[d] = farthest(sums, start, limits[row, d], last)
                stop = max(stop, stops[d])
            stop = reach(held, pairs, pair_at, caps, stage, start, stop) if stop > start else start
            for end in range(max(start + 1, low[stage + 1]), stop + 1):
                d = classes[end] if limits.shape[1] > 1 else 0
                if end > stops[d]:
                    continue
                kept = sizes[min(end, own[stage, 1])] - sizes[max(start, own[stage, 0])]
                time = ((loads[end] - loads[start]) * slowness[stage] >> 30) + extra[stage, d]
                new_moved = moved[at] - max(0, kept)
                new_squares = squares[at] + time * time
                new_counts = counts[at] + (end - start) * (end - start)
                to = offset[stage + 1] + end - low[stage + 1]
                if (
                    came[to] < 0
                    or new_moved < moved[to]
                    or (
                        new_moved == moved[to]
                        and (
                            new_squares < squares[to]
                            or (new_squares == squares[to] and new_counts < counts[to])
                        )
                    )
                ):
                    moved[to], squares[to] = new_moved, new_squares
                    counts[to], came[to] = new_counts, start
    if low[stages] != sums.shape[0] - 1 or came[offset[stages]] < 0:
        return False
    _best_starts(came, low, offset, bounds)
    return True


@jit()
def _best_starts(came: Ints, low: Ints, offset: Ints, bounds: Ints) -> None:
    """Writes the placement of `best_tie`, from the last stage on."""
    stages = len(low) - 1
    end = low[stages]
    for stage in range(stages, 0, -1):
        bounds[stage] = end
        end = came[offset[stage] + end - low[stage]]
    bounds[0] = 0


@jit()
def near(
    sums: Ints,
    limits: Ints,
    memory: Memory,
    low: Ints,
    targets: Ints,
    bounds: Ints,
) -> bool:
    """Finds a placement whose boundaries are near to `targets`.

    Each boundary in turn is as near as the limits and low[s] allow.
    """
    held, pairs, pair_at, caps = memory
    stages = len(low) - 1
    bounds[0] = 0
    for stage in range(stages):
        last = sums.shape[0] - 1 - (stages - 1 - stage)
        stop = farthest(sums, bounds[stage], limits[stage % limits.shape[0], 0], last)
        stop = (
            reach(held, pairs, pair_at, caps, stage, bounds[stage], stop)
            if stop > bounds[stage]
            else stop
        )
        bounds[stage + 1] = min(stop, max(targets[stage + 1], low[stage + 1], bounds[stage] + 1))
        if bounds[stage + 1] <= bounds[stage] or bounds[stage + 1] < low[stage + 1]:
            return False
    return True
