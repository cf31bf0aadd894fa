"""zb-auto: a schedule for each stage's own costs and memory.

The method is from Zero Bubble, section 3. One clock runs all ranks. A free rank takes the op that
its policy prefers among the ops that have arrived and fit its memory:

    warm    most microbatches between F and B: the length of the warm-up while the first B is on
            its way
    prefer  B, F, or the two in turn, if both could run
    wait    W fills a gap before a known arrival if that many quarters of it fit the gap; a gap
            without end is always filled
    save    W is saved for gaps until this many wait, or until a B or F that has arrived needs their
            memory

An F is admitted only if the rank could empty itself afterwards, with W's first and then B and W in
turn. Ranks therefore never wait for memory in a circle. Every case in which one microbatch fits
each stage has a schedule.

The search first tries a table of policies, the same on all ranks. Then it changes the policies of
single ranks, then the order of single ops along the critical path. It gives up a try at the first
op after which the try must end later than the best so far. It stops when `lower_bound` is met. Its
budget is in steps, never in time, so every rank that runs it finds the same schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dynmo.cost.layer_cost import Costs
from dynmo.errors import ScheduleError
from dynmo.schedule.automatic._list_loops import (
    B_FIRST,
    F_FIRST,
    IN_TURN,
    PREFER,
    SAVE,
    WAIT,
    WARM,
)
from dynmo.schedule.automatic._zero_bubble_loops import UNLIMITED, polish, search
from dynmo.schedule.automatic.case import NEVER, ROUNDING, Case, make_case, schedule_of
from dynmo.schedule.bounds import Objective, lower_bound
from dynmo.schedule.generators import in_turn
from dynmo.schedule.graph import Ints
from dynmo.schedule.op import Schedule

NAME = "zb-auto"


SHARE_OF_WAY, BY_HAND = range(2)


# Policies to start from, the same on all ranks: style, size and more of the warm-up, then wait,
# prefer and save. SHARE_OF_WAY: the warm-up is as many F's as fill `size` percent of the way to the
# last stage and back, and `more`. BY_HAND: the warm-up of ZB-H1 (size 1) or ZB-H2 (size 2). Each is
# the one that did best together with those before it on random uneven costs.
_STARTS = (
    (SHARE_OF_WAY, 75, 1, 2, IN_TURN, UNLIMITED),
    (SHARE_OF_WAY, 105, 0, 3, F_FIRST, UNLIMITED),
    (BY_HAND, 2, 0, 0, F_FIRST, UNLIMITED),
    (BY_HAND, 1, 0, 4, F_FIRST, UNLIMITED),
    (SHARE_OF_WAY, 100, 0, 1, IN_TURN, UNLIMITED),
    (BY_HAND, 1, 0, 4, IN_TURN, 2),
    (SHARE_OF_WAY, 100, 1, 3, B_FIRST, UNLIMITED),
    (SHARE_OF_WAY, 50, 1, 0, B_FIRST, 1),
    (SHARE_OF_WAY, 100, 0, 2, F_FIRST, 2),
    (SHARE_OF_WAY, 110, 0, 0, IN_TURN, UNLIMITED),
    (SHARE_OF_WAY, 103, 0, 0, F_FIRST, UNLIMITED),
    (SHARE_OF_WAY, 100, 2, 2, B_FIRST, UNLIMITED),
    (SHARE_OF_WAY, 70, 4, 1, B_FIRST, UNLIMITED),
)


def automatic(
    costs: Costs,
    microbatches: int,
    *,
    caps: Sequence[float] | None = None,
    first_trainable: int = 0,
    objective: Objective = Objective.SPAN,
) -> Schedule:
    """Search the shortest schedule for these costs within the memory caps.

    Each rank has one stage. ZB-1p and ZB-2p are caps of p and 2p forward activations.

    Raises:
        ScheduleError: A single microbatch does not fit a stage. Every other case has a schedule.
    """
    p, m = len(costs.stages), microbatches
    for stage, cap in enumerate(caps or ()):
        need = max(0.0, costs.stages[stage].held) * (stage >= first_trainable)
        if not need <= cap * ROUNDING:
            raise ScheduleError(
                f"{NAME}: one microbatch on stage {stage} needs {need:.10g}, over its limit of "
                f"{cap:.10g}; a limit of {need:.10g} would fit"
            )
    case = make_case(costs, m, range(p), caps, first_trainable, objective)
    # Sizes near the largest number would overflow. A power of two changes no digit.
    _, exponent = math.frexp(max(1e-300, case.took.max(), case.delay.max()))
    unit = math.ldexp(1.0, -min(exponent, 1000)) if abs(exponent) > 500 else 1.0
    hold = np.array([stage.mem_f for stage in costs.stages], np.float64)
    stash = hold + [stage.mem_b for stage in costs.stages]
    case = case._replace(
        took=case.took * unit,
        delay=case.delay * unit,
        change=np.concatenate([hold, stash - hold, -stash]),
        cap=np.where(np.arange(p) < first_trainable, NEVER, case.cap),
        hold=hold,
        stash=stash,
    )
    goal = lower_bound(costs, m, first_trainable, objective, caps) * unit * (1 + 1e-12)
    budget, polish_budget = _budget(p, m)
    best, _, order = search(case, goal, budget, *_policies(case))
    if best > goal:
        # The time from which each rank's time counts.
        way = np.cumsum(case.took[: p - 1] + case.delay[1:p, 0])
        lead = np.concatenate([[0.0], way]) * (not case.whole)
        lengths = np.where(np.arange(p) < first_trainable, m, 3 * m)
        used = np.arange(3 * m) < lengths[:, None]
        orders = [order[used].astype(np.int64)]
        for lanes, inside, stashed in _by_hand(p, m, first_trainable):
            over = inside * case.hold + stashed * case.stash > case.cap
            if not over.any():
                orders.append(lanes[used])
        tries, first = np.stack(orders), np.cumsum([0, *lengths])
        polish(case, case.delay[None], lead, goal, polish_budget, first, tries)
        order[used] = tries[0]
    return schedule_of(NAME, case, order)


def _policies(case: Case) -> tuple[Ints, Ints]:
    """Returns the policies of `_STARTS`, and the greatest warm-up that each rank's memory takes."""
    m, p = case.m, len(case.cap)
    f, b, _ = case.took.reshape(3, -1)
    # How many F's arrive while the first one is on its way to the last stage and back. The slowest
    # F up to a rank says how fast they arrive.
    with np.errstate(over="ignore", invalid="ignore"):  # times near the largest number
        trip = np.cumsum((f[1:] + b[1:] + 2 * case.delay[1:p, 0])[::-1])[::-1]
        feed = np.maximum.accumulate(f)
        way = np.nan_to_num(np.append(trip, 0.0) / np.where(feed > 0, feed, np.inf))
    way = np.minimum(way, 100.0 * m)
    limited = (case.hold > 0) & (case.cap < m * case.hold)
    room = np.full(p, m)
    room[limited] = np.maximum(1, case.cap[limited] / case.hold[limited])
    policies = np.empty((len(_STARTS), 4, p), np.int64)
    for policy, (style, size, more, *rest) in zip(policies, _STARTS, strict=True):
        share = np.ceil(np.minimum(size * way / 100, m)) + more
        by_hand = size * np.arange(p)[::-1] + 1
        policy[WARM] = np.clip(share if style == SHARE_OF_WAY else by_hand, 1, room)
        policy[WARM, : case.frozen] = m
        policy[[WAIT, PREFER, SAVE]] = np.array(rest)[:, None]
    return policies, room


@lru_cache(maxsize=32)
def _by_hand(p: int, m: int, frozen: int) -> list[tuple[Ints, Ints, Ints]]:
    """Returns 1F1B with B and W apart, ZB-H1 and ZB-H2.

    They are the lanes of the ranks and, after each op, the microbatches between F and B and between
    B and W.
    """
    orders, rank = list[tuple[Ints, Ints, Ints]](), np.arange(p)
    for size, holds in ((1, 0), (1, 1), (2, 1)):
        ahead = np.where(rank < frozen, m, size * (p - 1 - rank))
        kinds = in_turn(m, ahead, holds * size * (rank - frozen))
        nf, nb, nw = ((kinds == kind).cumsum(axis=1).T for kind in range(3))
        orders.append((kinds * p + rank[:, None], nf - nb, nb - nw))
    return orders


def _budget(ranks: int, microbatches: int) -> tuple[int, int]:
    """Compute the budgets: visits of ranks, and ops that may be replayed to move single ops.

    At 24 ranks and 96 microbatches the
    budget is some 15 and 12 whole schedules. A larger case, whose plan may take longer, has more. A
    smaller case has no fewer ops.
    """
    share = min(30.0, max(1.0, 3 * ranks * microbatches / 6912) ** 1.6)
    return int(110_000 * share), int(80_000 * share)
