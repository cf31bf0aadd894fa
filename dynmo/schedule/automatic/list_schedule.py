"""v-auto: a schedule in a V for the stages' own costs, within any memory.

One clock runs all ranks. A free rank takes, of the ops that have arrived and fit its memory, the
one with the highest priority (list scheduling). Two kinds of runs take turns:

    forwards   from the first op on. Each op's priority is when it started in the run before.
    backwards  from the last op on, each op as late as it can. This pushes W's of the inner ranks
               behind their last B, where they delay nobody.

The first run's priority is when an op would start if microbatches followed each other at the
interval of the busiest rank. Runs in both directions are known from project scheduling as
forward-backward improvement (Li and Willis, 1992).

An F is admitted only if the rank could empty itself afterwards, the oldest microbatch first. Ranks
therefore never wait for memory in a circle, and every case in which one microbatch fits each rank
has a schedule. With little memory the repeating blocks of `vshape` are shorter. The best of both is
returned.

The number of runs depends on the size of the case, never on time, so every rank finds the same
schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dynmo.cost.layer_cost import Costs
from dynmo.schedule.automatic import _list_loops as core
from dynmo.schedule.automatic.vshape import check_stages, within_caps
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import v_stage_ranks
from dynmo.schedule.chunk_bounds import lower_bound_on
from dynmo.schedule.op import Kind, Op, Schedule

NAME = "v-auto"

# The shares of an op for which a rank waits for a more urgent one, in one run after the other.
_AHEAD = (0.2, 0.5, 0.2, 0.0)
_BUDGET = 150_000  # ops that may be placed in one direction
_ROUNDS = (4, 60)  # the fewest and most runs in both directions

_KINDS = (Kind.F, Kind.B, Kind.W)


def list_schedule(
    costs: Costs,
    microbatches: int,
    *,
    caps: Sequence[float] | None = None,
    first_trainable: int = 0,
    objective: Objective = Objective.SPAN,
) -> Schedule:
    """Search the shortest schedule of a V within the memory caps.

    Raises:
        ScheduleError: A single microbatch does not fit a rank, or a number is out of range. Every
            other case has a schedule.
    """
    check_stages(NAME, costs, microbatches, first_trainable)
    m, stage_ranks = microbatches, v_stage_ranks(len(costs.stages) // 2)
    best, blocks = within_caps(NAME, costs, m, caps, first_trainable, objective)
    goal = lower_bound_on(stage_ranks, costs, m, first_trainable, objective) * (1 + 1e-12)
    problem = _problem(costs, stage_ranks, m, caps, first_trainable, objective)
    order = np.zeros((len(problem.cap), 3 * m * 2), np.int32)
    rounds = min(_ROUNDS[1], max(_ROUNDS[0], _BUDGET // (3 * len(costs.stages) * m)))
    ahead, trial = np.array(_AHEAD, np.float64), np.zeros_like(order)
    time = core.improve(tuple(problem), _evenly(problem), goal, rounds, ahead, best, order, trial)
    if time >= best:
        return blocks()
    n = len(stage_ranks)
    trained = [m * (3 if stage >= first_trainable else 1) for stage in range(n)]
    lengths = np.bincount(stage_ranks, trained).astype(np.int64)
    rows = tuple(_row(row[:length], n) for row, length in zip(order, lengths, strict=True))
    return Schedule(NAME, m, stage_ranks, rows, first_trainable)


def _problem(
    costs: Costs,
    stage_ranks: Sequence[int],
    microbatches: int,
    caps: Sequence[float] | None,
    first_trainable: int,
    objective: Objective,
) -> core.Problem:
    stages, n, p = costs.stages, len(costs.stages), max(stage_ranks) + 1
    trains = (np.arange(n) >= first_trainable).astype(np.float64)
    took = np.array([[getattr(stage, key) for stage in stages] for key in ("f", "b", "w")])
    took[1:] *= trains
    link = np.array([*costs.links, 0.0], np.float64)
    for stage in range(n - 1):
        if stage_ranks[stage] == stage_ranks[stage + 1]:
            link[stage] = 0.0
    # An F takes at once the most that its microbatch will hold, as in `vshape`.
    hold = np.array([max(stage.held, 0.0) for stage in stages]) * trains
    stash = np.array([max(stage.mem_f + stage.mem_b, 0.0) for stage in stages]) * trains
    cap = np.full(p, core.NEVER) if caps is None else np.minimum(caps, core.NEVER)
    held = sorted(range(n), key=lambda stage: (stage_ranks[stage], stage))
    first = np.searchsorted([stage_ranks[stage] for stage in held], np.arange(p + 1))
    return core.Problem(
        microbatches,
        first_trainable,
        objective is Objective.MAKESPAN,
        took,
        link,
        hold,
        stash,
        cap,
        first.astype(np.int64),
        np.array(held, np.int64),
        np.array(stage_ranks, np.int64),
    )


def _evenly(problem: core.Problem) -> NDArray[np.float64]:
    """Compute when ops start if microbatches follow each other at the busiest rank's interval."""
    f, b, w = problem.took
    down = np.concatenate([[0.0], np.cumsum(f[:-1] + problem.link[:-1])])
    up = np.cumsum((b + problem.link)[::-1])[::-1] - b - problem.link + down[-1] + f[-1]
    interval = float(np.bincount(problem.rank_of, f + b + w).max())
    first = np.stack([down, up, up + b])
    return np.ascontiguousarray(
        first[:, :, None] + interval * np.arange(problem.m, dtype=np.float64)
    )


def _row(codes: NDArray[np.int32], stages: int) -> tuple[Op, ...]:
    done = dict.fromkeys(codes.tolist(), 0)
    row: list[Op] = []
    for code in codes.tolist():
        kind, stage = divmod(code, stages)
        row.append(Op(_KINDS[kind], stage, done[code]))
        done[code] += 1
    return tuple(row)
