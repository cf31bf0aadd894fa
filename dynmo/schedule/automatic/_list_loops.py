"""The inner loops of `list_schedule`, compiled.

They are plain arithmetic on arrays. `list_schedule` explains the algorithm. An op has a kind, a
stage and a microbatch: tables of ops are [3, stages, microbatches].
"""

# numba has no types of its own, so what it compiles is untyped to pyright.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from dynmo.jit import jit_as

NEVER = 1e300

F, B, W = 0, 1, 2


class Problem(NamedTuple):
    """The case that is scheduled.

    Attributes:
        m: Number of microbatches.
        frozen: Number of stages before the first that trains.
        whole: Whether the makespan counts, and not the span.
        took: Seconds of F, B and W, [3, stages].
        link: Seconds of a message from each stage to the next, [stages].
        hold: Memory that an F takes, [stages]. stash: what is left of it after B, [stages].
        cap: Memory of each rank, [ranks].
        first: Where each rank's stages begin in `held`, [ranks + 1].
        held: The stages of the ranks, in model order, [stages].
        rank_of: The rank of each stage, [stages].
    """

    m: int
    frozen: int
    whole: bool
    took: Any
    link: Any
    hold: Any
    stash: Any
    cap: Any
    first: Any
    held: Any
    rank_of: Any


# The type of a Problem as a plain tuple, which a compiled function recognizes faster.
_PROBLEM = (
    "Tuple((int64, int64, boolean, float64[:, ::1], float64[::1], float64[::1], float64[::1], "
    "float64[::1], int64[::1], int64[::1], int64[::1]))"
)
_TABLE = "float64[:, :, ::1]"


@njit(inline="always")
def _is_safe(own, frozen, hold, stash, limit, stage, count, live):
    """Return whether a rank can be emptied again after an F on `stage`.

    The oldest microbatch goes first. It needs memory for its F's that are still to come, and then
    gives all of its memory back. W's that wait give back theirs at once. `own` are its stages.
    """
    held = live + hold[stage]
    safe = held <= limit
    for s in own:
        held -= stash[s] * (count[B, s] - count[W, s])
    to_come, older = 0.0, 0
    for at in range(len(own) - 1, -1, -1):
        s = own[at]
        if s < frozen or not safe:
            break
        entered = count[F, s] + (s == stage)
        # The microbatches from `older` up to `entered` have had this F, and none of a later stage.
        if entered > older:
            safe = held + to_come <= limit
            for earlier in range(at + 1):
                q = own[earlier]
                if q >= frozen:
                    held -= hold[q] * max(0, entered - max(older, count[B, q]))
            older = entered
        to_come += hold[s]
    return safe


@njit
def _next_rank(wake):
    """Return the rank that can do something first, and when."""
    rank = 0
    for r in range(1, len(wake)):
        if wake[r] < wake[rank]:
            rank = r
    return rank, wake[rank]


@njit
def forwards(problem, keys, fill, ahead, start, order):
    """Run the ops from the first on. A free rank takes the op with the least key.

    Args:
        problem: The case.
        keys: Priority of each op.
        fill: True if a W only fills gaps that hold all of it, and its key does not count.
        ahead: A rank waits for an op of a smaller key that comes within this share of the op that
            it could run.
        start: When each op starts. Is written.
        order: The ops of each rank, kind * stages + stage, [ranks, ops]. Is written.

    Returns:
        The span or makespan. -1 if the memory is not enough.
    """
    problem = Problem(*problem)
    m, frozen, took, link = problem.m, problem.frozen, problem.took, problem.link
    hold, stash, first, held = problem.hold, problem.stash, problem.first, problem.held
    rank_of, cap = problem.rank_of, problem.cap
    n, p = len(link), len(cap)
    count, placed = np.zeros((3, n), np.int64), np.zeros(p, np.int64)
    arrival = np.full((3, n, m), NEVER)
    arrival[F, 0] = 0.0
    began, free, live = np.full(p, -1.0), np.zeros(p), np.zeros(p)
    wake = np.full(p, NEVER)
    wake[rank_of[0]] = 0.0
    left = n * m + 2 * (n - frozen) * m
    while left > 0:
        r, t = _next_rank(wake)
        if t >= NEVER:
            return -1.0
        kind, stage, key = -1, -1, NEVER
        filler, filler_key = -1, NEVER
        soon, soon_key, soonest = NEVER, NEVER, NEVER
        own = held[first[r] : first[r + 1]]
        limit = cap[r] * (1 + 1e-9)
        for s in own:
            j = count[W, s]
            if j < count[B, s] and keys[W, s, j] < filler_key:
                filler, filler_key = s, keys[W, s, j]
            for k in range(2):
                j = count[k, s]
                if j == m or (k == B and s < frozen):
                    continue
                there = arrival[k, s, j]
                if k == F and s < frozen and j >= p and s + 1 < n:
                    # A forward-only stage is at most p microbatches ahead of the next one: see
                    # op.dependencies.
                    gone = count[F, s + 1] > j - p
                    back = start[F, s + 1, j - p] + took[F, s + 1] + link[s] if gone else NEVER
                    there = max(there, back)
                if there > t:
                    soonest = min(soonest, there)
                    if there < NEVER and keys[k, s, j] < soon_key:
                        soon, soon_key = there, keys[k, s, j]
                elif keys[k, s, j] < key and (
                    k == B
                    or hold[s] == 0.0
                    or _is_safe(own, frozen, hold, stash, limit, s, count, live[r])
                ):
                    kind, stage, key = k, s, keys[k, s, j]
        if filler >= 0:
            if fill:
                if kind < 0 and (soonest >= NEVER or soonest - t >= took[W, filler]):
                    kind, stage, key = W, filler, filler_key
            elif filler_key < key:
                kind, stage, key = W, filler, filler_key
        if kind < 0:
            wake[r] = soonest
            continue
        if not fill and soon_key < key and soon - t < ahead * took[kind, stage]:
            wake[r] = soon
            continue
        s, j = stage, count[kind, stage]
        count[kind, s] += 1
        start[kind, s, j] = t
        end = t + took[kind, s]
        order[r, placed[r]] = kind * n + s
        placed[r] += 1
        if began[r] < 0:
            began[r] = t
        free[r] = wake[r] = end
        left -= 1
        other, there = -1, end
        if kind == F:
            live[r] += hold[s]
            if s + 1 < n:
                there = end + link[s]
                arrival[F, s + 1, j] = there
                other = rank_of[s + 1]
            else:
                arrival[B, s, j] = end
            if 0 < s <= frozen:
                before = rank_of[s - 1]
                if before != r:
                    wake[before] = min(wake[before], max(free[before], end + link[s - 1]))
        elif kind == B:
            live[r] -= hold[s] - stash[s]
            if s > frozen:
                there = end + link[s - 1]
                arrival[B, s - 1, j] = there
                other = rank_of[s - 1]
        else:
            live[r] -= stash[s]
        if other >= 0 and other != r:
            wake[other] = min(wake[other], max(free[other], there))
    if problem.whole:
        return free.max() - began.min()
    return (free - began).max()


@njit
def backwards(problem, keys, release, ahead, start):
    """Run the ops from the last on, each as late as it can. The largest key goes first.

    The clock runs backwards: a rank's last op ends at `release`. Memory is not considered.

    Args:
        problem: The case.
        keys: Priority of each op.
        release: When each rank begins, on the clock that runs backwards, [ranks].
        ahead: As in `forwards`.
        start: When each op begins on that clock. Is written.
    """
    problem = Problem(*problem)
    m, frozen, took, link = problem.m, problem.frozen, problem.took, problem.link
    first, held, rank_of = problem.first, problem.held, problem.rank_of
    n, p = len(link), len(problem.cap)
    count = np.zeros((3, n), np.int64)
    ended = np.full((3, n, m), NEVER)
    free, wake = release.copy(), release.copy()
    left = n * m + 2 * (n - frozen) * m
    while left > 0:
        r, t = _next_rank(wake)
        kind, stage, key = -1, -1, -NEVER
        soon, soon_key, soonest = NEVER, -NEVER, NEVER
        for at in range(first[r], first[r + 1]):
            s = held[at]
            for k in range(3):
                j = m - 1 - count[k, s]
                if j < 0 or (k > F and s < frozen):
                    continue
                there = 0.0
                if k == B:
                    there = ended[W, s, j]
                    if s > frozen:
                        there = max(there, ended[B, s - 1, j] + link[s - 1])
                elif k == F:
                    if s >= frozen:
                        there = ended[B, s, j]
                    if s + 1 < n:
                        there = max(there, ended[F, s + 1, j] + link[s])
                    if 0 < s <= frozen and j + p < m:
                        there = max(there, ended[F, s - 1, j + p] + link[s - 1])
                if there <= t:
                    if keys[k, s, j] > key:
                        kind, stage, key = k, s, keys[k, s, j]
                else:
                    soonest = min(soonest, there)
                    if there < NEVER and keys[k, s, j] > soon_key:
                        soon, soon_key = there, keys[k, s, j]
        if kind < 0:
            wake[r] = soonest if soonest < NEVER else NEVER
            continue
        if soon_key > key and soon - t < ahead * took[kind, stage]:
            wake[r] = soon
            continue
        s, j = stage, m - 1 - count[kind, stage]
        count[kind, s] += 1
        start[kind, s, j] = t
        end = t + took[kind, s]
        ended[kind, s, j] = end
        free[r] = wake[r] = end
        left -= 1
        for step in (-1, 1):
            # Rev. F wakes the stage before, B the stage behind. A credit also goes behind.
            if kind == W or (kind == B and step < 0) or (kind == F and step > 0 and s >= frozen):
                continue
            if 0 <= s + step < n:
                other = rank_of[s + step]
                there = end + link[min(s, s + step)]
                if other != r:
                    wake[other] = min(wake[other], max(free[other], there))


@jit_as(
    f"float64({_PROBLEM}, {_TABLE}, float64, int64, float64[::1], float64, int32[:, ::1], "
    "int32[:, ::1])"
)
def improve(problem, keys, goal, rounds, aheads, best, order, trial):
    """Run the ops forwards and backwards in turn. Each run's order is the next one's priority.

    Args:
        problem: The case.
        keys: Priority of each op at first. Is overwritten.
        goal: Stop at a schedule as short as this.
        rounds: How often to run in both directions.
        aheads: The shares for which a rank waits, one after the other.
        best: The time of `order`.
        order: The ops of each rank in the best schedule. Is written if a shorter one is found.
        trial: Work space of the same size.

    Returns:
        The time of `order`.
    """
    problem = Problem(*problem)
    m, n, p = problem.m, len(problem.link), len(problem.cap)
    start, back = np.zeros((3, n, m)), np.zeros((3, n, m))
    ahead = 0.0
    for turn in range(rounds + 1):
        time = forwards(problem, keys, turn == 0, ahead, start, trial)
        if time < 0.0:
            break
        if time < best:
            best = time
            for r in range(p):
                for i in range(order.shape[1]):
                    order[r, i] = trial[r, i]
        if best <= goal or turn == rounds:
            break
        ahead = aheads[turn % len(aheads)]
        release = np.full(p, NEVER)
        for s in range(n):
            r = problem.rank_of[s]
            release[r] = min(release[r], start[F, s, 0])
        latest = 0.0 if problem.whole else release.max()
        for r in range(p):
            release[r] = 0.0 if problem.whole else latest - release[r]
        for k in range(3):
            for s in range(n):
                for j in range(m):
                    keys[k, s, j] = start[k, s, j] + problem.took[k, s]
        backwards(problem, keys, release, ahead, back)
        for k in range(3):
            for s in range(n):
                for j in range(m):
                    keys[k, s, j] = -back[k, s, j] - problem.took[k, s]
    return best
