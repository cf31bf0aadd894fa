"""The inner loops of `zero_bubble`, compiled.

They are plain arithmetic on arrays. `zero_bubble` explains the algorithm. `search` tries policies
of ranks, and `polish` moves single ops. Rank r has stage r, so an order is a row of kinds.
"""

# numba has no types of its own, so what it compiles is untyped to pyright.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from dynmo.jit import jit_as
from dynmo.schedule.automatic.case import CASE, NEVER, Case

FORWARD, BACKWARD, WEIGHT = 0, 1, 2

# What a policy may prefer.
B_FIRST, F_FIRST, IN_TURN = 0, 1, 2

# How a start counts the warm-up: as a share of the way, or as ZB-H1 and ZB-H2 do.
SHARE_OF_WAY, BY_HAND = 0, 1

# The rows of a policy.
_WARM, _WAIT, _PREFER, _SAVE = 0, 1, 2, 3
UNLIMITED = 1 << 40

_SEED = 88172645463325252

_FAR = 60  # how many places an op may be moved by
_NEAR = 12  # the same within a block
_GAPS = 3  # how many gaps are tried


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
def _settle(tree, wake, rank):
    """Restore a winner tree after a change of wake[rank]. tree[1] is the first to wake."""
    i = (tree.shape[0] // 2 + rank) // 2
    while i > 0:
        left, right = tree[2 * i], tree[2 * i + 1]
        tree[i] = left if right < 0 or (left >= 0 and wake[left] <= wake[right]) else right
        i //= 2


@njit
def _build(case, lead, policy, most, order, space):
    """Run all ranks on one clock under `policy`, and write the ops to `order`.

    Returns the greatest (end - lead) of a rank, or never once it must pass `most`. Also returns how
    often it looked at a rank, which is its effort.

    This is one long loop on local names, because Numba counts references for each record that a
    helper takes, and nearly all of the search is spent here.
    """
    m, frozen, took, hold, stash = case.m, case.frozen, case.took, case.hold, case.stash
    before, lag, told, cap = case.before, case.lag, case.told, case.cap
    after, after_lag, after_delay = case.after, case.after_lag, case.after_delay
    arrival, clock, count, last, tree = space
    p = cap.shape[0]
    wake, work, free = clock[0], clock[1], clock[2]
    left_over, visited, worst = p, 0, 0.0
    for lane in range(2 * p):
        for j in range(m):
            for k in range(2):
                waits = before[lane, k] >= 0 and j >= lag[lane, k]
                arrival[lane, j, k] = NEVER if waits else 0.0
    for r in range(p):
        count[r] = count[p + r] = count[2 * p + r] = 0
        last[r], free[r] = -1, 0.0
        wake[r] = arrival[r, 0, 0]
        work[r] = m * took[r] - lead[r]
        if r >= frozen:
            work[r] += m * (took[p + r] + took[2 * p + r])
    for i in range(tree.shape[0]):
        r = i - tree.shape[0] // 2
        tree[i] = r if 0 <= r < p else -1
    for r in range(0, p, 2):
        _settle(tree, wake, r)
    while left_over > 0:
        visited += 1
        r = tree[1]
        now = wake[r]
        if now >= NEVER:
            return NEVER, visited
        held, stashed = count[r] - count[p + r], count[p + r] - count[2 * p + r]
        live = held * hold[r] + stashed * stash[r]
        later, blocked, forward, backward = NEVER, False, False, False
        j = count[r]
        at = max(arrival[r, j, 0], arrival[r, j, 1]) if j < m else NEVER
        if at < NEVER and (r < frozen or held < policy[_WARM, r]):
            # After this F the rank must still be able to empty itself: W's first, then B and W in
            # turn.
            if r < frozen or (
                live + hold[r] <= cap[r]
                and (held + 1) * hold[r] <= cap[r]
                and held * hold[r] + stash[r] <= cap[r]
            ):
                forward = at <= now
                later = NEVER if forward else at
            else:
                blocked = at <= now
        j = count[p + r]
        at = max(arrival[p + r, j, 0], arrival[p + r, j, 1]) if held > 0 and r >= frozen else NEVER
        if at < NEVER:
            if live - hold[r] + stash[r] > cap[r]:
                blocked = blocked or at <= now
            elif at <= now:
                backward = True
            else:
                later = min(later, at)
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
            blocked or later >= NEVER or 4 * (later - now) >= policy[_WAIT, r] * took[2 * p + r]
        ):
            kind = WEIGHT
        if kind < 0:
            wake[r] = later
            _settle(tree, wake, r)
            continue
        lane = kind * p + r
        j = count[lane]
        order[r, count[r] + count[p + r] + count[2 * p + r]] = kind
        count[lane] = j + 1
        ended = now + took[lane]
        work[r] -= took[lane]
        if ended + work[r] > most:
            return NEVER, visited
        wake[r] = free[r] = ended
        if kind < WEIGHT:
            last[r] = kind
            for k in range(3):
                each, which = after[lane, k], j + after_lag[lane, k]
                if 0 <= each < 2 * p and which < m:
                    at = arrival[each, which, k % 2] = ended + after_delay[lane, k]
                    other = told[lane, k] if k < 2 else -1
                    if other >= 0 and max(free[other], at) < wake[other]:
                        wake[other] = max(free[other], at)
                        _settle(tree, wake, other)
        if count[2 * p + r] == m or (r < frozen and count[r] == m):
            left_over -= 1
            wake[r] = NEVER
            worst = max(worst, ended - lead[r])
        _settle(tree, wake, r)
    return worst, visited


@njit
def _warm_ups(case):
    """Return what bounds the warm-up of each rank.

    It is how many F's arrive while the first one is on its way to the last stage and back, and how
    many F's the memory takes.
    """
    m, took, hold, p = case.m, case.took, case.hold, len(case.cap)
    way, room = np.zeros(p), np.full(p, m)
    feed = np.zeros(p)  # the slowest F up to each rank: how fast F's arrive
    for r in range(p):
        feed[r] = max(feed[r - 1] if r else 0.0, took[r])
        if r >= case.frozen and hold[r] > 0 and case.cap[r] < m * hold[r]:
            room[r] = max(1, int(case.cap[r] / hold[r]))
    trip = 0.0
    for r in range(p - 2, -1, -1):
        trip += took[r + 1] + took[p + r + 1] + 2 * case.delay[r + 1, 0]
        way[r] = trip / feed[r] if feed[r] > 0 else 0.0
    return way, room


@njit
def _start(row, microbatches, way, room, policy):
    p = room.shape[0]
    style, size, more = row[0], row[1], row[2]
    for r in range(p):
        warm = size * (p - 1 - r) + 1
        if style == SHARE_OF_WAY:
            warm = int(np.ceil(min(size * way[r] / 100, 1.0 * microbatches))) + more
        policy[_WARM, r] = min(max(1, warm), room[r])
        policy[_WAIT, r], policy[_PREFER, r], policy[_SAVE, r] = row[3], row[4], row[5]


@njit
def _vary(policy, frozen, room, state):
    """Change the policy of one to three ranks at random. Returns the generator's state."""
    p = room.shape[0]
    state = _draw(state)
    for _ in range(1 + int(state % np.uint64(3))):
        state = _draw(state)
        r = frozen + int((state >> np.uint64(8)) % np.uint64(p - frozen))
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
            for q in range(frozen, r + 1):
                policy[_WARM, q] = min(max(1, policy[_WARM, q] + (1 if by > 1 else -1)), room[q])
    return state


@jit_as(
    f"Tuple((float64, int64))({CASE}, float64[::1], float64, int64, int64[:, ::1], int8[:, ::1])"
)
def search(case, lead, goal, budget, starts, best_order):
    """Try the policies of `starts`, then changes of the best one, until `goal` is met."""
    case = Case(*case)
    m, p = case.m, len(case.cap)
    way, room = _warm_ups(case)
    space = (
        np.empty((2 * p, m, 2)),
        np.empty((3, p)),
        np.empty(3 * p, np.int64),
        np.empty(p, np.int64),
        np.empty(2 << int(np.ceil(np.log2(p))), np.int64),
    )
    order = np.zeros((p, 3 * m), np.int8)
    policy, best_policy = np.empty((4, p), np.int64), np.empty((4, p), np.int64)
    best, spent, turn, state = NEVER, 0, 0, np.uint64(_SEED)
    while best > goal and (spent < budget or best >= NEVER):
        if turn < starts.shape[0]:
            _start(starts[turn], m, way, room, policy)
        else:
            _copy(policy, best_policy)
            state = _vary(policy, case.frozen, room, state)
        time, visited = _build(case, lead, policy, best, order, space)
        spent += visited + p
        # The later of equals wins, so that a plateau is crossed. In the table the first wins.
        if time < best or (time == best and turn >= starts.shape[0] and time < NEVER):
            best = time
            _copy(best_order, order)
            _copy(best_policy, policy)
        turn += 1
    return best, spent


# -- single ops ------------------------------------------------------------------------------------


class _Run(NamedTuple):
    """An order of ops, the results of its replay (see `_replay` and `_tails`), and work space."""

    order: Any
    start: Any
    before: Any
    path: Any
    tail: Any
    end: Any
    where: Any
    ready: Any
    out: Any
    count: Any
    stack: Any
    clock: Any
    scratch: Any


@njit
def _new_run(case):
    m, p = case.m, len(case.cap)
    n = 3 * m
    return _Run(
        np.zeros((p, n), np.int8),
        np.empty((p, n)),
        np.empty((p, n, 3), np.int32),
        np.empty((2, case.frozen * m + (p - case.frozen) * n), np.int32),
        np.empty((p, n)),
        np.empty((2 * p, m)),
        np.empty((2 * p, m), np.int32),
        np.full((3 * p, m), -NEVER),
        np.full((3 * p, m), -NEVER),
        np.empty(3 * p, np.int64),
        np.empty((2, p), np.int64),
        np.empty(p),
        np.empty((3, n)),
    )


@njit
def _replay(case, lead, run):
    """Replay `run.order`.

    It fills in these arrays of `run`:

    - start[r, i] of op i, and before[r, i, kind]: how many ops of a kind lie before it
    - end[lane, j] and where[lane, j] of each F and B
    - ready[lane, j]: when it has all that it waits for from other ranks
    - path: rank and place of all ops, each after those that it needs

    Returns the greatest end - lead, or never if the order goes in a circle.

    This is one long loop on local names, because Numba counts references for each record that a
    helper takes, and nearly all of the search is spent here.
    """
    m, took, waits, lag, delay = case.m, case.took, case.before, case.lag, case.delay
    order, start, before, path = run.order, run.start, run.before, run.path
    end, where, ready, count, clock = run.end, run.where, run.ready, run.count, run.clock
    stack, queued, told = run.stack[0], run.stack[1], case.told
    p = clock.shape[0]
    for lane in range(3 * p):
        count[lane] = 0
    for r in range(p):
        clock[r], queued[r], stack[r] = 0.0, 1, p - 1 - r
    top, done, worst = p, 0, 0.0
    while top > 0:
        top -= 1
        r = stack[top]
        queued[r] = 0
        i = count[r] + count[p + r] + count[2 * p + r]
        length = m if r < case.frozen else 3 * m
        while i < length:
            kind = order[r, i]
            lane = kind * p + r
            j = count[lane]
            at, late = -NEVER, False
            for k in range(2):
                needed, which = waits[lane, k], j - lag[lane, k]
                if needed >= 0 and which >= 0:
                    if count[needed] <= which:
                        late = True
                        break
                    if k == 1 or kind == FORWARD:
                        at = max(at, end[needed, which] + delay[lane, k])
            if late:
                break
            start[r, i] = begin = max(at, clock[r])
            before[r, i, 0], before[r, i, 1] = count[r], count[p + r]
            before[r, i, 2] = count[2 * p + r]
            clock[r] = begin + took[lane]
            path[0, done], path[1, done] = r, i
            done += 1
            count[lane] = j + 1
            i += 1
            if kind == WEIGHT:
                continue
            ready[lane, j], end[lane, j], where[lane, j] = at, clock[r], i - 1
            for k in range(2):
                other = told[lane, k]
                if other >= 0 and queued[other] == 0:
                    queued[other] = 1
                    stack[top] = other
                    top += 1
        if i == length:
            worst = max(worst, clock[r] - lead[r])
    return worst if done == path.shape[1] else NEVER


@njit
def _tails(case, lead, run):
    """Fill in `run.tail` and `run.out` after a replay.

    tail[r, i] is the longest way from the end of op i of rank r to the end of any rank, less that
    rank's lead. out[lane, j] is the same for the ways that leave the rank at once.
    """
    m, p, took, out, tail = case.m, len(case.cap), case.took, run.out, run.tail
    order, before, path = run.order, run.before, run.path
    waits, lag, delay = case.before, case.lag, case.delay
    for lane in range(2 * p):
        for j in range(m):
            out[lane, j] = -NEVER
    for at in range(path.shape[1] - 1, -1, -1):
        r, i = path[0, at], path[1, at]
        kind = order[r, i]
        lane, j = kind * p + r, before[r, i, kind]
        rest = -lead[r]
        if i + 1 < (m if r < case.frozen else 3 * m):
            rest = tail[r, i + 1] + took[order[r, i + 1] * p + r]
        tail[r, i] = rest = max(rest, out[lane, j])
        if kind == WEIGHT:
            continue
        for k in range(2):
            needed, which = waits[lane, k], j - lag[lane, k]
            if needed >= 0 and which >= 0 and (k == 1 or kind == FORWARD):
                way = delay[lane, k] + took[lane] + rest
                out[needed, which] = max(out[needed, which], way)


@njit(inline="always")
def _guess(case, lead, run, r, source, target, most):
    """Estimate from below the longest way through the ops that a move affects.

    The move takes op `source` of rank r to place `target`. Returns never if the move is not allowed
    or the estimate passes `most`.
    """
    m, took, p = case.m, case.took, len(case.cap)
    hold, stash, cap = case.hold[r], case.stash[r], case.cap[r]
    # Local names: a loop over attributes counts references in each round.
    order, before, start = run.order, run.before, run.start
    ready, out, tail, scratch = run.ready, run.out, run.tail, run.scratch
    low, high = min(source, target), max(source, target)
    nf, nb, nw = before[r, low, 0], before[r, low, 1], before[r, low, 2]
    clock = 0.0 if low == 0 else start[r, low - 1] + took[order[r, low - 1] * p + r]
    for i in range(low, high + 1):
        kind = order[r, source if i == target else i + 1 if source < target else i - 1]
        lane, j = kind * p + r, nf if kind == FORWARD else nb if kind == BACKWARD else nw
        if j >= (m if kind == FORWARD else nf if kind == BACKWARD else nb):
            return NEVER
        nf += kind == FORWARD
        nb += kind == BACKWARD
        nw += kind == WEIGHT
        if (nf - nb) * hold + (nb - nw) * stash > cap:
            return NEVER
        clock = max(clock, ready[lane, j]) + took[lane]
        scratch[0, i], scratch[1, i], scratch[2, i] = clock, out[lane, j], took[lane]
        if clock + out[lane, j] > most:
            return NEVER
    rest = -lead[r] if high + 1 == 3 * m else tail[r, high + 1] + took[order[r, high + 1] * p + r]
    worst = -NEVER
    for i in range(high, low - 1, -1):
        rest = max(rest, scratch[1, i])
        worst = max(worst, scratch[0, i] + rest)
        rest += scratch[2, i]
    return worst if worst <= most else NEVER


@njit
def _move(order, r, source, target):
    kind = order[r, source]
    step = 1 if source < target else -1
    for i in range(source, target, step):
        order[r, i] = order[r, i + step]
    order[r, target] = kind


@njit
def _by_hand(case, k, hold, order):
    """Write ZB-H1 (k = 1), ZB-H2 (k = 2), or without `hold` 1F1B with B and W apart.

    Returns whether the order fits the caps.
    """
    m, frozen, p = case.m, case.frozen, len(case.cap)
    for r in range(p):
        nf = nb = nw = 0
        for at in range(m if r < frozen else 3 * m):
            kind = BACKWARD
            held_back = hold and k * (p - 1 - r) + nb - 1 < k * (p - 1 - frozen) + nw
            if r < frozen:
                kind = FORWARD
            elif nb == m or (nb > nw and not held_back):
                kind = WEIGHT
            elif nf < m and nf - nb <= k * (p - 1 - r):
                kind = FORWARD
            nf += kind == FORWARD
            nb += kind == BACKWARD
            nw += kind == WEIGHT
            if r >= frozen and (nf - nb) * case.hold[r] + (nb - nw) * case.stash[r] > case.cap[r]:
                return False
            order[r, at] = kind
    return True


@njit(inline="always")
def _block_start(case, run, r, i, slack, state):
    """Find the first op of the block that ends with op i of rank r.

    A block is ops without a gap between them. Returns the op and the generator's state.
    """
    order, start, before, ready = run.order, run.start, run.before, run.ready
    took, p, low = case.took, len(case.cap), i
    while low > 0:
        if start[r, low - 1] + took[order[r, low - 1] * p + r] < start[r, low] - slack:
            break
        kind = order[r, low]
        # If both the rank and a neighbour let it start just now, leave by the neighbour half of
        # the time.
        if ready[kind * p + r, before[r, low, kind]] >= start[r, low] - slack:
            state = _draw(state)
            if state & np.uint64(256):
                break
        low -= 1
    return low, state


@njit(inline="always")
def _places(case, run, r, source, low, high, slack, targets):
    """Write the places where op `source` of the block low..high may go to `targets`.

    Each op may go before the block's first or behind its last (which helps no op in the last
    block), the outer two anywhere. A W may also go into the next gaps before and behind the block.
    Returns the number of places.
    """
    n, p, order, start, took = 3 * case.m, len(case.cap), run.order, run.start, case.took
    last = high == n - 1
    count = 0
    if source - low <= _FAR:
        targets[count] = low
        count += 1
    if not last and high - source <= _FAR:
        targets[count] = high
        count += 1
    first, stop = source, source
    if source == low and not last:
        first, stop = low + 1, min(high, low + _NEAR)
    elif source == high:
        first, stop = max(low + 1, high - _NEAR), high
    for target in range(first, stop):
        targets[count] = target
        count += 1
    if order[r, source] == WEIGHT:
        for step in (-1, 1):
            gaps, g = 0, low - 1 if step < 0 else high + 1
            while 0 < g < n and gaps < _GAPS and abs(g - source) <= _FAR:
                before = start[r, g - 1] + took[order[r, g - 1] * p + r]
                if start[r, g] > before + slack:
                    targets[count] = g if step < 0 else g - 1
                    count += 1
                    gaps += 1
                g += step
    return count


@njit
def _best_move(case, lead, run, tabu, best, slack, turn, state):
    """Estimate every move of an op on a longest way, and choose the best.

    It goes along the way from its last op to its first. `tabu` is the turn until which an op may
    not be moved, [lane, microbatch]. Returns the rank of the best move (-1: none is allowed), from
    and to where, the effort in ops, and the generator's state.
    """
    order, before, p, n = run.order, run.before, len(case.cap), 3 * case.m
    targets = np.empty(2 * (_NEAR + _GAPS) + 2, np.int64)
    chosen, chosen_r, chosen_from, chosen_to = NEVER, -1, -1, -1
    tries, r, i = 0, case.frozen, n - 1
    while r < p - 1 and run.clock[r] - lead[r] < best[1] - slack:
        r += 1
    while r >= 0:
        high = i
        low, state = _block_start(case, run, r, i, slack, state)
        for source in range(low, high + 1):
            kind = order[r, source]
            is_barred = tabu[kind * p + r, before[r, source, kind]] > turn
            for at in range(_places(case, run, r, source, low, high, slack, targets)):
                target = targets[at]
                if target == source or (order[r, target] == kind and abs(target - source) == 1):
                    continue
                tries += abs(target - source) + 1
                guess = _guess(case, lead, run, r, source, target, chosen)
                if guess < chosen and (not is_barred or guess < best[0] - slack):
                    chosen, chosen_r, chosen_from, chosen_to = guess, r, source, target
        # On to the neighbour's op that the block's first waits for.
        kind = order[r, low]
        needed = case.before[kind * p + r, kind] if kind < WEIGHT else -1
        r, j = needed % p if needed >= 0 else -1, before[r, low, kind]
        i = run.where[needed, j] if r >= case.frozen else -1
        r = r if r >= case.frozen else -1
    return chosen_r, chosen_from, chosen_to, tries, state


@jit_as(f"Tuple((float64, int64))({CASE}, float64[::1], float64, int64, int8[:, ::1])")
def polish(case, lead, goal, budget, best_order):
    """Improve an order by a tabu search that moves ops of a longest way on their rank.

    The result is no worse than the schedules that are made by hand, if those fit.
    """
    case = Case(*case)
    run, tabu = _new_run(case), np.zeros((3 * len(case.cap), case.m), np.int64)
    total = run.path.shape[1]
    _copy(run.order, best_order)
    best, spent = _replay(case, lead, run), total
    for hand in range(3):
        if _by_hand(case, max(1, hand), hand > 0, run.order):
            spent += total
            time = _replay(case, lead, run)
            if time < best:
                best = time
                _copy(best_order, run.order)
    _copy(run.order, best_order)
    now = _replay(case, lead, run)
    state, turn, slack = np.uint64(_SEED), 0, 1e-9 * now
    while spent < budget and best > goal:
        turn += 1
        _tails(case, lead, run)
        r, source, target, tries, state = _best_move(
            case, lead, run, tabu, (best, now), slack, turn, state
        )
        spent += tries // 4 + total
        state = _draw(state)
        if r < 0:
            turn += 16  # every move is barred: let time pass
            continue
        kind = run.order[r, source]
        j = run.before[r, source, kind]
        _move(run.order, r, source, target)
        time = _replay(case, lead, run)
        tabu[kind * len(case.cap) + r, j] = turn + 8 + int((state >> np.uint64(20)) % np.uint64(8))
        if time >= NEVER:
            _move(run.order, r, target, source)
            time = _replay(case, lead, run)
            spent += total
        now = time
        if now < best - slack:
            best = now
            _copy(best_order, run.order)
    return best, spent
