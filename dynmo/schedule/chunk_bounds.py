"""A lower bound on the time of any schedule with several stages per rank.

It makes the two cuts of `bounds.lower_bound` with the stages of a rank together. S are the stages
of rank r. `low` is the first of S and `high` the last in model order:

    | F's of S only, at least    first B,  | B's, and   | last B | W's only,               |
    | F .. B of one microbatch   on `high` | F's, W's   |        | the way back to q, W_q  |

A rank can run only F's before its first B. In that time the first microbatch must pass from F(low)
out to the last stage and back to B(high). A rank can run only W's after its last B. For the
makespan the gradient must still get from `low` to every stage before it, which then has its W. All
its B's lie in between, with every F and W that ran in neither part. Memory is not considered.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from dynmo.cost.layer_cost import Costs
from dynmo.schedule.bounds import Objective, lower_bound


def lower_bound_on(
    stage_ranks: Sequence[int],
    costs: Costs,
    microbatches: int,
    first_trainable: int = 0,
    objective: Objective = Objective.SPAN,
    caps: Sequence[float] | None = None,
) -> float:
    """Bound the time of any schedule that has stage s on rank stage_ranks[s].

    `caps` are of each rank. They count only if every rank has one stage.
    """
    ranks = max(stage_ranks) + 1
    if ranks == len(stage_ranks):
        of_stages = None if caps is None else [caps[rank] for rank in stage_ranks]
        return lower_bound(costs, microbatches, first_trainable, objective, of_stages)
    trip = _trip(stage_ranks, costs, first_trainable)
    return max(
        _rank_bound(
            [s for s, holder in enumerate(stage_ranks) if holder == rank],
            trip,
            microbatches,
            first_trainable,
            objective,
        )
        for rank in range(ranks)
    )


class _Trip(NamedTuple):
    """The way of one microbatch, out to the last stage and back.

    Attributes:
        f: Time of F on each stage. `b` and `w`: likewise, and 0 on a frozen stage.
        lead: From the start of the step to the start of F on each stage.
        back: From the end of the last stage's F to the end of B on each stage.
    """

    f: list[float]
    b: list[float]
    w: list[float]
    lead: list[float]
    back: list[float]


def _trip(stage_ranks: Sequence[int], costs: Costs, first_trainable: int) -> _Trip:
    stages, last = costs.stages, len(costs.stages) - 1
    # Nothing travels between two stages of one rank.
    links = [
        0.0 if here == there else link
        for link, (here, there) in zip(costs.links, pairwise(stage_ranks), strict=True)
    ]
    f = [stage.f for stage in stages]
    b = [stage.b if s >= first_trainable else 0.0 for s, stage in enumerate(stages)]
    w = [stage.w if s >= first_trainable else 0.0 for s, stage in enumerate(stages)]
    lead = list(accumulate((f[s] + links[s] for s in range(last)), initial=0.0))
    back = list(accumulate((links[s] + b[s] for s in reversed(range(last))), initial=b[last]))
    return _Trip(f, b, w, lead, back[::-1])


def _rank_bound(
    own: list[int], trip: _Trip, microbatches: int, first_trainable: int, objective: Objective
) -> float:
    f, b, w, lead, back = trip
    forward, backward, weight = (microbatches * sum(times[s] for s in own) for times in (f, b, w))
    start, drain = lead[own[0]], 0.0
    trained = [s for s in own if s >= first_trainable]
    if trained:
        low, high = trained[0], trained[-1]
        forward = max(forward, lead[-1] + f[-1] + back[high] - b[high] - start)
        if objective is Objective.MAKESPAN:
            drain = max(
                (back[q] - back[low] + w[q] for q in range(first_trainable, low)), default=0.0
            )
    waits = start if objective is Objective.MAKESPAN else 0.0
    return waits + forward + backward + max(weight, drain)
