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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from dynmo.cost.layer_cost import Costs
from dynmo.errors import ScheduleError
from dynmo.schedule.automatic._zero_bubble_loops import (
    B_FIRST,
    BY_HAND,
    F_FIRST,
    IN_TURN,
    SHARE_OF_WAY,
    UNLIMITED,
    Problem,
    polish,
    search,
)
from dynmo.schedule.bounds import Objective, lower_bound
from dynmo.schedule.generators import check_numbers
from dynmo.schedule.op import Kind, Op, Schedule

NAME = "zb-auto"


class Start(NamedTuple):
    """A policy to start from, the same on all ranks. The top of this file explains the rest.

    Attributes:
        style: `SHARE_OF_WAY`: the warm-up is as many F's as fill `size` percent of the way to the
            last stage and back, and `more`. `BY_HAND`: the warm-up of ZB-H1 (size 1) or ZB-H2
            (size 2).
    """

    style: int
    size: int
    more: int
    wait: int
    prefer: int
    save: int = UNLIMITED


# Each is the one that did best together with those before it on random uneven costs.
_STARTS = (
    Start(SHARE_OF_WAY, 75, 1, 2, IN_TURN),
    Start(SHARE_OF_WAY, 105, 0, 3, F_FIRST),
    Start(BY_HAND, 2, 0, 0, F_FIRST),
    Start(BY_HAND, 1, 0, 4, F_FIRST),
    Start(SHARE_OF_WAY, 100, 0, 1, IN_TURN),
    Start(BY_HAND, 1, 0, 4, IN_TURN, save=2),
    Start(SHARE_OF_WAY, 100, 1, 3, B_FIRST),
    Start(SHARE_OF_WAY, 50, 1, 0, B_FIRST, save=1),
    Start(SHARE_OF_WAY, 100, 0, 2, F_FIRST, save=2),
    Start(SHARE_OF_WAY, 110, 0, 0, IN_TURN),
    Start(SHARE_OF_WAY, 103, 0, 0, F_FIRST),
    Start(SHARE_OF_WAY, 100, 2, 2, B_FIRST),
    Start(SHARE_OF_WAY, 70, 4, 1, B_FIRST),
)

# Op._make without its check: a plan of 64 ranks and 512 microbatches makes a hundred thousand ops.
_new_op = cast("Callable[[tuple[Kind, int, int]], Op]", partial(cast("Any", tuple).__new__, Op))
_KINDS = (Kind.F, Kind.B, Kind.W)

# A peak is a running sum. It may lie a rounding error above the activations that it stands for.
# This is half of the share that is allowed for it.
_ROUNDING = 5e-10


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
        ScheduleError: A single microbatch does not fit a stage, or the number of ranks or
            microbatches is out of range. Every other case has a schedule.
    """
    p, m = len(costs.stages), microbatches
    check_numbers(NAME, p, m, p, first_trainable)
    problem, unit = _problem(costs, m, _limits(costs, caps, first_trainable), first_trainable)
    goal = lower_bound(costs, m, first_trainable, objective, caps) * unit * (1 + 1e-12)
    order = np.zeros((p, 3 * m), np.int8)
    budget, polish_budget = _budget(p, m)
    spans, starts = objective is Objective.SPAN, np.array(_STARTS, np.int64)
    best, _ = search(tuple(problem), spans, goal, budget, starts, order)
    if best > goal:
        polish(tuple(problem), goal, polish_budget, order)
    rows = tuple(_row(order[r], r, m, r < first_trainable) for r in range(p))
    return Schedule(NAME, m, tuple(range(p)), rows, first_trainable)


def _problem(
    costs: Costs, microbatches: int, limits: NDArray[np.float64], first_trainable: int
) -> tuple[Problem, float]:
    """Make the arrays of the search, and return the unit of their times, too."""
    stages, p = costs.stages, len(costs.stages)
    frozen = np.arange(p) < first_trainable
    f, b, w = (_array(getattr(stage, field) for stage in stages) for field in ("f", "b", "w"))
    b[frozen] = w[frozen] = 0.0
    link = _array((*costs.links, 0.0))
    # Sizes near the largest number would overflow. A power of two changes no digit.
    _, exponent = math.frexp(max(1e-300, *f, *b, *w, *link))
    unit = math.ldexp(1.0, -min(exponent, 1000)) if abs(exponent) > 500 else 1.0
    mem_f = _array(stage.mem_f for stage in stages)
    stash = _array(stage.mem_f + stage.mem_b for stage in stages)
    times = np.array([x * unit for x in (f, b, w, link)])
    lead = np.zeros(p)
    return Problem(microbatches, times, first_trainable, p, lead, mem_f, stash, limits), unit


def _budget(ranks: int, microbatches: int) -> tuple[int, int]:
    """Compute the budgets: visits of ranks, and ops that may be replayed to move single ops.

    At 24 ranks and 96 microbatches the
    budget is some 15 and 12 whole schedules. A larger case, whose plan may take longer, has more. A
    smaller case has no fewer ops.
    """
    share = min(30.0, max(1.0, 3 * ranks * microbatches / 6912) ** 1.6)
    return int(110_000 * share), int(80_000 * share)


def _limits(
    costs: Costs, caps: Sequence[float] | None, first_trainable: int
) -> NDArray[np.float64]:
    p = len(costs.stages)
    if caps is None:
        return np.full(p, 1e300)
    if len(caps) != p:
        raise ScheduleError(
            f"{NAME}: {len(caps)} memory limits for {p} stages; give one per stage (inf: none)"
        )
    for stage in range(p):
        cost, cap = costs.stages[stage], caps[stage]
        need = 0.0 if stage < first_trainable else max(0.0, cost.held)
        if not need <= cap * (1 + _ROUNDING):
            raise ScheduleError(
                f"{NAME}: one microbatch on stage {stage} needs {need:.10g}, over its limit of "
                f"{cap:.10g}; a limit of {need:.10g} would fit"
            )
    return np.minimum(np.array(caps, np.float64) * (1 + _ROUNDING), 1e300)


def _array(values: Iterable[float]) -> NDArray[np.float64]:
    return np.fromiter(values, np.float64)


def _row(order: NDArray[np.int8], rank: int, microbatches: int, frozen: bool) -> tuple[Op, ...]:
    order = order[: microbatches if frozen else 3 * microbatches]
    index = np.empty(len(order), np.int64)
    for code in range(3):
        index[order == code] = np.arange(np.count_nonzero(order == code))
    kinds = [_KINDS[code] for code in cast("list[int]", order.tolist())]
    return tuple(map(_new_op, zip(kinds, repeat(rank), index.tolist(), strict=False)))
