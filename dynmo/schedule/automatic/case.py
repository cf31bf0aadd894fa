"""The case that a search schedules, as arrays for compiled loops: the graph, and costs beside it.

A search writes an order of lanes (see `graph`) for each rank. A lane's microbatches come in order,
so a row of lanes tells the ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynmo.cost.layer_cost import Costs
from dynmo.schedule.bounds import Objective
from dynmo.schedule.graph import Ints, delays, make_graph, mirrored
from dynmo.schedule.op import Kind, Op, Schedule

NEVER = 1e300
"""The time of what has not happened, and the memory of a rank without a limit."""


# A peak is a running sum. It may lie a rounding error above the activations that it stands for.
# This is half of the share that is allowed for it.
ROUNDING = 1 + 5e-10


class Case(NamedTuple):
    """What is scheduled.

    Attributes:
        m: Number of microbatches.
        frozen: Number of stages before the first that trains.
        whole: Whether the makespan counts, and not the span.
        before: Of the graph, [lanes, 2]. `lag`: likewise. `delay`: `graph.delays`, likewise.
        after: Of the mirrored graph, [lanes, 3]. `after_lag` and `after_delay`: likewise.
        told: The other ranks that have an op that waits for each lane, or -1, [lanes, 2].
        took: Time of an op of each lane.
        change: By how much it changes the live memory of its rank.
        hold: Memory that an F takes on each stage.
        stash: What is left of it after B.
        cap: Memory of each rank.
        rank_of: Rank of each stage.
        first: Where each rank's stages begin in `held`, [ranks + 1].
        held: The stages of the ranks, in model order.
    """

    m: int
    frozen: int
    whole: bool
    before: Any
    lag: Any
    delay: Any
    after: Any
    after_lag: Any
    after_delay: Any
    told: Any
    took: Any
    change: Any
    hold: Any
    stash: Any
    cap: Any
    rank_of: Any
    first: Any
    held: Any


def make_case(
    costs: Costs,
    microbatches: int,
    stage_ranks: Sequence[int],
    caps: Sequence[float] | None,
    first_trainable: int,
    objective: Objective,
) -> Case:
    stages, n, ranks = costs.stages, len(costs.stages), max(stage_ranks) + 1
    graph = make_graph(stage_ranks, first_trainable, ranks)
    before, after = (
        (way.before, way.lag, delays(way, costs.links)) for way in (graph, mirrored(graph))
    )
    trains = np.arange(n) >= first_trainable
    took = np.array([(stage.f, stage.b, stage.w) for stage in stages], np.float64).T.copy()
    took[1:] *= trains
    # An F takes at once the most that its microbatch will hold. A B that adds memory therefore
    # never finds too little.
    hold = np.array([max(stage.held, 0.0) for stage in stages], np.float64) * trains
    stash = np.array([max(stage.mem_f + stage.mem_b, 0.0) for stage in stages], np.float64) * trains
    cap = np.full(ranks, NEVER) if caps is None else np.minimum(caps, NEVER) * ROUNDING
    held = np.argsort(stage_ranks, kind="stable")
    first = np.searchsorted(np.sort(stage_ranks), np.arange(ranks + 1))
    rank_of, whole = np.array(stage_ranks, np.int64), objective is Objective.MAKESPAN
    waiting = after[0][:, :2]
    told = rank_of[waiting % n]
    told[(waiting < 0) | (told == np.tile(rank_of, 4)[:, None])] = -1
    return Case(
        microbatches,
        first_trainable,
        whole,
        *before,
        *after,
        told,
        took.ravel(),
        np.concatenate([hold, stash - hold, -stash]),
        hold,
        stash,
        cap,
        rank_of,
        first,
        held,
    )


Lanes = NDArray[np.int32]
"""The ops of each rank, by their lanes."""


def microbatches_of(lanes: Ints | Lanes, m: int) -> Ints:
    """The microbatch of each op. Those of a lane come in order."""
    index = np.empty(len(lanes), np.int64)
    index[np.argsort(lanes, kind="stable")] = np.arange(len(lanes)) % m
    return index


# A plan of 64 ranks and 512 microbatches asks for a hundred thousand ops, many times.
@lru_cache(maxsize=4)
def _ops(stages: int, m: int) -> list[Op]:
    return [Op(*each) for each in product((Kind.F, Kind.B, Kind.W), range(stages), range(m))]


def schedule_of(name: str, case: Case, order: Lanes) -> Schedule:
    """Turn the lanes of each rank into a schedule. A row's rest is not used."""
    m, ops, rows = case.m, _ops(len(case.rank_of), case.m), list[tuple[Op, ...]]()
    for rank in range(len(case.cap)):
        own = case.held[case.first[rank] : case.first[rank + 1]]
        row = order[rank, : m * int(np.where(own < case.frozen, 1, 3).sum())].astype(np.int64)
        rows.append(tuple(map(ops.__getitem__, (row * m + microbatches_of(row, m)).tolist())))
    return Schedule(name, m, tuple(case.rank_of.tolist()), tuple(rows), case.frozen)
