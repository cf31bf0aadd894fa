"""The inner loops of `zero_bubble`, compiled.

They are plain arithmetic on arrays. `zero_bubble` explains the algorithm.
"""

# numba has no types of its own, so what it compiles is untyped to pyright.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import numpy as np
from numba import njit

from dynmo.jit import jit_as

FORWARD, BACKWARD, WEIGHT = 0, 1, 2

_NEVER = 1e300
_UNLIMITED = 1 << 40
_SEED = 88172645463325252


@njit
def _copy(to, of):  # by hand, as below: numba takes long to compile whole-array statements
    for r in range(of.shape[0]):
        for i in range(of.shape[1]):
            to[r, i] = of[r, i]


@njit
def _draw(state):
    """Return the next number of a xorshift generator.

    The generator always starts at the same seed: every rank must find the same schedule.
    """
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    return state ^ (state << np.uint64(17))


@njit
def _settle(tree, wake, rank):
    """Restore a winner tree after a change of wake[rank].

    tree[1] is the rank that wakes first, the lower one of equals.
    """
    i = (tree.shape[0] // 2 + rank) // 2
    while i > 0:
        left, right = tree[2 * i], tree[2 * i + 1]
        tree[i] = left if right < 0 or (left >= 0 and wake[left] <= wake[right]) else right
        i //= 2


@njit
def _build(
    m,
    f,
    b,
    w,
    link,
    mf,
    stash,
    cap,
    first,
    credits,
    lead,
    policy,
    most,
    order,
    arrival,
    clock,
    count,
    tree,
):
    """Run all ranks on one clock under `policy`, and write the ops to `order`.

    Returns the greatest (end - lead) of a rank, or never once it must pass `most`. Also returns how
    often it looked at a rank, which is its effort.
    """
    p = f.shape[0]
    wake, work = clock[0], clock[1]
    nf, nb, nw, idle, last = count[0], count[1], count[2], count[3], count[4]
    for r in range(p):
        nf[r] = nb[r] = nw[r] = last[r] = 0
        idle[r] = 1
        wake[r] = _NEVER
        work[r] = m * (f[r] if r < first else f[r] + b[r] + w[r]) - lead[r]
        for j in range(m):
            arrival[0, r, j] = arrival[1, r, j] = arrival[2, r, j] = _NEVER
    for j in range(m):
        arrival[0, 0, j] = 0.0
    wake[0] = 0.0
    size = tree.shape[0] // 2
    for i in range(size):
        tree[size + i] = i if i < p else -1
    for i in range(size - 1, 0, -1):
        left, right = tree[2 * i], tree[2 * i + 1]
        tree[i] = left if right < 0 or (left >= 0 and wake[left] <= wake[right]) else right
    left_over = p
    visited = 0
    worst = 0.0
    while left_over > 0:
        visited += 1
        r = tree[1]
        now = wake[r]
        if now >= _NEVER:
            return _NEVER, visited
        held, stashed = nf[r] - nb[r], nb[r] - nw[r]
        live = held * mf[r] + stashed * stash[r]
        later = _NEVER
        forward = backward = blocked = False
        if nf[r] < m:
            at = arrival[0, r, nf[r]]
            if r < first:
                if nf[r] >= credits:
                    at = max(at, arrival[2, r, nf[r] - credits])
                if at <= now:
                    forward = True
                else:
                    later = at
            elif held < policy[0, r]:
                # After this F the rank must still be able to empty itself: W's first, then B and W
                # in turn.
                if (
                    live + mf[r] <= cap[r]
                    and (held + 1) * mf[r] <= cap[r]
                    and held * mf[r] + stash[r] <= cap[r]
                ):
                    if at <= now:
                        forward = True
                    else:
                        later = at
                elif at <= now:
                    blocked = True
        if held > 0 and r >= first:
            at = arrival[1, r, nb[r]]
            if live - mf[r] + stash[r] <= cap[r]:
                if at <= now:
                    backward = True
                elif at < later:
                    later = at
            elif at <= now:
                blocked = True
        kind = -1
        if forward and (
            not backward or policy[2, r] == 1 or (policy[2, r] == 2 and last[r] == BACKWARD)
        ):
            kind = WEIGHT if stashed >= policy[3, r] else FORWARD
        elif backward:
            kind = BACKWARD
        elif stashed > 0 and (
            blocked or later >= _NEVER or 4 * (later - now) >= policy[1, r] * w[r]
        ):
            kind = WEIGHT
        if kind < 0:
            wake[r] = later
            idle[r] = 1
            _settle(tree, wake, r)
            continue
        idle[r] = 0
        order[r, nf[r] + nb[r] + nw[r]] = kind
        told, news = -1, 0.0
        if kind == FORWARD:
            end = now + f[r]
            work[r] -= f[r]
            j = nf[r]
            nf[r] = j + 1
            last[r] = FORWARD
            if r + 1 < p:
                told, news = r + 1, end + link[r]
                arrival[0, r + 1, j] = news
            else:
                arrival[1, r, j] = end
            if 0 < r <= first:
                back = end + link[r - 1]
                arrival[2, r - 1, j] = back
                if idle[r - 1] == 1 and back < wake[r - 1]:
                    wake[r - 1] = back
                    _settle(tree, wake, r - 1)
        elif kind == BACKWARD:
            end = now + b[r]
            work[r] -= b[r]
            j = nb[r]
            nb[r] = j + 1
            last[r] = BACKWARD
            if r > first:
                told, news = r - 1, end + link[r - 1]
                arrival[1, r - 1, j] = news
        else:
            end = now + w[r]
            work[r] -= w[r]
            nw[r] += 1
        if told >= 0 and idle[told] == 1 and news < wake[told]:
            wake[told] = news
            _settle(tree, wake, told)
        if end + work[r] > most:
            return _NEVER, visited
        wake[r] = end
        if nw[r] == m or (r < first and nf[r] == m):
            left_over -= 1
            wake[r] = _NEVER
            worst = max(worst, end - lead[r])
        _settle(tree, wake, r)
    return worst, visited


@jit_as(
    "Tuple((float64, int64))(int64, float64[::1], float64[::1], float64[::1], float64[::1], "
    "float64[::1], float64[::1], float64[::1],"
    "int64, int64, boolean, float64, int64, int64[:, ::1], float64[::1], int8[:, ::1])"
)
def search(
    m, f, b, w, link, mf, stash, cap, first, credits, spans, goal, budget, starts, lead, best_order
):
    """Try the policies of `starts`, then changes of the best one.

    The search ends when `goal` is met or `budget` is spent.

    Args:
        m: Number of microbatches.
        f: Seconds of F, [ranks].
        b: Seconds of B, [ranks].
        w: Seconds of W, [ranks].
        link: Seconds of a message from each rank to the next.
        mf: Memory that an F takes, [ranks].
        stash: Memory that is left of it after B, [ranks].
        cap: Memory of each rank, [ranks].
        first: First stage that trains.
        credits: How many microbatches a forward-only stage may be ahead of the next.
        spans: Whether the span counts, and not the makespan.
        goal: The search stops at this time.
        budget: Number of times that the search may look at a rank.
        starts: Policies to start from, one per row.
        lead: Zeros. They become the time from which each rank's time counts, [ranks].
        best_order: Receives the kinds of the ops of each rank.

    Returns:
        The least time and the budget spent.
    """
    p = f.shape[0]
    trip = np.zeros(p)
    feed = np.zeros(p)  # the slowest F up to each rank: how fast F's arrive
    for r in range(p):
        feed[r] = f[r] if r == 0 else max(feed[r - 1], f[r])
        if r > 0 and spans:
            lead[r] = lead[r - 1] + f[r - 1] + link[r - 1]
    for r in range(p - 2, -1, -1):
        trip[r] = trip[r + 1] + f[r + 1] + b[r + 1] + 2 * link[r]
    room = np.empty(p, np.int64)
    for r in range(p):
        room[r] = m
        if r >= first and mf[r] > 0 and cap[r] < m * mf[r]:
            room[r] = max(1, int(cap[r] / mf[r]))
    size = 1
    while size < p:
        size *= 2
    tree = np.empty(2 * size, np.int64)
    arrival, clock, count = np.empty((3, p, m)), np.empty((2, p)), np.empty((5, p), np.int64)
    order = np.zeros((p, 3 * m), np.int8)
    policy, best_policy = np.empty((4, p), np.int64), np.empty((4, p), np.int64)
    best, spent = _NEVER, 0

    turn = 0
    state = np.uint64(_SEED)
    while best > goal and (spent < budget or best >= _NEVER):
        if turn < starts.shape[0]:
            style, size_of, more = starts[turn, 0], starts[turn, 1], starts[turn, 2]
            for r in range(p):
                if style == 0:
                    way = trip[r] / feed[r] if feed[r] > 0 else 0.0
                    warm = int(np.ceil(min(size_of * way / 100, 1.0 * m))) + more
                else:
                    warm = size_of * (p - 1 - r) + 1
                policy[0, r] = min(max(1, warm), room[r])
                policy[1, r], policy[2, r], policy[3, r] = (
                    starts[turn, 3],
                    starts[turn, 4],
                    starts[turn, 5],
                )
        else:
            for r in range(p):
                for i in range(4):
                    policy[i, r] = best_policy[i, r]
            state = _draw(state)
            for _ in range(1 + int(state % np.uint64(3))):
                state = _draw(state)
                r = first + int((state >> np.uint64(8)) % np.uint64(p - first))
                what, by = (
                    int((state >> np.uint64(32)) % np.uint64(16)),
                    int((state >> np.uint64(40)) % np.uint64(4)),
                )
                if what < 9:
                    policy[0, r] = min(max(1, policy[0, r] + by - 2 + by // 2), room[r])
                elif what < 12:
                    policy[1, r] = by + by // 2
                elif what < 14:
                    policy[2, r] = by % 3
                elif what < 15:
                    policy[3, r] = _UNLIMITED if by == 0 else 2 * by
                else:  # the warm-up of the whole pipeline upstream
                    for q in range(first, r + 1):
                        policy[0, q] = min(max(1, policy[0, q] + (1 if by > 1 else -1)), room[q])
        time, visited = _build(
            m, f, b, w, link, mf, stash, cap, first, credits, lead, policy, best,
            order, arrival, clock, count, tree
        )  # fmt: skip
        spent += visited + p
        # The later of equals wins, so that a plateau is crossed. In the table the first wins.
        if time < best or (time == best and turn >= starts.shape[0] and time < _NEVER):
            best = time
            _copy(best_order, order)
            for r in range(p):
                for i in range(4):
                    best_policy[i, r] = policy[i, r]
        turn += 1
    return best, spent
