"""The inner loops of `zero_bubble`, compiled.

They are plain arithmetic on arrays. `zero_bubble` explains the algorithm. `search` tries policies
of ranks, and `polish` moves single ops. Rank r has stage r, so lane r is its F, p + r its B and
2 p + r its W.
"""

# numba has no types of its own, so what it compiles is untyped to pyright.
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportMissingParameterType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dynmo.jit import inlined, inner, jit
from dynmo.schedule.automatic._list_loops import PREFER, SAVE, WAIT, WARM, run_list
from dynmo.schedule.automatic.case import NEVER, Case, Lanes
from dynmo.schedule.graph import Floats, Ints, in_order, run_back, run_clocks

UNLIMITED = 1 << 40

_SEED = 88172645463325252

_FAR = 60  # how many places an op may be moved by
_NEAR = 12  # the same within a block
_GAPS = 3  # how many gaps are tried


@inner
def _copy(to, of):  # by hand: `to[:] = of` also compiles the text of an error, for two seconds
    for i in range(len(of)):
        to[i] = of[i]


@inner
def _draw(state):
    """Return the next number of a xorshift generator, always from the same seed."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    return state ^ (state << np.uint64(17))


# -- policies of ranks -----------------------------------------------------------------------------


@inner
def _vary(policy, frozen, room, state):
    """Change the policy of one to three ranks at random. Returns the generator's state."""
    p = len(room)
    state = _draw(state)
    for _ in range(1 + int(state % np.uint64(3))):
        state = _draw(state)
        r = frozen + int((state >> np.uint64(8)) % np.uint64(p - frozen))
        what = int((state >> np.uint64(32)) % np.uint64(16))
        by = int((state >> np.uint64(40)) % np.uint64(4))
        if what < 9:
            policy[WARM, r] = min(max(1, policy[WARM, r] + by - 2 + by // 2), room[r])
        elif what < 12:
            policy[WAIT, r] = by + by // 2
        elif what < 14:
            policy[PREFER, r] = by % 3
        elif what < 15:
            policy[SAVE, r] = UNLIMITED if by == 0 else 2 * by
        else:  # the warm-up of the whole pipeline upstream
            for q in range(frozen, r + 1):
                policy[WARM, q] = min(max(1, policy[WARM, q] + (1 if by > 1 else -1)), room[q])
    return state


@jit()
def search(
    case: Case, goal: float, budget: int, starts: Ints, room: Ints
) -> tuple[float, int, Lanes]:
    """Try the policies of `starts`, then changes of the best one, until `goal` is met.

    `room` is the greatest warm-up that each rank's memory takes. Returns the time of the best
    order, the effort and the order.
    """
    keys, start, clock = np.zeros((0, 0)), np.zeros((0, 0)), np.zeros((2, len(room)))
    shape, chosen = (len(room), 3 * case.m), starts[0]
    order, trial = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    best, spent, turn, state = NEVER, 0, 0, np.uint64(_SEED)
    while best > goal and (spent < budget or best >= NEVER):
        varied = turn >= len(starts)
        policy = (chosen if varied else starts[turn]).copy()
        if varied:
            state = _vary(policy, case.frozen, room, state)
        for r in range(len(room)):
            clock[0, r] = 0.0
        # `2 * turn`, as numba would compile the loop anew for the literal that `turn` begins with.
        time, visited = run_list(case, 2 * turn, keys, 0.0, policy, best, clock, start, trial)
        spent += visited
        # The later of equals wins, so that a plateau is crossed. In the table the first wins.
        if time < best or (time == best and varied and time < NEVER):
            best, chosen, order, trial = time, policy, trial, order
        turn += 1
    return best, spent, order


# -- single ops ------------------------------------------------------------------------------------


class _Run(NamedTuple):
    """Ops rank by rank, their replay, and work space.

    Attributes:
        first: Where the ops of each rank begin.
        lanes: Lane of each op. `numbers`: its microbatch.
        before: How many ops of a kind lie before it on its rank.
        row: Its row among `rows`, which are those of an `Order`, with `row_of` and `at`.
        start: When each row's op starts. `end`: when it ends.
        ready: When it has all that it waits for from other ranks.
        tail: The longest way from its end to the end of a rank, less that rank's lead.
        out: The same for the ways that leave the rank at once.
    """

    first: Any
    lanes: Any
    numbers: Any
    before: Any
    row: Any
    rows: Any
    row_of: Any
    at: Any
    start: Any
    end: Any
    ready: Any
    tail: Any
    out: Any
    scratch: Any


@inner
def _replay(case, ways, lead, run, changed):
    """Replay the order, after a change of one rank, or of all (p).

    Returns the greatest end - lead, or never if it goes in a circle.
    """
    p, total, worst = len(lead), len(run.lanes), 0.0
    count = np.zeros(3 * p, np.int64)
    for r in range(changed % p, min(changed + 1, p)):
        for q in range(run.first[r], run.first[r + 1]):
            for k in range(3):
                run.before[q, k] = count[k * p + r]
            lane = run.lanes[q]
            run.numbers[q] = count[lane]
            count[lane] += 1
    rows, end = run.rows, run.end
    args = run.lanes, run.numbers, run.first, case.before, case.lag
    if in_order(*args, run.row_of, rows, run.at) < total:
        return NEVER
    run_clocks(rows, ways, case.took, run.start, end)
    for i in range(total):
        run.row[run.at[i]] = i
    for r in range(p):
        worst = max(worst, end[run.row[run.first[r + 1] - 1]] - lead[r])
    return worst


@inner
def _look(case, lead, run):
    """Fill in `ready`, `tail` and `out` after a replay."""
    rows, end, delay, ready = run.rows, run.end, case.delay, run.ready
    rest = np.empty(len(lead))
    for r in range(len(lead)):
        rest[r] = -lead[r]
    run_back(rows, delay, case.took, rest, run.tail, run.out)
    for i in range(len(rows)):
        ready[i] = -NEVER
        for k in range(2):
            needed = rows[i, 3 + k]
            if needed >= 0 and rows[needed, 0] != rows[i, 0]:
                ready[i] = max(ready[i], end[needed] + delay[rows[i, 1], k])


@inlined
def _guess(case, lead, run, source, target, most):
    """Estimate from below the longest way through the ops that a move affects.

    The move takes op `source` to place `target`. Returns never if the move is not allowed or the
    estimate passes `most`.
    """
    m, took, p = case.m, case.took, len(lead)
    # Local names: a loop over attributes counts references in each round.
    lanes, row_of, ready, out, scratch = run.lanes, run.row_of, run.ready, run.out, run.scratch
    low, high = min(source, target), max(source, target)
    r = lanes[source] % p
    hold, stash, cap = case.hold[r], case.stash[r], case.cap[r]
    nf, nb, nw = run.before[low, 0], run.before[low, 1], run.before[low, 2]
    clock = 0.0 if low == run.first[r] else run.end[run.row[low - 1]]
    for q in range(low, high + 1):
        lane = lanes[source if q == target else q + 1 if source < target else q - 1]
        forward, weight = lane < p, lane >= 2 * p
        j = nf if forward else nw if weight else nb
        if j >= (m if forward else nb if weight else nf):
            return NEVER
        nf += forward
        nw += weight
        nb += not (forward or weight)
        if (nf - nb) * hold + (nb - nw) * stash > cap:
            return NEVER
        row = row_of[lane, j]
        clock = max(clock, ready[row]) + took[lane]
        if clock + out[row] > most:
            return NEVER
        i = q - low
        scratch[0, i], scratch[1, i], scratch[2, i] = clock, out[row], took[lane]
    rest, worst = -lead[r], -NEVER
    if high + 1 < run.first[r + 1]:
        rest = run.tail[run.row[high + 1]] + took[lanes[high + 1]]
    for i in range(high - low, -1, -1):
        rest = max(rest, scratch[1, i])
        worst = max(worst, scratch[0, i] + rest)
        rest += scratch[2, i]
    return worst if worst <= most else NEVER


@inner
def _move(lanes, source, target):
    lane, step = lanes[source], 1 if source < target else -1
    for q in range(source, target, step):
        lanes[q] = lanes[q + step]
    lanes[target] = lane


@inlined
def _places(case, run, source, low, high, slack, targets):
    """Write the places where op `source` of the block low..high may go to `targets`.

    Each op may go before the block's first or behind its last (which helps no op in the last
    block), the outer two anywhere. A W may also go into the next gaps before and behind the block.
    Returns the number of places.
    """
    p, row, start, end = len(case.cap), run.row, run.start, run.end
    lane, count = run.lanes[source], 0
    begin, stop = run.first[lane % p], run.first[lane % p + 1]
    last = high == stop - 1
    if source - low <= _FAR:
        targets[count] = low
        count += 1
    if not last and high - source <= _FAR:
        targets[count] = high
        count += 1
    near, far = source, source
    if source == low and not last:
        near, far = low + 1, min(high, low + _NEAR)
    elif source == high:
        near, far = max(low + 1, high - _NEAR), high
    for target in range(near, far):
        targets[count] = target
        count += 1
    if lane >= 2 * p:
        for step in (-1, 1):
            gaps, q = 0, low - 1 if step < 0 else high + 1
            while begin < q < stop and gaps < _GAPS and abs(q - source) <= _FAR:
                if start[row[q]] > end[row[q - 1]] + slack:
                    targets[count] = q if step < 0 else q - 1
                    count += 1
                    gaps += 1
                q += step
    return count


@inner
def _best_move(case, lead, run, tabu, best, slack, turn, state):
    """Estimate every move of an op on a longest way, and choose the best.

    It goes along the way from its last op to its first. `tabu` is the turn until which an op may
    not be moved, [lane, microbatch]. Returns from and to where (-1: none is allowed), the effort in
    ops, and the generator's state.
    """
    lanes, numbers, row, start, end = run.lanes, run.numbers, run.row, run.start, run.end
    p, first, rows = len(lead), run.first, run.rows
    targets = np.empty(2 * (_NEAR + _GAPS) + 2, np.int64)
    chosen, chosen_from, chosen_to, tries, r = NEVER, -1, -1, 0, case.frozen
    while r < p - 1 and end[row[first[r + 1] - 1]] - lead[r] < best[1] - slack:
        r += 1
    high = first[r + 1] - 1
    while r >= case.frozen:
        # A block is ops without a gap between them.
        low = high
        while low > first[r] and end[row[low - 1]] >= start[row[low]] - slack:
            # If both the rank and a neighbour let it start just now, leave by the neighbour half of
            # the time.
            if run.ready[row[low]] >= start[row[low]] - slack:
                state = _draw(state)
                if state & np.uint64(256):
                    break
            low -= 1
        for source in range(low, high + 1):
            lane = lanes[source]
            is_barred = tabu[lane, numbers[source]] > turn
            for at in range(_places(case, run, source, low, high, slack, targets)):
                target = targets[at]
                if target == source or (lanes[target] == lane and abs(target - source) == 1):
                    continue
                tries += abs(target - source) + 1
                guess = _guess(case, lead, run, source, target, chosen)
                if guess < chosen and (not is_barred or guess < best[0] - slack):
                    chosen, chosen_from, chosen_to = guess, source, target
        # On to the neighbour's op that the block's first waits for.
        i, r = row[low], -1
        for k in range(2):
            needed = rows[i, 3 + k]
            if needed >= 0 and rows[needed, 0] != rows[i, 0]:
                r, high = rows[needed, 0], run.at[needed]
    return chosen_from, chosen_to, tries, state


@jit()
def polish(
    case: Case,
    ways: Floats,
    lead: Floats,
    goal: float,
    budget: int,
    first: Ints,
    orders: Ints,
) -> tuple[float, int]:
    """Improve the best order by a tabu search that moves ops of a longest way on their rank.

    The result is written into orders[0]. Returns its time and the effort.
    """
    lanes = orders[0]
    total, p, m = len(lanes), len(lead), case.m
    numbers = np.empty((3, total), np.int64)
    times = np.empty((5, total))
    run = _Run(
        first,
        lanes.copy(),
        numbers[0],
        np.empty((total, 3), np.int64),
        numbers[1],
        np.empty((total, 5), np.int64),
        np.empty((4 * p, m), np.int64),
        numbers[2],
        times[0],
        times[1],
        times[2],
        times[3],
        times[4],
        np.empty((3, _FAR + 1 + 3 * m)),
    )
    tabu, best, spent = np.zeros((3 * p, m), np.int64), NEVER, 0
    for each in range(len(orders)):
        _copy(run.lanes, orders[each])
        spent += total
        time = _replay(case, ways, lead, run, p)
        if time < best:
            best = time
            _copy(lanes, run.lanes)
    _copy(run.lanes, lanes)
    now = _replay(case, ways, lead, run, p)
    state, turn, slack = np.uint64(_SEED), 0, 1e-9 * now
    while spent < budget and best > goal:
        turn += 1
        _look(case, lead, run)
        source, target, tries, state = _best_move(
            case, lead, run, tabu, (best, now), slack, turn, state
        )
        spent += tries // 4 + total
        state = _draw(state)
        if source < 0:
            turn += 16  # every move is barred: let time pass
            continue
        lane, j = run.lanes[source], run.numbers[source]
        r = lane % p
        _move(run.lanes, source, target)
        now = _replay(case, ways, lead, run, r)
        tabu[lane, j] = turn + 8 + int((state >> np.uint64(20)) % np.uint64(8))
        if now >= NEVER:
            _move(run.lanes, target, source)
            now = _replay(case, ways, lead, run, r)
            spent += total
        if now < best - slack:
            best = now
            _copy(lanes, run.lanes)
    return best, spent
