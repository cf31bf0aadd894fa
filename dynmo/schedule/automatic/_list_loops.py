"""List scheduling, compiled: one clock runs all ranks."""

# numba has no types of its own, so what it compiles is untyped to pyright.
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportMissingParameterType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import numpy as np

from dynmo.jit import inlined, inner, jit
from dynmo.schedule.automatic.case import NEVER, Case, Lanes
from dynmo.schedule.graph import Floats, Ints

# The rows of a policy.
WARM, WAIT, PREFER, SAVE = range(4)
# What a policy may prefer.
B_FIRST, F_FIRST, IN_TURN = range(3)


@inlined
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


@inlined
def arrival_of(before: Ints, lag: Ints, delay: Floats, end: Floats, lane: Any, j: Any) -> float:
    """Return when op j of a lane has all that it waits for."""
    at = 0.0
    for k in range(before.shape[1]):
        needed, which = before[lane, k], j - lag[lane, k]
        if needed >= 0 and which >= 0:
            at = max(at, end[needed, which] + delay[lane, k])
    return at


@inner
def length_of(whole: bool, clock: Floats) -> float:
    """Return the makespan (`whole`) or span of ranks that begin at clock[0] and end at clock[1]."""
    earliest, worst = NEVER, 0.0
    for begin in clock[0]:
        earliest = min(earliest, begin)
    for r in range(clock.shape[1]):
        worst = max(worst, clock[1, r] - (earliest if whole else clock[0, r]))
    return worst


@jit()
def run_list(
    case: Case,
    turn: int,
    keys: Floats,
    ahead: float,
    policy: Ints,
    most: float,
    clock: Floats,
    start: Floats,
    order: Lanes,
) -> tuple[float, int]:
    """Run the ops on one clock. A free rank takes the op with the least key, or by its policy.

    Args:
        case: The case.
        turn: In an odd turn the time runs backwards. Microbatches are then counted from the last,
            and memory is not considered. In turn 0 a W only fills gaps that hold all of it.
        keys: Priority of each op. Not used with a policy.
        ahead: A rank waits for an op of a smaller key that comes within this share of the op that
            it could run.
        policy: What `zero_bubble` explains, for each rank with its one stage, or empty.
        most: Stop once a rank must take longer.
        clock: When each rank may begin. It is overwritten with when each rank begins and ends.
        start: When each op starts. Is written without a policy.
        order: The ops of each rank. Is written.

    Returns:
        The span or makespan, and how often the loop looked at a rank. The time is never if the
        memory is not enough, or it passes `most`.
    """
    m, frozen, took, hold, stash = case.m, case.frozen, case.took, case.hold, case.stash
    rank_of, first, held, cap, change = case.rank_of, case.first, case.held, case.cap, case.change
    before, lag, delay = case.before, case.lag, case.delay
    after, after_lag = case.after, case.after_lag
    forwards, by_policy, visited = turn % 2 == 0, len(policy) > 0, 0
    if not forwards:
        before, lag, delay, after, after_lag = after, after_lag, case.after_delay, before, lag
    n, p = len(rank_of), len(cap)
    count, last, placed = np.zeros(3 * n, np.int64), np.zeros(p, np.int64), np.zeros(p, np.int64)
    end, arrival = np.full((3 * n, m), NEVER), np.full(3 * n, NEVER)  # of each lane's next op
    live, work, wake, free, left = np.zeros(p), np.zeros(p), np.zeros(p), clock[1], 0
    for r in range(p):
        wake[r] = free[r] = clock[0, r]
        clock[0, r] = -1.0
    for lane in range(3 * n):
        if lane < n or lane % n >= frozen:
            waits = False
            for k in range(before.shape[1]):
                waits = waits or (before[lane, k] >= 0 and lag[lane, k] <= 0)
            arrival[lane] = NEVER if waits else 0.0
            work[rank_of[lane % n]] += m * took[lane]
            left += m
    while left > 0:
        visited += 1
        r = 0
        for other in range(1, p):
            if wake[other] < wake[r]:
                r = other
        t = wake[r]
        if t >= NEVER:
            return NEVER, visited
        lane, soonest = -1, NEVER
        if by_policy:
            inside, stashed = count[r] - count[n + r], count[n + r] - count[2 * n + r]
            at, forward, backward, blocked = arrival[r], False, False, False
            if at < NEVER and inside < policy[WARM, r]:
                # After this F the rank must still be able to empty itself: W's first, then B and W
                # in turn.
                need = max(live[r] + hold[r], (inside + 1) * hold[r], inside * hold[r] + stash[r])
                if need > cap[r]:
                    blocked = at <= t
                elif at <= t:
                    forward = True
                else:
                    soonest = at
            at = arrival[n + r]
            if at < NEVER:
                if live[r] - hold[r] + stash[r] > cap[r]:
                    blocked = blocked or at <= t
                elif at <= t:
                    backward = True
                else:
                    soonest = min(soonest, at)
            prefer = policy[PREFER, r]
            in_turn = prefer == IN_TURN and last[r] == n + r
            if forward and (not backward or prefer == F_FIRST or in_turn):
                lane = 2 * n + r if stashed >= policy[SAVE, r] else r
            elif backward:
                lane = n + r
            elif stashed > 0:
                gap = 4 * (soonest - t) >= policy[WAIT, r] * took[2 * n + r]
                if blocked or soonest >= NEVER or gap:
                    lane = 2 * n + r
        else:
            own = held[first[r] : first[r + 1]]
            key, soon, soon_key = NEVER, NEVER, NEVER
            for s in own:
                for each in range(s, 3 * n, n):
                    at = arrival[each]
                    if at >= NEVER:
                        continue
                    its_key = keys[each, count[each]]
                    if at > t:
                        soonest = min(soonest, at)
                        if its_key < soon_key:
                            soon, soon_key = at, its_key
                    elif its_key < key and (
                        each >= n
                        or not forwards
                        or hold[s] == 0.0
                        or cap[r] >= NEVER
                        or _is_safe(own, frozen, hold, stash, cap[r], s, count, live[r])
                    ):
                        lane, key = each, its_key
            if turn == 0 and lane >= 2 * n and soonest - t < took[lane]:
                lane = -1
            elif lane >= 0 and soon_key < key and soon - t < ahead * took[lane]:
                lane, soonest = -1, soon
        if lane < 0:
            wake[r] = soonest
            continue
        j = count[lane]
        count[lane] += 1
        left -= 1
        live[r] += change[lane]
        if clock[0, r] < 0.0:
            clock[0, r] = t
        if lane < 2 * n:
            last[r] = lane
        order[r, placed[r]] = lane
        placed[r] += 1
        ended = free[r] = wake[r] = end[lane, j] = t + took[lane]
        work[r] -= took[lane]
        if ended + work[r] - (0.0 if case.whole else clock[0, r]) > most:
            return NEVER, visited
        if not by_policy:
            start[lane, j] = t
        arrival[lane] = NEVER
        for k in range(-1, after.shape[1]):
            each = lane if k < 0 else after[lane, k]
            which = j + (1 if k < 0 else after_lag[lane, k])
            if each >= 0 and count[each] == which and which < m:
                arrival[each] = arrival_of(before, lag, delay, end, each, which)
                other = rank_of[each % n]
                wake[other] = min(wake[other], max(free[other], arrival[each]))
    return length_of(case.whole, clock), visited
