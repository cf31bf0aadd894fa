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
    m, last, whole = microbatches, len(stage_ranks) - 1, objective is Objective.MAKESPAN
    # Nothing travels between two stages of one rank.
    links = [
        0.0 if here == there else link
        for link, (here, there) in zip(costs.links, pairwise(stage_ranks), strict=True)
    ]
    f = [stage.f for stage in costs.stages]
    b = [stage.b * (s >= first_trainable) for s, stage in enumerate(costs.stages)]
    w = [stage.w * (s >= first_trainable) for s, stage in enumerate(costs.stages)]
    # lead[s] lasts from the start of the step to the start of F(s),
    # back[s] from the end of the last stage's F to the end of B(s).
    lead = list(accumulate((f[s] + links[s] for s in range(last)), initial=0.0))
    back = [*accumulate((links[s] + b[s] for s in reversed(range(last))), initial=b[last])][::-1]
    bounds: list[float] = []
    for rank in range(ranks):
        own = [s for s, holder in enumerate(stage_ranks) if holder == rank]
        trained = [s for s in own if s >= first_trainable]
        start, drain = lead[own[0]], 0.0
        forward, backward, weight = (m * sum(times[s] for s in own) for times in (f, b, w))
        if trained:
            low, high = trained[0], trained[-1]
            forward = max(forward, lead[-1] + f[-1] + back[high] - b[high] - start)
            ways = (back[q] - back[low] + w[q] for q in range(first_trainable, low))
            drain = max(ways, default=0.0) * whole
        bounds.append(start * whole + forward + backward + max(weight, drain))
    return max(bounds)
