"""The inner loops of `vshape`, compiled.

They are plain arithmetic on arrays. `vshape` explains the algorithm. Orders are lanes of each rank.
"""

# numba has no types of its own, so what it compiles is untyped to pyright.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import numpy as np
from numba import njit

from dynmo.jit import jit_as
from dynmo.schedule.automatic.case import CASE, NEVER, Case, arrival_of

_TABLE = "float64[:, ::1]"
_ORDER = "int32[:, ::1]"


# -- repeating blocks ------------------------------------------------------------------------------


@njit
def _way(case, r, lanes, left):
    """Write the lanes of the F's and B's that a microbatch meets on rank r, and their ops.

    Returns the number of ops.
    """
    n = len(case.rank_of)
    lanes[0], lanes[1], lanes[2], lanes[3] = r, n - 1 - r, 2 * n - 1 - r, n + r
    for k in range(4):
        left[k] = case.m if k < 2 or lanes[k] - n >= case.frozen else 0
    return left.sum()


@jit_as(f"void({CASE}, int64[::1], {_ORDER})")
def cycles(case, cycle, order):
    """Write the hand-made ZB-V into `order`.

    The warm-up is 2 (p - r) - 1 F's, r pairs of both F's and p - r pairs of F and B. `cycle`
    follows again and again.
    """
    case = Case(*case)
    p = len(case.cap)
    lanes, left = np.zeros(4, np.int64), np.zeros(4, np.int64)
    for r in range(p):
        length = _way(case, r, lanes, left)
        lead = 2 * (p - r) - 1
        step = at = 0
        while at < length:
            # A step is one place of the pattern. It is passed over if its op is not due yet, or has
            # run m times.
            if step < lead:
                k = 0
            elif step < lead + 2 * p:
                k = (0 if step < lead + 2 * r else 2) if (step - lead) % 2 else 1
            else:
                k = cycle[(step - lead - 2 * p) % 4]
            step += 1
            if left[k] > 0 and (k == 0 or left[k] > left[k - 1]):
                order[r, at] = lanes[k]
                left[k] -= 1
                at += 1


@jit_as(f"void({CASE}, float64, float64[::1], float64, {_ORDER})")
def block(case, unit, shape, period, order):
    """Write a repeating block into `order`.

    Microbatch 0 runs at its own pace, every hop at least shape[0..3] units long, with a rest of
    shape[4..6] units at each turn. Each further microbatch runs a period behind.
    """
    case = Case(*case)
    took, delay, n, p = case.took, case.delay, len(case.rank_of), len(case.cap)
    begins = np.zeros(2 * n)
    lane = 0
    for i in range(2 * n - 1 - case.frozen):
        following = i + 1 if i + 1 < n else 3 * n - 2 - i
        hop = took[lane] + delay[following, 0 if i < n else 1]
        if i % p == p - 1:
            hop += shape[4 + i // p] * unit
        else:
            hop = max(hop, shape[i // p] * unit)
        begins[following] = begins[lane] + hop
        lane = following
    if period == 0.0:
        period = 2.0 * begins.max() + 1.0
    lanes, left, at = np.zeros(4, np.int64), np.zeros(4, np.int64), np.zeros(4)
    for r in range(p):
        length = _way(case, r, lanes, left)
        for k in range(4):
            at[k] = begins[lanes[k]]
        for i in range(length):
            best = -1
            for k in range(4):
                if left[k] > 0 and (best < 0 or at[k] < at[best] * (1.0 - 1e-12)):
                    best = k
            order[r, i] = lanes[best]
            left[best] -= 1
            at[best] += period


@jit_as(f"float64({CASE}, {_ORDER}, float64, int64, {_TABLE}, {_TABLE}, int32[::1], {_ORDER})")
def play(case, order, share, patient, latest, end, path, ops):
    """Run F's and B's in `order` and put W's between them.

    A W runs in three cases:

    - An F has no memory without it.
    - A gap holds `share` of it.
    - Its rank is one of the first `patient` ranks and has no F left. The op behind the gap still
      starts by its `latest` time.

    Args:
        case: The case.
        order: The F's and B's of each rank.
        share: See above.
        patient: See above.
        latest: See above.
        end: When each F and B ends. Is written.
        path: The F's and B's, each after those that it waits for, lane * m + j. Is written.
        ops: The order with W's. Is written.

    Returns:
        The span or makespan. -1 if the memory is not enough.
    """
    case = Case(*case)
    m, before, lag, delay, took = case.m, case.before, case.lag, case.delay, case.took
    rank_of, first, held, hold = case.rank_of, case.first, case.held, case.hold
    n, p = len(rank_of), len(case.cap)
    for lane in range(2 * n):
        for j in range(m):
            end[lane, j] = NEVER
    change, told, count = case.change, case.told, np.zeros(3 * n, np.int64)
    total, done, placed = np.zeros(p, np.int64), np.zeros(p, np.int64), np.zeros(p, np.int64)
    for s in range(n):
        total[rank_of[s]] += m if s < case.frozen else 2 * m
    live, free, began = np.zeros(p), np.zeros(p), np.full(p, -1.0)
    arrival = np.full(p, NEVER)  # of each rank's next F or B
    stack, queued, top = np.arange(p)[::-1].copy(), np.ones(p, np.bool_), p
    left, passed = n * m + 2 * (n - case.frozen) * m, 0
    while top > 0:
        top -= 1
        r = stack[top]
        queued[r] = False
        limit = case.cap[r] * (1 + 1e-9)
        lower, upper = held[first[r]], held[first[r + 1] - 1]
        while True:
            idle = 2 * n + lower
            waiting = count[n + lower] - count[idle]
            if count[n + upper] - count[2 * n + upper] > waiting:
                idle = 2 * n + upper
            elif waiting == 0:
                idle = -1
            t, lane = free[r], idle
            if done[r] < total[r]:
                due = order[r, done[r]]
                if arrival[r] >= NEVER:
                    arrival[r] = arrival_of(before, lag, delay, end, due, count[due])
                there = arrival[r]
                if due < n and live[r] + hold[due] > limit:
                    if idle < 0:
                        return -1.0
                elif there >= NEVER:
                    break
                elif (
                    idle < 0
                    or there <= t
                    or not (
                        there - t >= share * took[idle]
                        or (
                            r < patient
                            and count[upper] == m
                            and t + took[idle] <= latest[due, count[due]]
                        )
                    )
                ):
                    lane = due
                    t = max(t, there)
            if lane < 0:
                break
            j = count[lane]
            count[lane] += 1
            live[r] += change[lane]
            if began[r] < 0:
                began[r] = t
            free[r] = t + took[lane]
            ops[r, placed[r]] = lane
            placed[r] += 1
            left -= 1
            if lane >= 2 * n:
                continue
            end[lane, j] = free[r]
            arrival[r] = NEVER
            path[passed] = lane * m + j
            passed += 1
            done[r] += 1
            for k in range(2):
                other = told[lane, k]
                if other >= 0 and not queued[other]:
                    stack[top] = other
                    top += 1
                    queued[other] = True
    if left > 0:
        return -1.0
    return free.max() - began.min() if case.whole else (free - began).max()


@jit_as(f"void({CASE}, {_TABLE}, int32[::1], {_TABLE})")
def latest_starts(case, end, path, latest):
    """Compute when each F and B must start at the latest, if W's take no time.

    No rank may end later than the rank that ends last, after one more W of its first stage.
    """
    case = Case(*case)
    m, n, p, took, rank_of = case.m, len(case.rank_of), len(case.cap), case.took, case.rank_of
    began, ended, tail = np.full(p, NEVER), np.zeros(p), np.zeros(p)
    for at in path:
        lane, j = at // m, at % m
        r = rank_of[lane % n]
        began[r] = min(began[r], end[lane, j] - took[lane])
        ended[r] = end[lane, j]
        tail[r] = took[2 * n + case.held[case.first[r]]]
    earliest = began.min()
    for r in range(p):
        ended[r] += tail[r] - (earliest if case.whole else began[r])
    limit, target = np.zeros(p), ended.max()
    for r in range(p):
        limit[r] = (earliest if case.whole else began[r]) + target - tail[r]
    for lane in range(2 * n):
        for j in range(m):
            latest[lane, j] = NEVER
    for at in path[::-1]:
        lane, j = at // m, at % m
        r = rank_of[lane % n]
        limit[r] = latest[lane, j] = min(limit[r], latest[lane, j]) - took[lane]
        for k in range(2):
            needed, which = case.before[lane, k], j - case.lag[lane, k]
            if needed >= 0 and which >= 0:
                start = latest[lane, j] - case.delay[lane, k]
                latest[needed, which] = min(latest[needed, which], start)


# -- list scheduling -------------------------------------------------------------------------------


@njit(inline="always")
def _is_safe(own, frozen, hold, stash, limit, stage, count, live):
    """Return whether a rank can be emptied again after an F on `stage`.

    The oldest microbatch goes first. It needs memory for its F's that are still to come, and then
    gives all of its memory back. W's that wait give back theirs at once. `own` are its stages.
    """
    n = len(hold)
    held = live + hold[stage]
    safe = held <= limit
    for s in own:
        held -= stash[s] * (count[n + s] - count[2 * n + s])
    to_come, older = 0.0, 0
    for at in range(len(own) - 1, -1, -1):
        s = own[at]
        if s < frozen or not safe:
            break
        entered = count[s] + (s == stage)
        # The microbatches from `older` up to `entered` have had this F, and none of a later stage.
        if entered > older:
            safe = held + to_come <= limit
            for earlier in range(at + 1):
                q = own[earlier]
                if q >= frozen:
                    held -= hold[q] * max(0, entered - max(older, count[n + q]))
            older = entered
        to_come += hold[s]
    return safe


@njit
def _next_rank(wake):
    """Return the rank that can do something first."""
    rank = 0
    for r in range(1, len(wake)):
        if wake[r] < wake[rank]:
            rank = r
    return rank


@njit
def _run(case, forwards, keys, fill, ahead, clock, start, order):
    """Run the ops on one clock. A free rank takes the op with the least key.

    Args:
        case: The case.
        forwards: False lets the time run backwards. Microbatches are then counted from the last,
            and memory is not considered.
        keys: Priority of each op.
        fill: Whether a W only fills gaps that hold all of it.
        ahead: A rank waits for an op of a smaller key that comes within this share of the op that
            it could run.
        clock: When each rank may begin. It is overwritten with when each rank begins and ends.
        start: When each op starts. Is written.
        order: The ops of each rank. Is written.

    Returns:
        The span or makespan. -1 if the memory is not enough.
    """
    m, frozen, took, hold, stash = case.m, case.frozen, case.took, case.hold, case.stash
    rank_of, first, held = case.rank_of, case.first, case.held
    before, lag, delay = case.before, case.lag, case.delay
    after, after_lag = case.after, case.after_lag
    if not forwards:
        before, lag, delay, after, after_lag = after, after_lag, case.after_delay, before, lag
    n, p = len(rank_of), len(case.cap)
    count, end = np.zeros(3 * n, np.int64), np.full((3 * n, m), NEVER)
    arrival = np.full(3 * n, NEVER)  # of each lane's next op
    for lane in range(3 * n):
        if lane < n or lane % n >= frozen:
            arrival[lane] = arrival_of(before, lag, delay, end, lane, 0)
    change, live = case.change, np.zeros(p)
    placed, wake = np.zeros(p, np.int64), clock[0].copy()
    free = clock[1]
    for r in range(p):
        free[r] = wake[r]
        clock[0, r] = -1.0
    left = n * m + 2 * (n - frozen) * m
    while left > 0:
        r = _next_rank(wake)
        t = wake[r]
        if t >= NEVER:
            return -1.0
        own = held[first[r] : first[r + 1]]
        limit = case.cap[r] * (1 + 1e-9)
        lane, key, soon, soon_key, soonest = -1, NEVER, NEVER, NEVER, NEVER
        for s in own:
            for each in range(s, 3 * n, n):
                there = arrival[each]
                if there >= NEVER:
                    continue
                its_key = keys[each, count[each]]
                if there > t:
                    soonest = min(soonest, there)
                    if its_key < soon_key:
                        soon, soon_key = there, its_key
                elif its_key < key and (
                    each >= n
                    or not forwards
                    or hold[s] == 0.0
                    or limit >= NEVER
                    or _is_safe(own, frozen, hold, stash, limit, s, count, live[r])
                ):
                    lane, key = each, its_key
        if lane < 0 or (fill and lane >= 2 * n and soonest - t < took[lane]):
            wake[r] = soonest
            continue
        if soon_key < key and soon - t < ahead * took[lane]:
            wake[r] = soon
            continue
        j = count[lane]
        count[lane] += 1
        left -= 1
        live[r] += change[lane]
        if clock[0, r] < 0:
            clock[0, r] = t
        start[lane, j] = t
        end[lane, j] = free[r] = wake[r] = t + took[lane]
        order[r, placed[r]] = lane
        placed[r] += 1
        arrival[lane] = arrival_of(before, lag, delay, end, lane, j + 1) if j + 1 < m else NEVER
        for k in range(after.shape[1]):
            each = after[lane, k]
            if each >= 0 and count[each] == j + after_lag[lane, k] and count[each] < m:
                arrival[each] = arrival_of(before, lag, delay, end, each, count[each])
                other = rank_of[each % n]
                wake[other] = min(wake[other], max(free[other], arrival[each]))
    if case.whole:
        return free.max() - clock[0].min()
    return (free - clock[0]).max()


@jit_as(f"float64({CASE}, {_TABLE}, float64, int64, float64[::1], float64, {_ORDER}, {_ORDER})")
def improve(case, keys, goal, rounds, aheads, best, order, trial):
    """Run the ops forwards and backwards in turn. Each run's order is the next one's priority.

    Args:
        case: The case.
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
    case = Case(*case)
    m, p = case.m, len(case.cap)
    start, clock = np.zeros(keys.shape), np.zeros((2, p))
    reached = NEVER
    for turn in range(2 * rounds + 1):
        forwards = turn % 2 == 0
        ahead = 0.0 if turn == 0 else aheads[(turn - 1) // 2 % len(aheads)]
        time = _run(case, forwards, keys, turn == 0, ahead, clock, start, trial)
        if time < 0.0:
            break
        if forwards:
            reached = min(reached, time)
        if turn == 2 and reached > 1.05 * best:
            break
        if forwards and time < best:
            best = time
            for r in range(p):
                for i in range(order.shape[1]):
                    order[r, i] = trial[r, i]
            if best <= goal:
                break
        latest = clock[0].max()
        for r in range(p):
            # A rank that begins early ends early, if its own span counts.
            clock[0, r] = latest - clock[0, r] if forwards and not case.whole else 0.0
        for lane in range(keys.shape[0]):
            for j in range(m):
                keys[lane, m - 1 - j] = -(start[lane, j] + case.took[lane])
    return best
