"""Lower bounds on the time of any schedule at given costs: what no order of the ops can beat.

One stage per rank. For rank r with m microbatches, F, B, W its own times, and c the links:

    lead    from the start of the step until F of any microbatch can reach r:      sum over s < r of F_s + c_s
    trip    from the end of F(r,j) to the start of B(r,j), out and back:           sum over s > r of F_s + B_s + 2 c
    drain   from the end of B(r,j) until the last W it leads to upstream has run:  max over q < r of (sum of c + B down to q) + W_q

Cut r's time at the start of its first B and at the end of its last B. Before the first cut only F's can run, m F at most, and a whole
F + trip must pass. After the second only W's can run, m W at most, and the drain must pass. Between them lie the m B's and every F and W
that ran in neither part. So, whatever the order,

    time(r) >= lead + max(m F, F + trip) + m B + max(m W, drain)

Cut it instead at the end of its last F: the m F's lie before; after it that microbatch still goes out, comes back and drains:

    time(r) >= lead + m F + (the rest of the way of one microbatch)

For the makespan every rank's figure is a bound. A rank's own span, from its first op to its last, has neither lead nor drain.
"""

from __future__ import annotations

import math
from enum import StrEnum
from itertools import accumulate

from dynmo.costs import Costs


class Objective(StrEnum):
    """What a schedule is to make short: see `Timeline.span` and `Timeline.makespan`."""

    SPAN = "span"
    MAKESPAN = "makespan"


def lower_bound(costs: Costs, microbatches: int, first_trainable: int = 0, objective: Objective = Objective.SPAN) -> float:
    """The least time, in the costs' unit, in which any schedule of one stage per rank can end.

    Exact for one microbatch, and for the hand-made case of m <= p with F = W; memory limits only make it less tight.
    """
    stages, links, m, last = costs.stages, costs.links, microbatches, len(costs.stages) - 1
    # One microbatch's way: lead[s] from its start to the start of F(s), out[s] from the end of F(s) to the end of the last stage's F,
    # back[s] from there to the end of B(s).
    lead = list(accumulate((stages[s].f + links[s] for s in range(last)), initial=0.0))
    out = list(accumulate((links[s] + stages[s + 1].f for s in reversed(range(last))), initial=0.0))[::-1]
    back = list(accumulate((links[s] + stages[s].b for s in reversed(range(last))), initial=stages[last].b))[::-1]

    whole = objective is Objective.MAKESPAN
    trained = range(first_trainable, last + 1)
    finish = max(back[q] + stages[q].w for q in trained)
    bounds: list[float] = []
    for r, cost in enumerate(stages):
        start = lead[r] if whole else 0.0
        if r < first_trainable:
            bounds.append(start + m * cost.f + (out[r] + finish if whole else 0.0))
            continue
        trip = out[r] + back[r] - cost.b
        drain = max((back[q] - back[r] + stages[q].w for q in trained[: r - first_trainable]), default=0.0) if whole else 0.0
        bounds.append(start + max(m * cost.f, cost.f + trip) + m * cost.b + max(m * cost.w, drain))
        bounds.append(start + m * cost.f + out[r] + (finish if whole else back[r] + cost.w))
    return max(bounds, default=math.nan)
