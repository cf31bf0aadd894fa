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
    placement: Sequence[int],
    costs: Costs,
    microbatches: int,
    first_trainable: int = 0,
    objective: Objective = Objective.SPAN,
    caps: Sequence[float] | None = None,
) -> float:
    """Bound the time of any schedule that has stage s on rank placement[s].

    Args:
        placement: Rank of each stage.
        costs: Costs of each stage.
        microbatches: Microbatches of a step.
        first_trainable: The stages before this one run F only.
        objective: Whether the span or the makespan counts.
        caps: Most live memory of each rank, in the costs' unit. They count only if every rank has
            one stage.

    Returns:
        The least time, in the costs' unit.
    """
    ranks, stages, m = max(placement) + 1, costs.stages, microbatches
    if ranks == len(placement):
        of_stages = None if caps is None else [caps[rank] for rank in placement]
        return lower_bound(costs, microbatches, first_trainable, objective, of_stages)
    last = len(stages) - 1
    # Nothing travels between two stages of one rank.
    links = [
        0.0 if here == there else link
        for link, (here, there) in zip(costs.links, pairwise(placement), strict=True)
    ]
    trains = [s >= first_trainable for s in range(last + 1)]
    b = [stage.b if t else 0.0 for stage, t in zip(stages, trains, strict=True)]
    w = [stage.w if t else 0.0 for stage, t in zip(stages, trains, strict=True)]
    # lead: from the start of the step to the start of F on each stage. back: from the end of the
    # last F to the end of B on each stage.
    lead = list(accumulate((stages[s].f + links[s] for s in range(last)), initial=0.0))
    back = list(accumulate((links[s] + b[s] for s in reversed(range(last))), initial=b[last]))[::-1]
    turn = lead[last] + stages[last].f
    bounds: list[float] = []
    for rank in range(ranks):
        own = [s for s, holder in enumerate(placement) if holder == rank]
        forward, backward, weight = (
            m * sum(stages[s].f for s in own),
            m * sum(b[s] for s in own),
            m * sum(w[s] for s in own),
        )
        start, drain = lead[own[0]], 0.0
        trained = [s for s in own if trains[s]]
        if trained:
            forward = max(forward, turn + back[trained[-1]] - b[trained[-1]] - start)
            if objective is Objective.MAKESPAN:
                drain = max(
                    (back[q] - back[trained[0]] + w[q] for q in range(first_trainable, trained[0])),
                    default=0.0,
                )
        bounds.append(
            (start if objective is Objective.MAKESPAN else 0.0)
            + forward
            + backward
            + max(weight, drain)
        )
    return max(bounds)
