"""A lower bound on the time of any schedule with several stages a rank: `bound.lower_bound`'s two
cuts, with a rank's stages together.

For rank r with stages S, of which `low` is the first and `high` the last in model order:

    | F's of S only            first B, on `high` |  B's, and F's and W's  | last B |  W's only             |
    | at least F .. B of one microbatch           |                        |        | the way back to q, W_q |

Before its first B a rank can run only F's, and the first microbatch's way from F(low) out to the
last stage and back to B(high) must pass. After its last B it can run only W's, and for the makespan
the gradient must still get from `low` to every stage before it, which then has its W. In between
lie all its B's, and every F and W that ran in neither part. Memory is not looked at.
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
    """The least time, in the costs' unit, of any schedule with stage s on rank placement[s]; caps
    per rank."""
    ranks, stages, m = max(placement) + 1, costs.stages, microbatches
    if ranks == len(placement):
        of_stages = None if caps is None else [caps[rank] for rank in placement]
        return lower_bound(costs, microbatches, first_trainable, objective, of_stages)
    last = len(stages) - 1
    # Between two stages of one rank nothing travels.
    links = [
        0.0 if here == there else link
        for link, (here, there) in zip(costs.links, pairwise(placement), strict=True)
    ]
    trains = [s >= first_trainable for s in range(last + 1)]
    b = [stage.b if t else 0.0 for stage, t in zip(stages, trains, strict=True)]
    w = [stage.w if t else 0.0 for stage, t in zip(stages, trains, strict=True)]
    # From the start of the step to the start of F on each stage, and from the end of the last F to
    # the end of B on each.
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
