"""The inner loops of `vshape`, compiled.

They are plain arithmetic on arrays. `vshape` explains the algorithm. Orders are lanes of each rank.
"""

from __future__ import annotations

import numpy as np

from dynmo.jit import jit
from dynmo.schedule.automatic._list_loops import arrival_of, length_of
from dynmo.schedule.automatic.case import NEVER, Case, Lanes
from dynmo.schedule.graph import Floats, Ints


@jit()
def cycles(lanes: Ints, left: Ints, cycle: Ints, order: Lanes) -> None:
    """Write the hand-made ZB-V into `order`.

    The warm-up is 2 (p - r) - 1 F's, r pairs of both F's and p - r pairs of F and B. `cycle`
    follows again and again.

    Args:
        lanes: The F's and B's that a microbatch meets on each rank, [ranks, 4].
        left: How often each runs. It is overwritten.
        cycle: The places in `lanes` of the steady state.
        order: The order of each rank. Is written.
    """
    p = len(lanes)
    for r in range(p):
        length = left[r, 0] + left[r, 1] + left[r, 2] + left[r, 3]
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
            if left[r, k] > 0 and (k == 0 or left[r, k] > left[r, k - 1]):
                order[r, at] = lanes[r, k]
                left[r, k] -= 1
                at += 1


@jit()
def block(
    case: Case,
    lanes: Ints,
    left: Ints,
    unit: float,
    shape: Floats,
    period: float,
    order: Lanes,
) -> None:
    """Write a repeating block into `order`.

    Microbatch 0 runs at its own pace, every hop at least shape[0..3] units long, with a rest of
    shape[4..6] units at each turn. Each further microbatch runs a period behind.
    """
    took, delay, n, p = case.took, case.delay, len(case.rank_of), len(lanes)
    begins, at, lane = np.zeros(2 * n), np.zeros(4), 0
    for i in range(2 * n - 1 - case.frozen):
        following = i + 1 if i + 1 < n else 3 * n - 2 - i
        hop = took[lane] + delay[following, i // n]
        if i % p == p - 1:
            hop += shape[4 + i // p] * unit
        else:
            hop = max(hop, shape[i // p] * unit)
        begins[following] = begins[lane] + hop
        lane = following
    if period == 0.0:
        period = 2.0 * begins[lane] + 1.0
    for r in range(p):
        for k in range(4):
            at[k] = begins[lanes[r, k]]
        for i in range(order.shape[1]):
            best = -1
            for k in range(4):
                if left[r, k] > 0 and (best < 0 or at[k] < at[best] * (1.0 - 1e-12)):
                    best = k
            if best < 0:
                break
            order[r, i] = lanes[r, best]
            left[r, best] -= 1
            at[best] += period


@jit()
def play(
    case: Case,
    order: Lanes,
    share: float,
    patient: int,
    latest: Floats,
    end: Floats,
    ops: Lanes,
) -> float:
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
        ops: The order with W's. Is written.

    Returns:
        The span or makespan. Never if the memory is not enough.
    """
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
    live, clock, left, top = np.zeros(p), np.zeros((2, p)), n * m + 2 * (n - case.frozen) * m, p
    arrival, queued = np.full(p, NEVER), np.ones(p, np.bool_)  # of each rank's next F or B
    stack, began, free = np.zeros(p, np.int64), clock[0], clock[1]
    for r in range(p):
        stack[r], began[r] = p - 1 - r, -1.0
    while top > 0:
        top -= 1
        r = stack[top]
        queued[r] = False
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
                if due < n and live[r] + hold[due] > case.cap[r]:
                    if idle < 0:
                        return NEVER
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
            done[r] += 1
            for k in range(2):
                other = told[lane, k]
                if other >= 0 and not queued[other]:
                    stack[top] = other
                    top += 1
                    queued[other] = True
    return length_of(case.whole, clock) if left == 0 else NEVER
