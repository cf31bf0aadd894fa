"""The inner loops of `vshape`, compiled.

They are plain arithmetic on arrays. `vshape` explains the algorithm. Rank r holds the stages r and
2p - 1 - r, its lower and its upper stage. The codes of a rank's F's and B's are in the order in
which one microbatch meets them.
"""

# numba has no types of its own, so what it compiles is untyped to pyright.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from dynmo.jit import jit, jit_as

NEVER = 1e300

# The codes of ops.
F_LOWER, F_UPPER, B_UPPER, B_LOWER, W_LOWER, W_UPPER = 0, 1, 2, 3, 4, 5


@njit(inline="always")
def _ops_of(rank, stages, m, frozen):
    """Return how many F's and B's the rank has."""
    return 2 * m + (m if rank >= frozen else 0) + (m if stages - 1 - rank >= frozen else 0)


@njit
def _count_ops(rank, ranks, m, frozen, total):
    """Write how many F's and B's of each code the rank has to `total`. Returns their sum."""
    total[F_LOWER] = total[F_UPPER] = m
    total[B_LOWER] = m if rank >= frozen else 0
    total[B_UPPER] = m if 2 * ranks - 1 - rank >= frozen else 0
    return total[F_LOWER] + total[F_UPPER] + total[B_UPPER] + total[B_LOWER]


@jit_as("void(int64, int64, int64[::1], int8[:, ::1])")
def cycles(m, frozen, cycle, order):
    """Write the hand-made ZB-V into `order`.

    The warm-up is 2 (p - r) - 1 F's, r pairs of both F's and p - r pairs of F and B. `cycle`
    follows again and again.
    """
    p = order.shape[0]
    total, done = np.zeros(4, np.int64), np.zeros(4, np.int64)
    for r in range(p):
        done[:] = 0
        length = _count_ops(r, p, m, frozen, total)
        lead, pairs = 2 * (p - r) - 1, r
        step = at = 0
        while at < length:
            # A step is one place of the pattern. It is passed over if its op is not due yet, or has
            # run m times.
            if step < lead:
                k = F_LOWER
            elif step < lead + 2 * pairs:
                k = F_LOWER if (step - lead) % 2 else F_UPPER
            elif step < lead + 2 * p:
                k = B_UPPER if (step - lead) % 2 else F_UPPER
            else:
                k = cycle[(step - lead - 2 * p) % 4]
            step += 1
            if done[k] >= total[k] or (k > 0 and done[k] >= done[k - 1] and total[k - 1] > 0):
                continue
            order[r, at] = k
            done[k] += 1
            at += 1


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


# The type of a Problem as a plain tuple, which a compiled function recognizes faster.
_PROBLEM = "Tuple((int64, int64, boolean" + ", float64[::1]" * 7 + "))"


@jit_as(f"void({_PROBLEM}, float64, float64[::1], float64, int8[:, ::1])")
def block(problem, unit, shape, period, order):
    """Write a repeating block into `order`.

    Microbatch 0 runs at its own pace, every hop at least shape[0..3] units long. Each further
    microbatch runs a period behind.
    """
    problem = Problem(*problem)
    m, frozen, f, b, link = problem.m, problem.frozen, problem.f, problem.b, problem.link
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
    at, done, total = np.zeros(4), np.zeros(4, np.int64), np.zeros(4, np.int64)
    for r in range(p):
        upper = n - 1 - r
        at[F_LOWER], at[F_UPPER] = forward[r], forward[upper]
        at[B_UPPER], at[B_LOWER] = backward[upper], backward[r]
        done[:] = 0
        for i in range(_count_ops(r, p, m, frozen, total)):
            best = -1
            for k in range(4):
                if done[k] < total[k] and (best < 0 or at[k] < at[best] * (1.0 - 1e-12)):
                    best = k
            order[r, i] = best
            done[best] += 1
            at[best] += period


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


@njit(inline="always")
def _rank_of(stage, ranks):
    return stage if stage < ranks else 2 * ranks - 1 - stage


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
        left += 2 * _ops_of(r, n, m, frozen) - 2 * m  # and a W for each B
    return left


@jit()
def _time_taken(whole, began, ended):
    """Return the makespan if `whole`, else the longest time of a rank."""
    best, earliest = 0.0, NEVER
    for r in range(len(began)):
        best = max(best, ended[r] - (0.0 if whole else began[r]))
        earliest = min(earliest, began[r])
    return best - (earliest if whole else 0.0)


@jit()
def play(problem: Any, timetable: Any, order: Any, share: float, patient: int) -> float:
    """Run F's and B's in `order`, and put W's between them.

    A W runs in three cases:

    - An F has no memory without it.
    - A gap holds `share` of it.
    - Its rank is one of the first `patient` ranks and has no F left. The op behind the gap still
      starts by its `latest` time.

    This is one long loop on local names, because Numba counts references for each record that a
    helper takes. With helpers the loop is five times slower.
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
        ops_of_rank = _ops_of(r, n, m, frozen)
        while True:
            waiting_lower = count[r, B_LOWER] - weights[lower]
            waiting_upper = count[r, B_UPPER] - weights[upper]
            idle_w = -1
            if waiting_lower > 0 or waiting_upper > 0:
                idle_w = lower if waiting_lower >= waiting_upper else upper
            t = free[r]
            weight = False
            k, s, j, g, a = -1, 0, 0, 0, 0.0
            at = count[r, 0] + count[r, 1] + count[r, 2] + count[r, 3]
            if at < ops_of_rank:
                k = order[r, at]
                s = upper if F_UPPER <= k <= B_UPPER else lower
                g = 1 if k >= B_UPPER else 0
                j = count[r, k]
                a = arrival[g, s, j]
                if g == 0 and s < frozen and j >= p and s + 1 < n:
                    # A forward-only stage is at most p microbatches ahead of the next one: see
                    # op.dependencies.
                    ahead = _rank_of(s + 1, p)
                    gone = count[ahead, F_LOWER if s + 1 < p else F_UPPER] > j - p
                    a = max(a, start[0, s + 1, j - p] + f[s + 1] + link[s]) if gone else NEVER
                if g == 0 and live[r] + hold[s] > limit:
                    if idle_w < 0:
                        return -1.0
                    weight = True
                elif a >= NEVER:
                    break
                elif a > t and idle_w >= 0:
                    weight = a - t >= share * w[idle_w] or (
                        r < patient and count[r, F_UPPER] >= m and t + w[idle_w] <= latest[g, s, j]
                    )
            elif idle_w >= 0:
                weight = True
            else:
                break
            if weight:
                ops[r, ops_placed[r]] = W_LOWER if idle_w == lower else W_UPPER
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
                        other = _rank_of(s + 1, p)
                    else:
                        arrival[1, s, j] = end
                    if 0 < s <= frozen:
                        before = _rank_of(s - 1, p)
                        if not queued[before] and before != r:
                            stack[top] = before
                            top += 1
                            queued[before] = True
                else:
                    end = t + b[s]
                    live[r] -= hold[s] - stash[s]
                    if s > frozen:
                        arrival[1, s - 1, j] = end + link[s - 1]
                        other = _rank_of(s - 1, p)
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
    return _time_taken(whole, began, free) if left == 0 else -1.0


@jit_as(f"void({_PROBLEM}, int8[:, ::1], float64[::1], float64[:, :, ::1])")
def latest_starts(problem, order, deadline, latest):
    """Compute when each F and B must start at the latest.

    A rank's last F or B must end by its deadline. Ranks keep to `order`, and W's take no time.
    """
    problem = Problem(*problem)
    m, frozen, f, b, link = problem.m, problem.frozen, problem.f, problem.b, problem.link
    p, n = order.shape[0], f.shape[0]
    latest[:] = -NEVER
    count, at, limit = np.full((p, 4), m - 1), np.zeros(p, np.int64), deadline.copy()
    stack, queued, top = np.zeros(p + 1, np.int64), np.ones(p, np.bool_), 0
    for r in range(p):
        stack[top] = r
        top += 1
        at[r] = _ops_of(r, n, m, frozen) - 1
    while top > 0:
        top -= 1
        r = stack[top]
        queued[r] = False
        while at[r] >= 0:
            k = order[r, at[r]]
            s = n - 1 - r if F_UPPER <= k <= B_UPPER else r
            g = 1 if k >= B_UPPER else 0
            j = count[r, k]
            end = limit[r]
            other = -1
            if g == 0:
                after = latest[0, s + 1, j] - link[s] if s + 1 < n else latest[1, s, j]
                if after < -NEVER / 2:
                    break
                end = min(end, after) - f[s]
                if s > 0:
                    other = _rank_of(s - 1, p)
            else:
                if s > frozen:
                    after = latest[1, s - 1, j] - link[s - 1]
                    if after < -NEVER / 2:
                        break
                    end = min(end, after)
                end -= b[s]
                if s + 1 < n:
                    other = _rank_of(s + 1, p)
            latest[g, s, j] = end
            limit[r] = end
            count[r, k] -= 1
            at[r] -= 1
            if other >= 0 and other != r and not queued[other]:
                stack[top] = other
                top += 1
                queued[other] = True
