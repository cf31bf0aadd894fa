"""Compiled inner loops of `partition.exact`: loads, times and memory of stages.

Loads are int64 below 2^53. A stage's time is the float load / speed + time of sending. Bytes are
int64. The caller checks that they fit.

Windows: stage s may start at low[s] .. high[s]. `offset[s]` is where its states begin in the flat
tables.

These arguments are the same everywhere:

    sums     prefix sums of the weights
    speeds   one per stage
    sends    times of sending: [stage, size sent]
    classes  for each stop, the index of the size sent (the second axis of `sends`)
    times    sums, speeds, sends and classes
    memory   what the stages hold, four arrays:
        held     prefix sums of static, activation and stash bytes: [3, boundary]
        pairs    resident microbatches of all stages, one pair (forward, stashed) per row
        pair_at  where each stage's pairs begin
        caps     bytes of each stage; empty: no limits

A function that runs once for each placement takes `times` and `memory` as tuples. The small
functions in its loops take single arrays, because Numba counts references for each array that it
takes from a tuple.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dynmo.jit import jit

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

Times = tuple[Ints, Floats, Floats, Ints]
"""sums, speeds, sends and classes."""

Memory = tuple[Ints, Ints, Ints, Ints]
"""held, pairs, pair_at and caps."""

FAILED, FOUND, STUCK = 0, 1, 2


@jit()
def need(held: Ints, pairs: Ints, pair_at: Ints, stage: int, start: int, stop: int) -> int:
    """`MemoryLimits.need`."""
    static = held[0, stop] - held[0, start]
    activation = held[1, stop] - held[1, start]
    stash = held[2, stop] - held[2, start]
    most = 0
    for i in range(pair_at[stage], pair_at[stage + 1]):
        most = max(most, static + pairs[i, 0] * activation + pairs[i, 1] * stash)
    return most


@jit()
def fits(
    held: Ints, pairs: Ints, pair_at: Ints, caps: Ints, stage: int, start: int, stop: int
) -> bool:
    """`MemoryLimits.fits`."""
    return caps.size == 0 or need(held, pairs, pair_at, stage, start, stop) <= caps[stage]


@jit()
def farthest(sums: Ints, start: int, speed: float, send: float, limit: float, high: int) -> int:
    """The largest stop for which the layers from `start` on take at most `limit`."""
    if send > limit:
        return start
    step, low = 1, start
    while low < high:
        trial = min(high, low + step)
        if (sums[trial] - sums[start]) / speed + send > limit:
            high = trial - 1
            break
        low = trial
        step *= 2
    while low < high:
        trial = (low + high + 1) // 2
        if (sums[trial] - sums[start]) / speed + send <= limit:
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
def greedy(times: Times, memory: Memory, limit: float, bounds: Ints) -> tuple[int, float]:
    """Fills the stages in order, each as far as possible. All outputs have one size.

    Returns:
        FOUND, FAILED or STUCK, and the least limit worth trying next. STUCK: a stage cannot hold
        the very layer that it starts with, so an earlier stage would have to stop short.
    """
    sums, speeds, sends, _ = times
    held, pairs, pair_at, caps = memory
    layers, stages = sums.shape[0] - 1, len(speeds)
    rise = np.inf
    bounds[0] = 0
    start = bounds[0]  # after a literal 0, numba would compile all callees a second time
    for stage in range(stages):
        last = layers - (stages - 1 - stage)
        speed, send = speeds[stage], sends[stage, 0]
        stop = farthest(sums, start, speed, send, limit, last)
        room = reach(held, pairs, pair_at, caps, stage, start, stop)
        if room < stop:
            stop = room
        elif stop < last and fits(held, pairs, pair_at, caps, stage, start, stop + 1):
            rise = min(rise, (sums[stop + 1] - sums[start]) / speed + send)
        if stop <= start:
            return STUCK, rise
        bounds[stage + 1] = start = stop
    return (FOUND if start == layers else FAILED), rise


@jit()
def every(
    times: Times, memory: Memory, limit: float, low: Ints, high: Ints, bounds: Ints
) -> tuple[int, float]:
    """Like `greedy`, but tries every stop.

    This is for memory that makes a stage stop short, and for links whose time depends on the stop.

    The layers before stop e weigh and hold the least behind the latest start before e. That start
    alone therefore decides whether e is reached. Starts before low[s] lead nowhere.
    """
    sums, speeds, sends, classes = times
    held, pairs, pair_at, caps = memory
    layers, stages, kinds = sums.shape[0] - 1, len(speeds), sends.shape[1]
    reached = np.zeros((stages + 1, layers + 1), np.uint8)
    reached[0, 0] = 1
    blocked = np.zeros(kinds, np.uint8)
    rise = np.inf
    for stage in range(stages):  # a stage may start one layer earlier
        start, stop = low[stage], low[stage + 1]
        if start > stage and fits(held, pairs, pair_at, caps, stage, start - 1, stop):
            load = sums[stop] - sums[start - 1]
            rise = min(rise, load / speeds[stage] + sends[stage].min())
    first = high[0] = 0
    for stage in range(stages):
        start, at, earliest, missing = -1, first, -1, kinds
        speed, least = speeds[stage], sends[stage].min()
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
            d = classes[stop]
            alone = (sums[stop] - sums[start]) / speed
            if alone + sends[stage, d] <= limit:
                reached[stage + 1, stop] = 1
                high[stage + 1] = stop
                if earliest < 0:
                    earliest = stop
            else:
                if not blocked[d]:
                    blocked[d] = 1
                    missing -= 1
                rise = min(rise, alone + sends[stage, d])
                if missing == 0 and start == high[stage] and alone + least > limit:
                    break
        if earliest < 0:
            return FAILED, rise
        first = earliest
    if not reached[stages, layers]:
        return FAILED, rise
    # Every stage starts as late as it can, the last stage first.
    bounds[stages] = layers
    for stage in range(stages - 1, -1, -1):
        start = bounds[stage + 1] - 1
        while not reached[stage, start]:
            start -= 1
        bounds[stage] = start
    return FOUND, rise


@jit()
def floors(times: Times, memory: Memory, limit: float, low: Ints) -> None:
    """Finds the first start of each stage. Earlier, it and those behind would have too much."""
    sums, speeds, sends, _ = times
    held, pairs, pair_at, caps = memory
    stages = len(speeds)
    low[stages] = sums.shape[0] - 1
    for stage in range(stages - 1, -1, -1):
        stop, least = low[stage + 1], sends[stage].min()
        left, right = stage, stop
        while left < right:
            trial = (left + right) // 2
            if (sums[stop] - sums[trial]) / speeds[stage] + least <= limit and fits(
                held, pairs, pair_at, caps, stage, trial, stop
            ):
                right = trial
            else:
                left = trial + 1
        low[stage] = left


@jit()
def best_tie(
    times: Times,
    memory: Memory,
    limit: float,
    windows: tuple[Ints, Ints, Ints],
    moves: tuple[Ints, Ints],
    rounded: tuple[Ints, Ints, Ints],
    bounds: Ints,
) -> bool:
    """Finds the best placement within the windows.

    Uses dynamic programming over (stage, stop). The best placement has the least (bytes moved,
    squared times, squared counts), then the least stops. A stage's time is
    load * slowness / 2^30 + extra.
    """
    sums, speeds, sends, classes = times
    held, pairs, pair_at, caps = memory
    low, high, offset = windows
    own, sizes = moves
    loads, extra, slowness = rounded
    stages, states = len(low) - 1, offset[len(low)]
    moved = np.zeros(states, np.int64)
    squares = np.zeros(states, np.int64)
    counts = np.zeros(states, np.int64)
    came = np.full(states, -1, np.int64)
    came[0] = 0
    kinds = sends.shape[1]
    stops = np.zeros(kinds, np.int64)
    for stage in range(stages):
        last = min(high[stage + 1], sums.shape[0] - 1 - (stages - 1 - stage))
        for start in range(low[stage], high[stage] + 1):
            at = offset[stage] + start - low[stage]
            if came[at] < 0:
                continue
            stop = start
            for d in range(kinds):
                stops[d] = farthest(sums, start, speeds[stage], sends[stage, d], limit, last)
                stop = max(stop, stops[d])
            stop = reach(held, pairs, pair_at, caps, stage, start, stop) if stop > start else start
            for end in range(max(start + 1, low[stage + 1]), stop + 1):
                d = classes[end]
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
    end = low[stages]
    for stage in range(stages, 0, -1):
        bounds[stage] = end
        end = came[offset[stage] + end - low[stage]]
    bounds[0] = 0
    return True


@jit()
def near(
    times: Times, memory: Memory, limit: float, low: Ints, targets: Ints, bounds: Ints
) -> bool:
    """Finds a placement whose boundaries, one by one, are as near to `targets` as possible.

    All outputs have one size.
    """
    sums, speeds, sends, _ = times
    held, pairs, pair_at, caps = memory
    stages = len(speeds)
    bounds[0] = 0
    for stage in range(stages):
        start, last = bounds[stage], sums.shape[0] - 1 - (stages - 1 - stage)
        stop = farthest(sums, start, speeds[stage], sends[stage, 0], limit, last)
        stop = reach(held, pairs, pair_at, caps, stage, start, stop) if stop > start else stop
        bounds[stage + 1] = min(stop, max(targets[stage + 1], low[stage + 1], start + 1))
        if bounds[stage + 1] <= start or bounds[stage + 1] < low[stage + 1]:
            return False
    return True
