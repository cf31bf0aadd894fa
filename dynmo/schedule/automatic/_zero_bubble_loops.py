"""The inner loops of `auto`, compiled. Plain arithmetic on arrays; what it means is told in `auto`."""

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
_FAR, _NEAR, _GAPS = 60, 12, 3  # how many places an op may be moved by, within a block, and how many gaps are tried


@njit
def _copy(to, of):  # by hand, as below: numba takes long to compile whole-array statements
    for r in range(of.shape[0]):
        for i in range(of.shape[1]):
            to[r, i] = of[r, i]


@njit
def _draw(state):
    """The next number of a xorshift generator. It always starts at the same seed: every rank must find the same schedule."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    return state ^ (state << np.uint64(17))


@njit
def _settle(tree, wake, rank):
    """Restores a winner tree (tree[1] is the rank that wakes first, the lower one of equals) after a change of wake[rank]."""
    i = (tree.shape[0] // 2 + rank) // 2
    while i > 0:
        left, right = tree[2 * i], tree[2 * i + 1]
        tree[i] = left if right < 0 or (left >= 0 and wake[left] <= wake[right]) else right
        i //= 2


@njit
def _build(m, f, b, w, link, mf, stash, cap, first, credits, lead, policy, most, order, arrival, clock, count, tree):
    """Runs all ranks on one clock under `policy`. Returns the greatest (end - lead) of a rank, or never once it must pass `most`,
    and how often it looked at a rank, which is its effort; the ops are in `order`."""
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
                # After this F the rank must still be able to empty itself: W's first, then B and W in turn.
                if live + mf[r] <= cap[r] and (held + 1) * mf[r] <= cap[r] and held * mf[r] + stash[r] <= cap[r]:
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
        if forward and (not backward or policy[2, r] == 1 or (policy[2, r] == 2 and last[r] == BACKWARD)):
            kind = WEIGHT if stashed >= policy[3, r] else FORWARD
        elif backward:
            kind = BACKWARD
        elif stashed > 0 and (blocked or later >= _NEVER or 4 * (later - now) >= policy[1, r] * w[r]):
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
def _replay(m, d, first, credits, lead, order, start, end, where, before, count, path):
    """Replays `order`: start[r, i] of op i, end[kind, r, j] and where[kind, r, j] of each F and B, before[kind, r, i] = how many of a kind
    lie before op i, path = all ops so that each comes after what it needs. Returns the greatest end - lead, or never for a circle."""
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
def _tails(m, d, first, credits, lead, order, where, before, path, tail):
    """tail[r, i]: the longest way from the end of op i of rank r to the end of any rank, less that rank's lead."""
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
                rest = max(rest, d[3, r] + d[FORWARD, r + 1] + tail[r + 1, where[FORWARD, r + 1, j]])
            if 0 < r <= first and j + credits < m:
                rest = max(rest, d[3, r - 1] + d[FORWARD, r - 1] + tail[r - 1, where[FORWARD, r - 1, j + credits]])
        elif kind == BACKWARD and r > first:
            rest = max(rest, d[3, r - 1] + d[BACKWARD, r - 1] + tail[r - 1, where[BACKWARD, r - 1, before[1, r, i]]])
        tail[r, i] = rest


@njit
def _guess(m, d, first, lead, mf, stash, cap, order, start, end, where, before, tail, r, source, target, most, scratch):
    """A lower estimate of the longest way through the ops that move when op `source` of rank r goes to place `target`, or never where
    that is not allowed or the estimate passes `most`."""
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
def _by_hand(m, k, hold, mf, stash, cap, first, order):
    """Writes ZB-H1 (k = 1), ZB-H2 (k = 2), or without `hold` 1F1B with B and W apart. Returns whether it fits the caps."""
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
def _polish(m, d, mf, stash, cap, first, credits, lead, goal, budget, best_order):
    """A tabu search over the order of single ops: moves ops of a longest way to another place on their rank.

    Returns the least time and the number of ops replayed; `best_order` becomes the best order.
    """
    p, n = d.shape[1], 3 * m
    order = np.empty((p, n), np.int8)
    _copy(order, best_order)
    start, tail, scratch = np.empty((p, n)), np.empty((p, n)), np.empty((3, n))
    end, where, before = np.empty((2, p, m)), np.empty((2, p, m), np.int64), np.empty((3, p, n), np.int64)
    count = np.empty((5, p), np.int64)
    total = first * m + (p - first) * n
    path = np.empty(total, np.int64)
    barred = np.zeros((3, p, m), np.int64)  # until which turn an op may not be moved again
    targets = np.empty(2 * (_NEAR + _GAPS) + 2, np.int64)
    best = _replay(m, d, first, credits, lead, order, start, end, where, before, count, path)
    spent, turn = total, 0
    # No worse than what is made by hand, where that fits.
    for hand in range(3):
        if _by_hand(m, max(1, hand), hand > 0, mf, stash, cap, first, order):
            spent += total
            time = _replay(m, d, first, credits, lead, order, start, end, where, before, count, path)
            if time < best:
                best = time
                _copy(best_order, order)
    _copy(order, best_order)
    now = _replay(m, d, first, credits, lead, order, start, end, where, before, count, path)
    state = np.uint64(_SEED)
    slack = 1e-9 * now
    while spent < budget and best > goal:
        turn += 1
        _tails(m, d, first, credits, lead, order, where, before, path, tail)
        # The longest way, from its last op back to its first.
        r, i = -1, -1
        for q in range(first, p):
            if start[q, n - 1] + d[order[q, n - 1], q] - lead[q] >= now - slack:
                r, i = q, n - 1
                break
        if r < 0:
            return best, spent
        chosen, chosen_r, chosen_from, chosen_to = _NEVER, -1, -1, -1
        tries = 0
        while r >= first:
            # One block: ops low..high of rank r without a gap. Then the way goes on at the op that the first of them waits for.
            high = low = i
            while low > 0 and start[r, low - 1] + d[order[r, low - 1], r] >= start[r, low] - slack:
                kind = order[r, low]
                j = before[kind, r, low]
                # Where both the rank and a neighbour let it start just now, leave by the neighbour half of the time.
                crosses = (kind == FORWARD and r > 0 and end[0, r - 1, j] + d[3, r - 1] >= start[r, low] - slack) or (
                    kind == BACKWARD and r + 1 < p and end[1, r + 1, j] + d[3, r] >= start[r, low] - slack
                )
                if crosses:
                    state = _draw(state)
                    if state & np.uint64(256):
                        break
                low -= 1
            last = high == n - 1
            for source in range(low, high + 1):
                kind = order[r, source]
                tabu = barred[kind, r, before[kind, r, source]] > turn
                # Each op may go before the block's first or behind its last (which helps nobody in the last block), the outer two anywhere.
                candidates = 0
                if source - low <= _FAR:
                    targets[candidates] = low
                    candidates += 1
                if not last and high - source <= _FAR:
                    targets[candidates] = high
                    candidates += 1
                if source == low and not last:
                    for target in range(low + 1, min(high, low + _NEAR)):
                        targets[candidates] = target
                        candidates += 1
                if source == high:
                    for target in range(max(low + 1, high - _NEAR), high):
                        targets[candidates] = target
                        candidates += 1
                if kind == WEIGHT:  # also into the next gaps before and behind the block
                    gaps = 0
                    g = low - 1
                    while g > 0 and gaps < _GAPS and source - g <= _FAR:
                        if start[r, g] > start[r, g - 1] + d[order[r, g - 1], r] + slack:
                            targets[candidates] = g
                            candidates += 1
                            gaps += 1
                        g -= 1
                    gaps = 0
                    g = high + 1
                    while g < n and gaps < _GAPS and g - source <= _FAR:
                        if start[r, g] > start[r, g - 1] + d[order[r, g - 1], r] + slack:
                            targets[candidates] = g - 1
                            candidates += 1
                            gaps += 1
                        g += 1
                for at in range(candidates):
                    target = targets[at]
                    if target == source or (order[r, target] == kind and abs(target - source) == 1):
                        continue
                    tries += abs(target - source) + 1
                    guess = _guess(
                        m, d, first, lead, mf, stash, cap, order, start, end, where, before, tail, r, source, target, chosen, scratch
                    )  # fmt: skip
                    if guess < chosen and (not tabu or guess < best - slack):
                        chosen, chosen_r, chosen_from, chosen_to = guess, r, source, target
            kind = order[r, low]
            j = before[kind, r, low]
            if (low == 0 and r == 0) or kind == WEIGHT:
                break
            if kind == FORWARD:
                if r == 0:
                    break
                r -= 1
                if r < first:
                    break
                i = where[FORWARD, r, j]
            else:
                if r + 1 == p:
                    break
                r += 1
                i = where[BACKWARD, r, j]
        spent += tries // 4
        if chosen_r < 0:
            spent += total
            turn += 16  # every move is barred: let time pass
            state = _draw(state)
            continue
        kind = order[chosen_r, chosen_from]
        j = before[kind, chosen_r, chosen_from]
        _move(order, chosen_r, chosen_from, chosen_to)
        time = _replay(m, d, first, credits, lead, order, start, end, where, before, count, path)
        spent += total
        state = _draw(state)
        barred[kind, chosen_r, j] = turn + 8 + int((state >> np.uint64(20)) % np.uint64(8))
        if time >= _NEVER:
            _move(order, chosen_r, chosen_to, chosen_from)
            now = _replay(m, d, first, credits, lead, order, start, end, where, before, count, path)
            spent += total
            continue
        now = time
        if now < best - slack:
            best = now
            _copy(best_order, order)
    return best, spent


@jit_as(
    "Tuple((float64, int64))(int64, float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1],"
    "int64, int64, boolean, float64, int64, int64, int64[:, ::1], int8[:, ::1])"
)
def search(m, f, b, w, link, mf, stash, cap, first, credits, spans, goal, budget, polish, starts, best_order):
    """Tries the policies of `starts`, then changes of the best one, until `goal` is met or `budget` is spent, and the order of
    single ops within `polish`.

    Returns the least time found and what was spent; the ops are in `best_order`.
    """
    p = f.shape[0]
    lead, trip = np.zeros(p), np.zeros(p)
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
                policy[1, r], policy[2, r], policy[3, r] = starts[turn, 3], starts[turn, 4], starts[turn, 5]
        else:
            for r in range(p):
                for i in range(4):
                    policy[i, r] = best_policy[i, r]
            state = _draw(state)
            for _ in range(1 + int(state % np.uint64(3))):
                state = _draw(state)
                r = first + int((state >> np.uint64(8)) % np.uint64(p - first))
                what, by = int((state >> np.uint64(32)) % np.uint64(16)), int((state >> np.uint64(40)) % np.uint64(4))
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
            m, f, b, w, link, mf, stash, cap, first, credits, lead, policy, best, order, arrival, clock, count, tree
        )  # fmt: skip
        spent += visited + p
        # Of equals the later one, so that a plateau is crossed; but the table's first.
        if time < best or (time == best and turn >= starts.shape[0] and time < _NEVER):
            best = time
            _copy(best_order, order)
            for r in range(p):
                for i in range(4):
                    best_policy[i, r] = policy[i, r]
        turn += 1
    if best > goal and polish > 0:
        d = np.empty((4, p))
        for r in range(p):
            d[0, r], d[1, r], d[2, r], d[3, r] = f[r], b[r], w[r], link[r]
        best, replayed = _polish(m, d, mf, stash, cap, first, credits, lead, goal, polish, best_order)
        spent += replayed
    return best, spent
