"""The inner loops of `vshape`, compiled.

They are plain arithmetic on arrays. `vshape` explains the algorithm. Rank r holds the stages r and
2p - 1 - r. The F's and B's of a rank are numbered in the order in which one microbatch meets them:

    0  F of the lower stage      2  B of the upper stage      4  W of the lower stage
    1  F of the upper stage      3  B of the lower stage      5  W of the upper stage
"""

# numba has no types of its own, so what it compiles is untyped to pyright.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dynmo.jit import jit, jit_as

NEVER = 1e300


@jit_as("void(int64, int64, int64[::1], int8[:, ::1])")
def cycles(m, frozen, cycle, order):
    """Write the hand-made ZB-V into `order`.

    The warm-up is 2 (p - r) - 1 F's, r pairs of both F's and p - r pairs of F and B. `cycle`
    follows again and again.

    Args:
        m: Number of microbatches.
        frozen: Number of stages before the first that trains.
        cycle: Codes of the steady state.
        order: F's and B's of each rank by their codes, [ranks, 4 * microbatches].
    """
    p = order.shape[0]
    most, done = np.zeros(4, np.int64), np.zeros(4, np.int64)
    for r in range(p):
        for k in range(4):
            done[k], most[k] = 0, m
        if r < frozen:
            most[3] = 0
        if 2 * p - 1 - r < frozen:
            most[2] = 0
        at = 0
        lead, pairs = 2 * (p - r) - 1, r
        step, total = 0, most[0] + most[1] + most[2] + most[3]
        while at < total:
            # A step is one place of the pattern. It is passed over if its op is not due yet, or has
            # run m times.
            if step < lead:
                k = 0
            elif step < lead + 2 * pairs:
                k = 1 - (step - lead) % 2
            elif step < lead + 2 * p:
                k = 1 + (step - lead) % 2
            else:
                k = cycle[(step - lead - 2 * p) % 4]
            step += 1
            if done[k] >= most[k] or (k > 0 and done[k] >= done[k - 1] and most[k - 1] > 0):
                continue
            order[r, at] = k
            done[k] += 1
            at += 1


@jit_as(
    "void(int64, int64, float64[::1], float64[::1], float64[::1], float64, float64[::1], float64, "
    "int8[:, ::1])"
)
def block(m, frozen, f, b, link, unit, shape, period, order):
    """Write a repeating block into `order`.

    Microbatch 0 runs at its own pace, every hop at least shape[0..3] units long. Each further
    microbatch runs a period behind.

    Args:
        m: Number of microbatches.
        frozen: Number of stages before the first that trains.
        f: Seconds of F, [stages].
        b: Seconds of B, [stages].
        link: Seconds of a message from each stage to the next, [stages].
        unit: Seconds of a unit of `shape`.
        shape: Least lengths of the four hops, and rests at the three turns.
        period: Seconds between two microbatches. 0 stands for a period in which a microbatch is
            through before the next one starts.
        order: F's and B's of each rank by their codes, [ranks, 4 * microbatches].
    """
    p, n = order.shape[0], f.shape[0]
    forward, backward = np.zeros(n), np.zeros(n)
    for s in range(1, n):
        if s == p:
            forward[s] = forward[s - 1] + f[s - 1] + shape[4] * unit
        else:
            forward[s] = forward[s - 1] + max(
                f[s - 1] + link[s - 1], shape[0 if s < p else 1] * unit
            )
    backward[n - 1] = forward[n - 1] + f[n - 1] + shape[5] * unit
    for s in range(n - 2, frozen - 1, -1):
        if s == p - 1:
            backward[s] = backward[s + 1] + b[s + 1] + shape[6] * unit
        else:
            backward[s] = backward[s + 1] + max(
                b[s + 1] + link[s], shape[2 if s >= p else 3] * unit
            )
    if period == 0.0:
        period = 2.0 * max(backward[frozen], forward[n - 1]) + 1.0
    at, done, most = np.zeros(4), np.zeros(4, np.int64), np.zeros(4, np.int64)
    for r in range(p):
        upper = n - 1 - r
        at[0], at[1], at[2], at[3] = forward[r], forward[upper], backward[upper], backward[r]
        total = 0
        for k in range(4):
            done[k], most[k] = 0, m
        if r < frozen:
            most[3] = 0
        if upper < frozen:
            most[2] = 0
        for k in range(4):
            total += most[k]
        for i in range(total):
            best = -1
            for k in range(4):
                if done[k] < most[k] and (best < 0 or at[k] < at[best] * (1.0 - 1e-12)):
                    best = k
            order[r, i] = best
            done[best] += 1
            at[best] += period


class Problem(NamedTuple):
    """The case that is scheduled.

    Attributes:
        m: Number of microbatches.
        frozen: Number of stages before the first that trains.
        whole: Whether the makespan counts, and not the span.
        f: Seconds of F, [stages]. b, w: likewise.
        link: Seconds of a message from each stage to the next, [stages].
        hold: Memory that an F takes, [stages]. stash: what is left of it after B, [stages].
        cap: Memory of each rank, [ranks].
    """

    m: int
    frozen: int
    whole: bool
    f: Any
    b: Any
    w: Any
    link: Any
    hold: Any
    stash: Any
    cap: Any


class Timetable(NamedTuple):
    """Work space, and the results that `play` leaves there.

    Attributes:
        latest: By when each F and B must start, [2, stages, microbatches].
        arrival: When its inputs are there, likewise. start: when it starts, likewise.
        began: When each rank begins, [ranks]. ended: when its last F or B ends, [ranks].
        ops: The ops of each rank by their codes, [ranks, 6 * microbatches].
    """

    latest: Any
    arrival: Any
    start: Any
    began: Any
    ended: Any
    ops: Any


@jit()
def _order_of_visits(problem, run, stack):
    """Clear the timetable, and put all ranks on the stack, the first on top.

    Returns the number of ops to place.
    """
    m, frozen, n, p = problem.m, problem.frozen, problem.f.shape[0], problem.cap.shape[0]
    run.arrival[:] = NEVER
    for j in range(m):
        run.arrival[0, 0, j] = 0.0
    left = 0
    for at in range(p):
        r = p - 1 - at
        stack[at] = r
        run.began[r], run.ended[r] = -1.0, 0.0
        left += 2 * m + (2 * m if r >= frozen else 0) + (2 * m if n - 1 - r >= frozen else 0)
    return left


@jit()
def play(problem: Any, timetable: Any, order: Any, share: float, patient: int) -> float:
    """Run F's and B's in `order`, and put W's between them.

    A W runs in three cases: an F has no memory without it; a gap holds `share` of it; its rank is
    one of the first `patient` ranks, has no F left, and the op behind the gap still starts by its
    `latest` time.

    Args:
        problem: A `Problem` as a plain tuple, which a compiled function recognizes faster.
        timetable: A `Timetable` as a plain tuple.
        order: F's and B's of each rank by their codes, [ranks, 4 * microbatches].
        share: The share of a W that a gap must hold.
        patient: Number of ranks that put a W into any gap at the end.

    Returns:
        The span, or the makespan if `whole`. -1 if memory forbids the order.
    """
    problem, run = Problem(*problem), Timetable(*timetable)
    m, frozen, whole = problem.m, problem.frozen, problem.whole
    f, b, w, link = problem.f, problem.b, problem.w, problem.link
    hold, stash, cap = problem.hold, problem.stash, problem.cap
    latest, arrival, start = run.latest, run.arrival, run.start
    began, ended, ops = run.began, run.ended, run.ops
    p, n = order.shape[0], f.shape[0]
    count, weights = np.zeros((p, 4), np.int64), np.zeros(n, np.int64)
    live, free, ops_placed = np.zeros(p), np.zeros(p), np.zeros(p, np.int64)
    stack, queued, top = np.zeros(p + 1, np.int64), np.ones(p, np.bool_), p
    left = _order_of_visits(problem, run, stack)
    while top > 0:
        top -= 1
        r = stack[top]
        queued[r] = False
        lower, upper = r, n - 1 - r
        limit = cap[r] * (1 + 1e-9)
        ops_of_rank = 2 * m + (m if lower >= frozen else 0) + (m if upper >= frozen else 0)
        while True:
            waiting_lower, waiting_upper = (
                count[r, 3] - weights[lower],
                count[r, 2] - weights[upper],
            )
            idle_w = -1
            if waiting_lower > 0 or waiting_upper > 0:
                idle_w = lower if waiting_lower >= waiting_upper else upper
            t = free[r]
            weight = False
            k, s, j, g, a = -1, 0, 0, 0, 0.0
            at = count[r, 0] + count[r, 1] + count[r, 2] + count[r, 3]
            if at < ops_of_rank:
                k = order[r, at]
                s = lower if k == 0 or k == 3 else upper
                g = 0 if k < 2 else 1
                j = count[r, k]
                a = arrival[g, s, j]
                if g == 0 and s < frozen and j >= p and s + 1 < n:
                    # A forward-only stage is at most p microbatches ahead of the next one: see
                    # op.dependencies.
                    ahead = s + 1 if s + 1 < p else n - 2 - s
                    gone = count[ahead, 0 if s + 1 < p else 1] > j - p
                    a = max(a, start[0, s + 1, j - p] + f[s + 1] + link[s]) if gone else NEVER
                if g == 0 and live[r] + hold[s] > limit:
                    if idle_w < 0:
                        return -1.0
                    weight = True
                elif a >= NEVER:
                    break
                elif a > t and idle_w >= 0:
                    weight = a - t >= share * w[idle_w] or (
                        r < patient and count[r, 1] >= m and t + w[idle_w] <= latest[g, s, j]
                    )
            elif idle_w >= 0:
                weight = True
            else:
                break
            if weight:
                ops[r, ops_placed[r]] = 4 if idle_w == lower else 5
                weights[idle_w] += 1
                live[r] -= stash[idle_w]
                end = t + w[idle_w]
            else:
                ops[r, ops_placed[r]] = k
                t = max(t, a)
                count[r, k] += 1
                start[g, s, j] = t
                other = -1
                if g == 0:
                    end = t + f[s]
                    live[r] += hold[s]
                    if s + 1 < n:
                        arrival[0, s + 1, j] = end + link[s]
                        other = s + 1 if s + 1 < p else n - 2 - s
                    else:
                        arrival[1, s, j] = end
                    if 0 < s <= frozen:
                        before = s - 1 if s - 1 < p else n - s
                        if not queued[before] and before != r:
                            stack[top] = before
                            top += 1
                            queued[before] = True
                else:
                    end = t + b[s]
                    live[r] -= hold[s] - stash[s]
                    if s > frozen:
                        arrival[1, s - 1, j] = end + link[s - 1]
                        other = s - 1 if s - 1 < p else n - s
                ended[r] = end
                if other >= 0 and other != r and not queued[other]:
                    stack[top] = other
                    top += 1
                    queued[other] = True
            if began[r] < 0:
                began[r] = t
            free[r] = end
            ops_placed[r] += 1
            left -= 1
    if left > 0:
        return -1.0
    best, earliest = 0.0, NEVER
    for r in range(p):
        best = max(best, free[r] - (0.0 if whole else began[r]))
        earliest = min(earliest, began[r])
    return best - (earliest if whole else 0.0)


@jit_as(
    "void(int64, int64, int8[:, ::1], float64[::1], float64[::1], float64[::1], float64[::1], "
    "float64[:, :, ::1])"
)
def latest_starts(m, frozen, order, f, b, link, deadline, latest):
    """Compute when each F and B must start at the latest.

    A rank's last F or B must end by its deadline. Ranks keep to `order`, and W's take no time.

    Args:
        m: Number of microbatches.
        frozen: Number of stages before the first that trains.
        order: F's and B's of each rank by their codes, [ranks, 4 * microbatches].
        f: Seconds of F, [stages].
        b: Seconds of B, [stages].
        link: Seconds of a message from each stage to the next, [stages].
        deadline: Time by which each rank must end, [ranks].
        latest: Receives the start times, [2, stages, microbatches].
    """
    p, n = order.shape[0], f.shape[0]
    latest[:] = -NEVER
    count, at, limit = np.full((p, 4), m - 1), np.zeros(p, np.int64), deadline.copy()
    stack, queued, top = np.zeros(p + 1, np.int64), np.ones(p, np.bool_), 0
    for r in range(p):
        stack[top] = r
        top += 1
        at[r] = 2 * m + (m if r >= frozen else 0) + (m if n - 1 - r >= frozen else 0) - 1
    while top > 0:
        top -= 1
        r = stack[top]
        queued[r] = False
        while at[r] >= 0:
            k = order[r, at[r]]
            s = r if k == 0 or k == 3 else n - 1 - r
            g = 0 if k < 2 else 1
            j = count[r, k]
            end = limit[r]
            other = -1
            if g == 0:
                after = latest[0, s + 1, j] - link[s] if s + 1 < n else latest[1, s, j]
                if after < -NEVER / 2:
                    break
                end = min(end, after) - f[s]
                if s > 0:
                    other = s - 1 if s - 1 < p else n - s
            else:
                if s > frozen:
                    after = latest[1, s - 1, j] - link[s - 1]
                    if after < -NEVER / 2:
                        break
                    end = min(end, after)
                end -= b[s]
                if s + 1 < n:
                    other = s + 1 if s + 1 < p else n - 2 - s
            latest[g, s, j] = end
            limit[r] = end
            count[r, k] -= 1
            at[r] -= 1
            if other >= 0 and other != r and not queued[other]:
                stack[top] = other
                top += 1
                queued[other] = True
