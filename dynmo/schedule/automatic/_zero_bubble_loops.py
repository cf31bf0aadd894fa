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
from dynmo.schedule.automatic._op_order_loops import PROBLEM

FORWARD, BACKWARD, WEIGHT = 0, 1, 2

# What a policy may prefer.
B_FIRST, F_FIRST, IN_TURN = 0, 1, 2

# How a start counts the warm-up: as a share of the way, or as ZB-H1 and ZB-H2 do.
SHARE_OF_WAY, BY_HAND = 0, 1

# The rows of a policy.
_WARM, _WAIT, _PREFER, _SAVE = 0, 1, 2, 3

_NEVER = 1e300
UNLIMITED = 1 << 40
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
def _plant(tree, wake):
    """Make a winner tree of all ranks: see `_settle`."""
    p, size = wake.shape[0], tree.shape[0] // 2
    for i in range(size):
        tree[size + i] = i if i < p else -1
    for i in range(size - 1, 0, -1):
        left, right = tree[2 * i], tree[2 * i + 1]
        tree[i] = left if right < 0 or (left >= 0 and wake[left] <= wake[right]) else right


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
def _build(problem, policy, most, order, space):
    """Run all ranks on one clock under `policy`, and write the ops to `order`.

    Returns the greatest (end - lead) of a rank, or never once it must pass `most`. Also returns how
    often it looked at a rank, which is its effort.

    This is one long loop on local names, because Numba counts references for each record that a
    helper takes, and nearly all of the search is spent here.
    """
    m, d, first, credits, lead, mf, stash, cap = problem
    f, b, w, link = d[0], d[1], d[2], d[3]
    arrival, clock, count, tree = space
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
    _plant(tree, wake)
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
            elif held < policy[_WARM, r]:
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
            not backward
            or policy[_PREFER, r] == F_FIRST
            or (policy[_PREFER, r] == IN_TURN and last[r] == BACKWARD)
        ):
            kind = WEIGHT if stashed >= policy[_SAVE, r] else FORWARD
        elif backward:
            kind = BACKWARD
        elif stashed > 0 and (
            blocked or later >= _NEVER or 4 * (later - now) >= policy[_WAIT, r] * w[r]
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


@njit
def _leads(problem, spans):
    """Fill in the problem's `lead` if the span counts."""
    _, d, _, _, lead, _, _, _ = problem
    for r in range(1, d.shape[1]):
        if spans:
            lead[r] = lead[r - 1] + d[FORWARD, r - 1] + d[3, r - 1]


@njit
def _warm_ups(problem):
    """Return what bounds the warm-up of each rank.

    Returns how many F's arrive while the first one is on its way to the last stage and back, and
    how many F's the memory takes.
    """
    m, d, first, _, _, mf, _, cap = problem
    p = d.shape[1]
    way, room = np.zeros(p), np.empty(p, np.int64)
    feed = np.zeros(p)  # the slowest F up to each rank: how fast F's arrive
    trip = 0.0
    for r in range(p):
        feed[r] = d[FORWARD, r] if r == 0 else max(feed[r - 1], d[FORWARD, r])
        room[r] = m
        if r >= first and mf[r] > 0 and cap[r] < m * mf[r]:
            room[r] = max(1, int(cap[r] / mf[r]))
    for r in range(p - 1, -1, -1):
        if r + 1 < p:
            trip = trip + d[FORWARD, r + 1] + d[BACKWARD, r + 1] + 2 * d[3, r]
        way[r] = trip / feed[r] if feed[r] > 0 else 0.0
    return way, room


@njit
def _start(row, microbatches, way, room, policy):
    """Write the policy of a `zero_bubble.Start` for all ranks."""
    p = room.shape[0]
    style, size, more, wait, prefer, save = row[0], row[1], row[2], row[3], row[4], row[5]
    for r in range(p):
        if style == SHARE_OF_WAY:
            warm = int(np.ceil(min(size * way[r] / 100, 1.0 * microbatches))) + more
        else:
            warm = size * (p - 1 - r) + 1
        policy[_WARM, r] = min(max(1, warm), room[r])
        policy[_WAIT, r], policy[_PREFER, r], policy[_SAVE, r] = wait, prefer, save


@njit
def _vary(policy, first, room, state):
    """Change the policy of one to three ranks at random. Returns the generator's state."""
    p = room.shape[0]
    state = _draw(state)
    for _ in range(1 + int(state % np.uint64(3))):
        state = _draw(state)
        r = first + int((state >> np.uint64(8)) % np.uint64(p - first))
        what = int((state >> np.uint64(32)) % np.uint64(16))
        by = int((state >> np.uint64(40)) % np.uint64(4))
        if what < 9:
            policy[_WARM, r] = min(max(1, policy[_WARM, r] + by - 2 + by // 2), room[r])
        elif what < 12:
            policy[_WAIT, r] = by + by // 2
        elif what < 14:
            policy[_PREFER, r] = by % 3
        elif what < 15:
            policy[_SAVE, r] = UNLIMITED if by == 0 else 2 * by
        else:  # the warm-up of the whole pipeline upstream
            for q in range(first, r + 1):
                policy[_WARM, q] = min(max(1, policy[_WARM, q] + (1 if by > 1 else -1)), room[q])
    return state


@jit_as(f"Tuple((float64, int64))({PROBLEM}, boolean, float64, int64, int64[:, ::1], int8[:, ::1])")
def search(problem, spans, goal, budget, starts, best_order):
    """Try the policies of `starts`, then changes of the best one.

    The search ends when `goal` is met or `budget` is spent.
    """
    m, d, first = problem[0], problem[1], problem[2]
    p = d.shape[1]
    _leads(problem, spans)
    way, room = _warm_ups(problem)
    size = 1
    while size < p:
        size *= 2
    space = (
        np.empty((3, p, m)),
        np.empty((2, p)),
        np.empty((5, p), np.int64),
        np.empty(2 * size, np.int64),
    )
    order = np.zeros((p, 3 * m), np.int8)
    policy, best_policy = np.empty((4, p), np.int64), np.empty((4, p), np.int64)
    best, spent = _NEVER, 0
    turn = 0
    state = np.uint64(_SEED)
    while best > goal and (spent < budget or best >= _NEVER):
        if turn < starts.shape[0]:
            _start(starts[turn], m, way, room, policy)
        else:
            _copy(policy, best_policy)
            state = _vary(policy, first, room, state)
        time, visited = _build(problem, policy, best, order, space)
        spent += visited + p
        # The later of equals wins, so that a plateau is crossed. In the table the first wins.
        if time < best or (time == best and turn >= starts.shape[0] and time < _NEVER):
            best = time
            _copy(best_order, order)
            _copy(best_policy, policy)
        turn += 1
    return best, spent
