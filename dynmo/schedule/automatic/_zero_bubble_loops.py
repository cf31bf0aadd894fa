"""The inner loops of `zero_bubble`, compiled.

They are plain arithmetic on arrays. `zero_bubble` explains the algorithm. `search` tries policies
of ranks, and `polish` moves single ops.
"""

# numba has no types of its own, so what it compiles is untyped to pyright.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from dynmo.jit import jit_as

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

_FAR = 60  # how many places an op may be moved by
_NEAR = 12  # the same within a block
_GAPS = 3  # how many gaps are tried


class Problem(NamedTuple):
    """The case that is scheduled.

    Attributes:
        m: Number of microbatches.
        d: d[kind, r] is seconds of F, B and W on rank r. d[3, r] is seconds of the link behind it.
        first: First stage that trains.
        credits: How many microbatches a forward-only stage may be ahead of the next.
        lead: Time from which each rank's time counts, [ranks].
        mf: Memory that an F takes, [ranks].
        stash: Memory that is left of it after B, [ranks].
        cap: Memory of each rank, [ranks].
    """

    m: int
    d: Any
    first: int
    credits: int
    lead: Any
    mf: Any
    stash: Any
    cap: Any


# The type of a Problem as a plain tuple.
_PROBLEM = (
    "Tuple((int64, float64[:, ::1], int64, int64, "
    "float64[::1], float64[::1], float64[::1], float64[::1]))"
)


@njit
def _copy(to, of):  # by hand: numba takes long to compile whole-array statements
    for r in range(of.shape[0]):
        for i in range(of.shape[1]):
            to[r, i] = of[r, i]


@njit
def _draw(state):
    """Return the next number of a xorshift generator, always from the same seed."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    return state ^ (state << np.uint64(17))


# -- policies of ranks -----------------------------------------------------------------------------


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
    """Restore a winner tree after a change of wake[rank]. tree[1] is the first to wake."""
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

    It is how many F's arrive while the first one is on its way to the last stage and back, and how
    many F's the memory takes.
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


@jit_as(
    f"Tuple((float64, int64))({_PROBLEM}, boolean, float64, int64, int64[:, ::1], int8[:, ::1])"
)
def search(problem, spans, goal, budget, starts, best_order):
    """Try the policies of `starts`, then changes of the best one, until `goal` is met."""
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


# -- single ops ------------------------------------------------------------------------------------


class _Tabu(NamedTuple):
    """The turn until which an op may not be moved, [kind, rank, microbatch], and work space."""

    barred: Any
    targets: Any


class _Run(NamedTuple):
    """An order of ops, the results of its replay (see `_replay` and `_tails`), and work space."""

    order: Any
    start: Any
    end: Any
    where: Any
    before: Any
    tail: Any
    path: Any
    count: Any
    scratch: Any


@njit
def _replay(problem, run):
    """Replay `run.order`.

    It fills in these arrays of `run`:

    - start[r, i] of op i
    - end[kind, r, j] and where[kind, r, j] of each F and B
    - before[kind, r, i]: how many ops of a kind lie before op i
    - path: all ops, each after those that it needs

    Returns the greatest end - lead, or never if the order goes in a circle.

    This is one long loop on local names, because Numba counts references for each record that a
    helper takes, and nearly all of the search is spent here.
    """
    m, d, first, credits, lead = problem.m, problem.d, problem.first, problem.credits, problem.lead
    order = run.order
    start = run.start
    end = run.end
    where = run.where
    before = run.before
    count = run.count
    path = run.path
    p = d.shape[1]
    nf, nb, nw, queued, stack = count[0], count[1], count[2], count[3], count[4]
    clock = np.zeros(p)
    for r in range(p):
        nf[r] = nb[r] = nw[r] = 0
        queued[r] = 1
        stack[r] = p - 1 - r
    top, done, worst = p, 0, 0.0
    while top > 0:
        top -= 1
        r = stack[top]
        queued[r] = 0
        length = m if r < first else 3 * m
        while True:
            i = nf[r] + nb[r] + nw[r]
            if i == length:
                worst = max(worst, clock[r] - lead[r])
                break
            kind = order[r, i]
            at = clock[r]
            if kind == FORWARD:
                j = nf[r]
                if r > 0:
                    if nf[r - 1] <= j:
                        break
                    at = max(at, end[FORWARD, r - 1, j] + d[3, r - 1])
                if r < first and j >= credits:
                    if nf[r + 1] <= j - credits:
                        break
                    at = max(at, end[FORWARD, r + 1, j - credits] + d[3, r])
            elif kind == BACKWARD:
                j = nb[r]
                if nf[r] <= j:
                    break
                if r + 1 < p:
                    if nb[r + 1] <= j:
                        break
                    at = max(at, end[BACKWARD, r + 1, j] + d[3, r])
            else:
                j = nw[r]
                if nb[r] <= j:
                    break
            start[r, i] = at
            before[0, r, i], before[1, r, i], before[2, r, i] = nf[r], nb[r], nw[r]
            at += d[kind, r]
            clock[r] = at
            path[done] = r * 3 * m + i
            done += 1
            told = -1
            if kind == FORWARD:
                end[FORWARD, r, j], where[FORWARD, r, j] = at, i
                nf[r] += 1
                if r + 1 < p:
                    told = r + 1
                if 0 < r <= first and queued[r - 1] == 0:
                    queued[r - 1] = 1
                    stack[top] = r - 1
                    top += 1
            elif kind == BACKWARD:
                end[BACKWARD, r, j], where[BACKWARD, r, j] = at, i
                nb[r] += 1
                if r > first:
                    told = r - 1
            else:
                nw[r] += 1
            if told >= 0 and queued[told] == 0:
                queued[told] = 1
                stack[top] = told
                top += 1
    return worst if done == path.shape[0] else _NEVER


@njit
def _tails(problem, run):
    """Fill in `run.tail` after a replay.

    tail[r, i] is the longest way from the end of op i of rank r to the end of any rank, less that
    rank's lead.
    """
    m, d, first, credits, lead = problem.m, problem.d, problem.first, problem.credits, problem.lead
    order, where, before, path, tail = run.order, run.where, run.before, run.path, run.tail
    p = d.shape[1]
    for at in range(path.shape[0] - 1, -1, -1):
        r, i = path[at] // (3 * m), path[at] % (3 * m)
        kind = order[r, i]
        rest = -lead[r]
        if i + 1 < (m if r < first else 3 * m):
            rest = tail[r, i + 1] + d[order[r, i + 1], r]
        if kind == FORWARD:
            j = before[0, r, i]
            if r + 1 < p:
                rest = max(
                    rest, d[3, r] + d[FORWARD, r + 1] + tail[r + 1, where[FORWARD, r + 1, j]]
                )
            if 0 < r <= first and j + credits < m:
                rest = max(
                    rest,
                    d[3, r - 1]
                    + d[FORWARD, r - 1]
                    + tail[r - 1, where[FORWARD, r - 1, j + credits]],
                )
        elif kind == BACKWARD and r > first:
            rest = max(
                rest,
                d[3, r - 1]
                + d[BACKWARD, r - 1]
                + tail[r - 1, where[BACKWARD, r - 1, before[1, r, i]]],
            )
        tail[r, i] = rest


@njit(inline="always")
def _guess(problem, run, r, source, target, most):
    """Estimate from below the longest way through the ops that a move affects.

    The move takes op `source` of rank r to place `target`. Returns never if the move is not allowed
    or the estimate passes `most`.
    """
    m = problem.m
    d = problem.d
    first = problem.first
    lead = problem.lead
    mf = problem.mf
    stash = problem.stash
    cap = problem.cap
    order, start, end, where = run.order, run.start, run.end, run.where
    before, tail, scratch = run.before, run.tail, run.scratch
    p = d.shape[1]
    low, high = min(source, target), max(source, target)
    nf, nb, nw = before[0, r, low], before[1, r, low], before[2, r, low]
    clock = 0.0 if low == 0 else start[r, low - 1] + d[order[r, low - 1], r]
    for i in range(low, high + 1):
        kind = order[r, source if i == target else i + 1 if source < target else i - 1]
        at = clock
        outside = -1e300
        if kind == FORWARD:
            if nf >= m:
                return _NEVER
            if r > 0:
                at = max(at, end[FORWARD, r - 1, nf] + d[3, r - 1])
            if r + 1 < p:
                outside = d[3, r] + d[FORWARD, r + 1] + tail[r + 1, where[FORWARD, r + 1, nf]]
            nf += 1
        elif kind == BACKWARD:
            if nb >= nf:
                return _NEVER
            if r + 1 < p:
                at = max(at, end[BACKWARD, r + 1, nb] + d[3, r])
            if r > first:
                outside = d[3, r - 1] + d[BACKWARD, r - 1] + tail[r - 1, where[BACKWARD, r - 1, nb]]
            nb += 1
        else:
            if nw >= nb:
                return _NEVER
            nw += 1
        if (nf - nb) * mf[r] + (nb - nw) * stash[r] > cap[r]:
            return _NEVER
        clock = at + d[kind, r]
        scratch[0, i], scratch[1, i], scratch[2, i] = clock, outside, d[kind, r]
        if clock + outside > most:
            return _NEVER
    rest = -lead[r] if high + 1 == 3 * m else tail[r, high + 1] + d[order[r, high + 1], r]
    worst = -1e300
    for i in range(high, low - 1, -1):
        rest = max(rest, scratch[1, i])
        worst = max(worst, scratch[0, i] + rest)
        rest += scratch[2, i]
    return worst if worst <= most else _NEVER


@njit
def _move(order, r, source, target):
    kind = order[r, source]
    if source < target:
        for i in range(source, target):
            order[r, i] = order[r, i + 1]
    else:
        for i in range(source, target, -1):
            order[r, i] = order[r, i - 1]
    order[r, target] = kind


@njit
def _by_hand(problem, k, hold, order):
    """Write ZB-H1 (k = 1), ZB-H2 (k = 2), or without `hold` 1F1B with B and W apart.

    Returns whether the order fits the caps.
    """
    m, first, mf, stash, cap = problem.m, problem.first, problem.mf, problem.stash, problem.cap
    p = mf.shape[0]
    for r in range(p):
        at = nf = nb = nw = 0
        while nb < m and r >= first:
            kind = BACKWARD
            if nb > nw and (not hold or k * (p - 1 - r) + nb - 1 >= k * (p - 1 - first) + nw):
                kind = WEIGHT
            elif nf < m and nf - nb <= k * (p - 1 - r):
                kind = FORWARD
            nf += kind == FORWARD
            nb += kind == BACKWARD
            nw += kind == WEIGHT
            if (nf - nb) * mf[r] + (nb - nw) * stash[r] > cap[r]:
                return False
            order[r, at] = kind
            at += 1
        while r >= first and at < 3 * m:
            order[r, at] = WEIGHT
            at += 1
    return True


@njit
def _longest_way_end(problem, run, now, slack):
    """Return the rank and the place of the last op of a longest way, or -1, -1."""
    d, lead, n = problem.d, problem.lead, 3 * problem.m
    for r in range(problem.first, d.shape[1]):
        if run.start[r, n - 1] + d[run.order[r, n - 1], r] - lead[r] >= now - slack:
            return r, n - 1
    return -1, -1


@njit(inline="always")
def _block_start(problem, run, r, i, slack, state):
    """Find the first op of the block that ends with op i of rank r.

    A block is ops without a gap between them. Returns the op and the generator's state.
    """
    d, start, end = problem.d, run.start, run.end
    p, low = d.shape[1], i
    while low > 0 and start[r, low - 1] + d[run.order[r, low - 1], r] >= start[r, low] - slack:
        kind = run.order[r, low]
        j = run.before[kind, r, low]
        # If both the rank and a neighbour let it start just now, leave by the neighbour half of
        # the time.
        crosses = (
            kind == FORWARD and r > 0 and end[0, r - 1, j] + d[3, r - 1] >= start[r, low] - slack
        ) or (
            kind == BACKWARD and r + 1 < p and end[1, r + 1, j] + d[3, r] >= start[r, low] - slack
        )
        if crosses:
            state = _draw(state)
            if state & np.uint64(256):
                break
        low -= 1
    return low, state


@njit(inline="always")
def _places(problem, run, r, source, low, high, slack, targets):
    """Write the places where op `source` of the block low..high may go to `targets`.

    Each op may go before the block's first or behind its last (which helps no op in the last
    block), the outer two anywhere. A W may also go into the next gaps before and behind the block.
    Returns the number of places.
    """
    n, d, order, start = 3 * problem.m, problem.d, run.order, run.start
    last = high == n - 1
    count = 0
    if source - low <= _FAR:
        targets[count] = low
        count += 1
    if not last and high - source <= _FAR:
        targets[count] = high
        count += 1
    if source == low and not last:
        for target in range(low + 1, min(high, low + _NEAR)):
            targets[count] = target
            count += 1
    if source == high:
        for target in range(max(low + 1, high - _NEAR), high):
            targets[count] = target
            count += 1
    if order[r, source] == WEIGHT:
        gaps, g = 0, low - 1
        while g > 0 and gaps < _GAPS and source - g <= _FAR:
            if start[r, g] > start[r, g - 1] + d[order[r, g - 1], r] + slack:
                targets[count] = g
                count += 1
                gaps += 1
            g -= 1
        gaps, g = 0, high + 1
        while g < n and gaps < _GAPS and g - source <= _FAR:
            if start[r, g] > start[r, g - 1] + d[order[r, g - 1], r] + slack:
                targets[count] = g - 1
                count += 1
                gaps += 1
            g += 1
    return count


@njit(inline="always")
def _waited_for(problem, run, r, low):
    """Return the rank and the place of a neighbour's op that op `low` waits for, or -1, -1."""
    kind = run.order[r, low]
    j = run.before[kind, r, low]
    if (low == 0 and r == 0) or kind == WEIGHT:
        return -1, -1
    if kind == FORWARD:
        if r == 0 or r - 1 < problem.first:
            return -1, -1
        return r - 1, run.where[FORWARD, r - 1, j]
    if r + 1 == problem.d.shape[1]:
        return -1, -1
    return r + 1, run.where[BACKWARD, r + 1, j]


@njit
def _best_move(problem, run, tabu, best, slack, turn, state, last):
    """Estimate every move of an op on a longest way, and choose the best.

    It goes along the way from `last`, the rank and the place of its last op, to its first. Returns
    the rank of the best move (-1: none is allowed), from and to where, the effort in ops, and the
    generator's state.
    """
    order, before = run.order, run.before
    barred, targets = tabu.barred, tabu.targets
    r, i = last
    chosen, chosen_r, chosen_from, chosen_to = _NEVER, -1, -1, -1
    tries = 0
    while r >= 0:
        high = i
        low, state = _block_start(problem, run, r, i, slack, state)
        for source in range(low, high + 1):
            kind = order[r, source]
            is_barred = barred[kind, r, before[kind, r, source]] > turn
            for at in range(_places(problem, run, r, source, low, high, slack, targets)):
                target = targets[at]
                if target == source or (order[r, target] == kind and abs(target - source) == 1):
                    continue
                tries += abs(target - source) + 1
                guess = _guess(problem, run, r, source, target, chosen)
                if guess < chosen and (not is_barred or guess < best - slack):
                    chosen, chosen_r, chosen_from, chosen_to = guess, r, source, target
        r, i = _waited_for(problem, run, r, low)
    return chosen_r, chosen_from, chosen_to, tries, state


@njit
def _best_by_hand(problem, run, best, best_order):
    """Replay the schedules that are made by hand. Returns the least time and the effort in ops."""
    spent = 0
    for hand in range(3):
        if _by_hand(problem, max(1, hand), hand > 0, run.order):
            spent += run.path.shape[0]
            time = _replay(problem, run)
            if time < best:
                best = time
                _copy(best_order, run.order)
    return best, spent


@njit
def _new_run(problem):
    m, p = problem.m, problem.d.shape[1]
    n = 3 * m
    return _Run(
        np.empty((p, n), np.int8),
        np.empty((p, n)),
        np.empty((2, p, m)),
        np.empty((2, p, m), np.int64),
        np.empty((3, p, n), np.int64),
        np.empty((p, n)),
        np.empty(problem.first * m + (p - problem.first) * n, np.int64),
        np.empty((5, p), np.int64),
        np.empty((3, n)),
    )


@jit_as(f"Tuple((float64, int64))({_PROBLEM}, float64, int64, int8[:, ::1])")
def polish(problem, goal, budget, best_order):
    """Improve an order by a tabu search that moves ops of a longest way on their rank."""
    problem = Problem(*problem)
    run = _new_run(problem)
    total = run.path.shape[0]
    barred = np.zeros((3, problem.d.shape[1], problem.m), np.int64)
    tabu = _Tabu(barred, np.empty(2 * (_NEAR + _GAPS) + 2, np.int64))
    _copy(run.order, best_order)
    best = _replay(problem, run)
    # The result is no worse than the schedules that are made by hand, if those fit.
    best, spent = _best_by_hand(problem, run, best, best_order)
    spent += total
    _copy(run.order, best_order)
    now = _replay(problem, run)
    state = np.uint64(_SEED)
    turn, slack = 0, 1e-9 * now
    while spent < budget and best > goal:
        turn += 1
        _tails(problem, run)
        last = _longest_way_end(problem, run, now, slack)
        if last[0] < 0:
            return best, spent
        r, source, target, tries, state = _best_move(
            problem, run, tabu, best, slack, turn, state, last
        )
        spent += tries // 4
        if r < 0:
            spent += total
            turn += 16  # every move is barred: let time pass
            state = _draw(state)
            continue
        kind = run.order[r, source]
        j = run.before[kind, r, source]
        _move(run.order, r, source, target)
        time = _replay(problem, run)
        spent += total
        state = _draw(state)
        barred[kind, r, j] = turn + 8 + int((state >> np.uint64(20)) % np.uint64(8))
        if time >= _NEVER:
            _move(run.order, r, target, source)
            now = _replay(problem, run)
            spent += total
            continue
        now = time
        if now < best - slack:
            best = now
            _copy(best_order, run.order)
    return best, spent
