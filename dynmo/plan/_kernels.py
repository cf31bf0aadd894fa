"""Compiled inner loops of `bisection` and `chunks`: loads, times and memory of stages.

Loads are int64 below 2^53. A stage's time is the float load / speed + time of sending. Bytes are
int64. The caller checks that they fit.

    chain    contiguous stages, one per rank:
        sums     prefix sums of the weights
        speeds   one per stage
        sends    times of sending: [stage, stop]
        memory
    memory   what the stages hold:
        held     prefix sums of static, activation and stash bytes: [3, boundary]
        pairs    resident microbatches of all stages, one pair (forward, stashed) per row
        pair_at  where each stage's pairs begin
        caps     bytes of each stage; empty: no limits

A function that runs once for each placement takes tuples. The small functions in its loops take
single arrays, because Numba counts references for each array that it takes from a tuple.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dynmo.jit import jit
from dynmo.schedule.graph import Floats, Ints

Bytes = NDArray[np.uint8]
Origins = NDArray[np.int32]

Memory = tuple[Ints, Ints, Ints, Ints]
"""held, pairs, pair_at and caps."""

Chain = tuple[Ints, Floats, Floats, Ints, Ints, Ints, Ints]
"""sums, speeds, sends and `Memory`."""

Chunks = tuple[Ints, Ints, Floats, Ints, Ints, Ints, Ints]
"""sums, rank_of, speeds and `Memory`."""

Flow = tuple[int, float, Floats]
"""How microbatches flow through a V.

microbatches  of a step; 0: the flow is not considered
stretch       how many times as long a microbatch's way takes as without waiting
ways          prefix sums of F, B and W, in the unit of the loads: [3, boundary]
"""


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
def full(
    held: Ints, pairs: Ints, pair_at: Ints, caps: Ints, stage: int, start: int, stop: int
) -> bool:
    """Tells whether a stage needs more than its cap.

    Callers ask only if there are caps, because a call takes longer than the rest of a loop.
    """
    return need(held, pairs, pair_at, stage, start, stop) > caps[stage]


@jit()
def floors(chain: Chain, limit: float, low: Ints) -> float:
    """Finds the first start of each stage: earlier, it and those behind would have too much.

    Sending takes no time here. Returns the least limit for which a start may be earlier.
    """
    sums, speeds, _, held, pairs, pair_at, caps = chain
    stages, rise = len(speeds), np.inf
    low[stages] = len(sums) - 1
    for stage in range(stages - 1, -1, -1):
        start = stop = low[stage + 1]
        while start > stage:
            time = (sums[stop] - sums[start - 1]) / speeds[stage]
            if time > limit:
                rise = min(rise, time)
                break
            if caps.size and full(held, pairs, pair_at, caps, stage, start - 1, stop):
                break
            start -= 1
        low[stage] = start
    return rise


@jit()
def reach(chain: Chain, limit: float, low: Ints, reached: Bytes) -> float:
    """Finds the ends of each stage: reached[s, e] says that s stages can hold the layers before e.

    The layers before an end weigh and hold the least behind the latest start. That start alone
    therefore decides. Returns the least limit for which there may be more ends.
    """
    sums, speeds, sends, held, pairs, pair_at, caps = chain
    layers, stages, rise = len(sums) - 1, len(speeds), np.inf
    reached[0, 0] = 1
    first = last = low[0]  # after a literal 0, numba would compile all callees a second time
    for stage in range(stages):
        start, at, earliest, latest = -1, first, -1, -1
        for stop in range(max(first + 1, low[stage + 1]), layers - (stages - 1 - stage) + 1):
            while at < stop:
                if reached[stage, at]:
                    start = at
                at += 1
            time = (sums[stop] - sums[start]) / speeds[stage]
            over = time > limit or (
                caps.size > 0 and full(held, pairs, pair_at, caps, stage, start, stop)
            )
            if not over:
                time += sends[stage, stop]
            if time > limit:
                rise = min(rise, time)
            if over and start == last:
                break
            if not over and time <= limit:
                reached[stage + 1, stop] = 1
                latest = stop
                if earliest < 0:
                    earliest = stop
        if earliest < 0:
            break
        first, last = earliest, latest
    return rise


@jit()
def nearest(
    chain: Chain, limit: float, low: Ints, reached: Bytes, wanted: Ints, bounds: Ints
) -> None:
    """Finds the placement whose boundaries, the last one first, are nearest to `wanted`."""
    sums, speeds, sends, held, pairs, pair_at, caps = chain
    stages = len(speeds)
    bounds[stages] = len(sums) - 1
    for stage in range(stages - 1, 0, -1):
        stop, best = bounds[stage + 1], -1
        send = sends[stage, stop]
        for start in range(stop - 1, low[stage] - 1, -1):
            if (sums[stop] - sums[start]) / speeds[stage] + send > limit:
                break
            if caps.size and full(held, pairs, pair_at, caps, stage, start, stop):
                break
            near = abs(start - wanted[stage]) < abs(best - wanted[stage])
            if reached[stage, start] and (best < 0 or near):
                best = start
        bounds[stage] = best
    bounds[0] = 0


@jit()
def evenest(
    chain: Chain, limit: float, low: Ints, reached: Bytes, width: int, bounds: Ints
) -> None:
    """Finds the placement whose squared times have the least sum, by dynamic programming.

    Stage s starts with one of `width` layers from low[s] on. Times are rounded, so that equal ones
    have equal sums in any order. Squared numbers of layers decide between these.
    """
    sums, speeds, sends, held, pairs, pair_at, caps = chain
    stages, layers = len(speeds), len(sums) - 1
    squares = np.full((stages + 1, width), np.inf)
    starts = np.zeros((stages + 1, width), np.int64)
    squares[0, 0] = 0.0
    scale = 2**17 / limit if limit else 0.0
    for stage in range(stages):
        for i in range(min(width, layers + 1 - low[stage + 1])):
            stop = low[stage + 1] + i
            if not reached[stage + 1, stop]:
                continue
            send = sends[stage, stop]
            for start in range(min(stop, low[stage] + width) - 1, low[stage] - 1, -1):
                time = (sums[stop] - sums[start]) / speeds[stage] + send
                if time > limit or (
                    caps.size > 0 and full(held, pairs, pair_at, caps, stage, start, stop)
                ):
                    break
                square = round(time * scale) ** 2 + ((stop - start) / 128) ** 2
                total = squares[stage, start - low[stage]] + square
                if total <= squares[stage + 1, i]:
                    squares[stage + 1, i], starts[stage + 1, i] = total, start
    bounds[stages] = layers
    for stage in range(stages, 0, -1):
        bounds[stage - 1] = starts[stage, bounds[stage] - low[stage]]


@jit()
def evaluate_bounds(chunks: Chunks, bounds: Ints, scratch: Ints) -> tuple[int, float, float]:
    """The bytes over the caps, the largest time of a rank, and the sum of squared times."""
    sums, rank_of, speeds, held, pairs, pair_at, caps = chunks
    scratch[:] = 0
    for s in range(len(rank_of)):
        scratch[rank_of[s], 0] += sums[bounds[s + 1]] - sums[bounds[s]]
        if caps.size:
            scratch[rank_of[s], 1] += need(held, pairs, pair_at, s, bounds[s], bounds[s + 1])
    over, largest, squares = 0, 0.0, 0.0
    for r in range(len(speeds)):
        time = scratch[r, 0] / speeds[r]
        largest = max(largest, time)
        squares += time * time
        if caps.size:
            over += max(0, scratch[r, 1] - caps[r])
    return over, largest, squares


@jit()
def descend(chunks: Chunks, bounds: Ints) -> tuple[int, float, float]:
    """Moves one layer at a time along the path between two stages, in `bounds`.

    Goes on while what `evaluate_bounds` says falls.
    """
    rank_of, speeds = chunks[1], chunks[2]
    stages, scratch = len(rank_of), np.zeros((len(speeds), 2), np.int64)
    best, progress = evaluate_bounds(chunks, bounds, scratch), True
    while progress:
        progress = False
        for source in range(stages):
            for target in range(stages):
                if source == target or bounds[source + 1] - bounds[source] < 2:
                    continue
                low, high, step = (source, target, -1) if source < target else (target, source, 1)
                for i in range(low + 1, high + 1):
                    bounds[i] += step
                value = evaluate_bounds(chunks, bounds, scratch)
                if value < best:
                    best, progress = value, True
                    continue
                for i in range(low + 1, high + 1):
                    bounds[i] -= step
    return best


@jit()
def wander(chunks: Chunks, bounds: Ints, kicks: int, floor: float) -> tuple[int, float, float]:
    """Iterated descent: pushes some boundaries by a layer or two, and descends again.

    The pushes come from a generator with a fixed seed. Returns what `evaluate_bounds` says.
    """
    stages = len(bounds) - 1
    best, state = descend(chunks, bounds), 1
    for _ in range(kicks):
        if best[0] == 0 and best[1] <= floor:
            break
        trial = bounds.copy()
        for _ in range(3):
            state = (state * 1103515245 + 12345) % 2147483648
            i = 1 + (state >> 8) % max(1, stages - 1)
            state = (state * 1103515245 + 12345) % 2147483648
            moved = trial[i] + ((state >> 8) % 5) - 2
            if i < stages and trial[i - 1] < moved < trial[i + 1]:
                trial[i] = moved
        value = descend(chunks, trial)
        if value <= best:
            best = value
            for i in range(stages + 1):  # numba takes seconds to compile an array's assignment
                bounds[i] = trial[i]
    return best


@jit()
def flow_time(flow: Flow, x: int, a: int, b: int, y: int) -> float:
    """How long a step must take by the flow, divided by the microbatches.

    A rank holds the layers from x to a and from b to y. It cannot run an op before the first
    microbatch gets there, nor after the last one must leave: its other ops need the time that
    remains. The same holds on the clock of rank 0, where each microbatch begins and ends. Rank 0's
    clock only counts if it begins and ends with all others' F's in between. Speeds of other ranks
    are taken as 1.
    """
    m, stretch, ways = flow
    f, g, h = ways[0], ways[1], ways[2]
    n = ways.shape[1] - 1
    f_low, f_up = f[a] - f[x], f[y] - f[b]
    b_low, b_up = g[a] - g[x], g[y] - g[b]
    w_low, w_up = h[a] - h[x], h[y] - h[b]
    scale = stretch / m
    # From its first F to the first F and B of the upper stage and to the first B of the lower one.
    to_f_up = f[b] - f[x]
    to_b_up = f[n] - f[x] + g[n] - g[y]
    to_b_low = f[n] - f[x] + g[n] - g[a]
    time = scale * to_f_up + f_up + b_up + w_up + b_low + w_low
    if b_up + w_up > 0.0:  # a frozen stage has no B to wait for
        time = max(time, scale * to_b_up + b_up + w_up + b_low + w_low)
    if b_low + w_low > 0.0:
        time = max(time, scale * to_b_low + b_low + w_low)
    # From the last F of each stage, and from the last B of the upper one, to the rank's last op.
    if b_low + w_low > 0.0:
        back = g[n] - g[x] + w_low
        time = max(
            time,
            f_low + scale * (f[n] - f[a] + back),
            f_low + f_up + scale * (f[n] - f[y] + back),
            f_low + f_up + b_up + scale * (g[b] - g[x] + w_low),
        )
    elif b_up + w_up > 0.0:
        back = g[n] - g[b] + w_up
        time = max(
            time,
            f_low + scale * (f[n] - f[a] + back),
            f_low + f_up + scale * (f[n] - f[y] + back),
        )
    if g[1] + h[1] > 0.0:  # rank 0's last B ends the step
        return max(
            time,
            f_low + f_up + scale * (f[x] + f[n] - f[y] + g[n] + h[1]),
            f_low + f_up + b_up + scale * (f[x] + g[b] + h[1]),
            f_low + f_up + b_up + b_low + scale * (f[x] + g[x] + h[1]),
            f_up + b_up + b_low + scale * (f[b] + g[x] + h[1]),
            b_up + b_low + scale * (f[n] + g[n] - g[y] + g[x] + h[1]),
        )
    last = g[n] - g[n - 1] + h[n] - h[n - 1]
    return max(time, f_low + f_up + scale * (f[x] + f[n] - f[y] + last))


@jit()
def nested(
    chunks: Chunks, flow: Flow, limit: float, came: Origins, bounds: Ints
) -> tuple[bool, float]:
    """Solves the V within `limit`: rank r holds stages r and 2 p - 1 - r.

    came[r, x, y] is not 0 if ranks 0 .. r-1 can hold exactly the layers before x and from y on. It
    says where the layers of rank r-1 begin and end. Returns (True, the placement's largest time),
    or (False, the least limit worth trying next).
    """
    sums, _, speeds, _, _, _, _ = chunks
    layers, ranks, largest = len(sums) - 1, len(speeds), 0.0
    rise = _reach_inwards(chunks, flow, limit, came)
    for end in range(layers + 1):
        if came[ranks, end, end]:
            a = b = bounds[ranks] = end
            for r in range(ranks - 1, -1, -1):
                x, y = divmod(came[r + 1, a, b] - 1, layers + 1)
                time = float(sums[a] - sums[x] + sums[y] - sums[b])
                if flow[0]:
                    time = max(time, flow_time(flow, x, a, b, y))
                largest = max(largest, time / speeds[r])
                a, b = bounds[r], bounds[2 * ranks - r] = x, y
            return True, largest
    return False, rise


@jit()
def _reach_inwards(chunks: Chunks, flow: Flow, limit: float, came: Origins) -> float:
    """Fills in `came`, the outer rank first. Returns the least limit worth trying next.

    Of the ways to a state, the one with the shortest lower stage, then upper stage counts.
    """
    sums, _, speeds, held, pairs, pair_at, caps = chunks
    layers, ranks = len(sums) - 1, len(speeds)
    came[:] = 0
    came[0, 0, layers] = 1
    rest = speeds.sum()
    rise = np.inf
    for r in range(ranks):
        rest -= speeds[r]
        left, last = 2 * (ranks - 1 - r), r == ranks - 1
        for x in range(layers + 1):
            for y in range(x + 2 + left, layers + 1):
                if not came[r, x, y]:
                    continue
                for a in range(x + 1, y):
                    first = sums[a] - sums[x]
                    if first / speeds[r] > limit:
                        rise = min(rise, (first + sums[y] - sums[y - 1]) / speeds[r])
                        break
                    size = need(held, pairs, pair_at, r, x, a) if caps.size else 0
                    if caps.size and size > caps[r]:
                        break
                    for b in range(a if last else y - 1, a + left - 1, -1):
                        time = (first + sums[y] - sums[b]) / speeds[r]
                        if time > limit:
                            rise = min(rise, time)
                            break
                        if (
                            caps.size
                            and size + need(held, pairs, pair_at, 2 * ranks - 1 - r, b, y) > caps[r]
                        ):
                            break
                        if flow[0]:
                            time = flow_time(flow, x, a, b, y) / speeds[r]
                        # The layers that are left must go into the ranks that are left.
                        if time > limit:
                            rise = min(rise, time)
                        elif last or sums[b] - sums[a] <= limit * rest * (1 + 1e-12):
                            if came[r + 1, a, b] <= x * (layers + 1):
                                came[r + 1, a, b] = x * (layers + 1) + y + 1
                        else:
                            rise = min(rise, (sums[b] - sums[a]) / rest)
    return rise
