"""Lower bounds on the time of any schedule at given costs.

No order of the ops can beat them. Ops run as soon as their order lets them. The first bound is for
one stage per rank. Rank r has m microbatches, its own times F, B and W, and links c:

    lead    from the start of the step until F of any microbatch can reach r:
            sum over s < r of F_s + c_s
    trip    from the end of F(r,j) to the start of B(r,j), out and back:
            sum over s > r of F_s + B_s + 2 c
    k       how many microbatches the memory of r holds between F and B:
            cap / mem_f, at most m

Nothing comes before F(r,0), so every rank starts exactly at its lead. Its own span ends at (its
last op's end) - lead.

Memory. The first B, the last F and the last B cut a rank's time:

    | F F F ..      first B |  F B W ..  last F |  B W B W ..  last B | W ..
    |- x F's in F + trip ---|                   |- a-1 B's in trip ---|

The first B comes F + trip after the first F. At most k F's lie before it, and not the last. The F's
and this wait therefore take at least front = max(m F, F + trip + (m - min(k, m - 1)) F). The last B
starts a trip after the last F.

Let a microbatches be between F and B just after the last F. Then a - 1 B's lie in that trip and
m - a before it. As many of their W's as make room lie before it, too: with a mem_f + c stash <=
cap, at least w = m - a - c. Every other W but the last microbatch's may also lie in the trip. These
bounds hold for some a, and therefore for the least over a, counted from the rank's first F:

    end of the last F    >=  front + (m - a) B + w W
    end of the last B    >=  front + (m - a) B + w W + max(trip, (a - 1) B) + B
    end of the last W    >=  front + (m - a) B + w W + max(trip, (a - 1) B + (m - 1 - w) W) + B + W

If all F's come before the first B, which takes k >= m, its wait and the trip overlap:

    end of the last F    >=  m F
    end of the last B    >=  max(max(m F, F + trip) + (m - 1) B, m F + trip) + B
    end of the last W    >=  max(max(m F, F + trip) + (m - 1) (B + W), m F + trip) + B + W

One of the two holds, so the lesser does. A B that adds memory must find room with the F's there: if
mem_b > 0, k counts from cap - mem_b. (A fused BW hides the memory that its B adds until its W. Only
then could a schedule with BW need less.)

Rounds. F(r,j+k) must wait for B(r,j), so F(r,0) -> B(r,0) -> F(r,k) -> B(r,k) -> F(r,2k) .. is a
chain of ceil(m / k) rounds of F + trip + B. If nothing at all fits beside k microbatches, a W or
another B lies between the B and the F, too.

Ways. After the end of the last F the microbatch still goes out to the last rank and back to any
rank s, which then runs its W. After the end of the last B it goes back to any rank s < r and its W.
Rank s ends no sooner, and neither does the step. The makespan counts its end, the span its
end - lead.

Several stages per rank. S are the stages of rank r, `low` is the first of them and `high` the last
in model order. Memory is not considered:

    | F's of S only, at least    first B,  | B's, and   | last B | W's only,               |
    | F .. B of one microbatch   on `high` | F's, W's   |        | the way back to q, W_q  |

Before its first B a rank can run F's only. In that time the first microbatch must pass from F(low)
out to the last stage and back to B(high). After its last B a rank can run W's only. For the
makespan the gradient must still get from `low` to every stage before it, which then has its W. All
B's lie in between, with every F and W that ran in neither part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate, pairwise

import numpy as np

from dynmo.cost.layer_cost import Costs, StageCost

# Schedules are held to their caps up to this share, because a peak is a running sum.
_ROUNDING = 1e-9


class Objective(StrEnum):
    """The time that a schedule keeps short: `Timeline.span` or `Timeline.makespan`."""

    SPAN = "span"
    MAKESPAN = "makespan"


def lower_bound(
    costs: Costs,
    microbatches: int,
    first_trainable: int = 0,
    objective: Objective = Objective.SPAN,
    caps: Sequence[float] | None = None,
    stage_ranks: Sequence[int] | None = None,
) -> float:
    """Bound the time of any schedule at these costs.

    Args:
        costs: Costs of each stage.
        microbatches: Microbatches of a step.
        first_trainable: The stages before this one run F only.
        objective: Whether the span or the makespan counts.
        caps: Most live memory of each rank, in the costs' unit. None means unlimited. They count
            only if every rank has one stage.
        stage_ranks: Rank of each stage. None means that stage s is on rank s.
    """
    m, last, whole = microbatches, len(costs.stages) - 1, objective is Objective.MAKESPAN
    holders = range(last + 1) if stage_ranks is None else stage_ranks
    ranks = max(holders) + 1
    # Nothing travels between two stages of one rank.
    pairs = zip(costs.links, pairwise(holders), strict=True)
    links = [0.0 if here == there else link for link, (here, there) in pairs]
    f = [stage.f for stage in costs.stages]
    b = [stage.b * (s >= first_trainable) for s, stage in enumerate(costs.stages)]
    w = [stage.w * (s >= first_trainable) for s, stage in enumerate(costs.stages)]
    # The way of one microbatch, in parts:
    # lead[s] lasts from its start to the start of F(s),
    # out[s] from the end of F(s) to the end of the last stage's F,
    # back[s] from there to the end of B(s).
    steps = range(last)
    lead = [*accumulate((f[s] + links[s] for s in steps), initial=0.0)]
    out = [*accumulate((links[s] + f[s + 1] for s in reversed(steps)), initial=0.0)][::-1]
    back = [*accumulate((links[s] + b[s] for s in reversed(steps)), initial=b[last])][::-1]
    bounds: list[float] = []
    if ranks <= last:
        for rank in range(ranks):
            own = [s for s, holder in enumerate(holders) if holder == rank]
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
    # since[s]: the time from which the time of the rank of stage s counts.
    since = [0.0] * (last + 1) if whole else lead
    # finish: from the end of the last F on the last rank to the end of the last microbatch's W on
    # a rank that trains. Each entry is the largest so far.
    trained = range(first_trainable, last + 1)
    finish = [*accumulate((back[s] + w[s] - since[s] for s in trained), max)]
    for s, cost in enumerate(costs.stages):
        if s < first_trainable:
            ended = lead[s] + m * cost.f
            bounds += (ended - since[s], ended + out[s] + finish[-1])
            continue
        trip = out[s] + back[s] - cost.b
        cap = math.inf if caps is None else caps[holders[s]]
        forward, backward, weight = _ends(cost, m, trip, cap)
        bounds.append(lead[s] + weight - since[s])
        bounds.append(lead[s] + forward + out[s] + finish[-1])
        bounds.append(lead[s] + backward - back[s] + finish[s - first_trainable])
    return max(bounds)


def _ends(cost: StageCost, m: int, trip: float, cap: float) -> tuple[float, float, float]:
    """Return the soonest ends of a rank's last F, B and W, from the start of its first F."""
    f, b, w, held, stash = cost.f, cost.b, cost.w, cost.mem_f, cost.mem_f + cost.mem_b
    limit = cap * (1 + _ROUNDING)
    # If a B adds memory (its stash is larger than the memory that it frees), the first B after k
    # F's must fit, too.
    needed = max(held, stash)
    k = (
        m
        if held <= 0 or limit >= (m - 1) * held + needed
        else max(1, 1 + int((limit - needed) / held))
    )
    forwards: list[float] = []
    backwards: list[float] = []
    weights: list[float] = []
    if k >= m:
        first = max(m * f, f + trip)
        forwards.append(m * f)
        backwards.append(max(first + (m - 1) * b, m * f + trip) + b)
        weights.append(max(first + (m - 1) * (b + w), m * f + trip) + b + w)
    if m > 1:
        a = np.arange(1, min(k, m - 1) + 1)
        stashed = (
            np.floor((limit - a * held) / stash)
            if stash > 0 and math.isfinite(limit)
            else np.full(len(a), float(m))
        )
        early = np.clip(m - a - stashed, 0, m - a)
        before = max(m * f, f + trip + (m - min(k, m - 1)) * f) + (m - a) * b + early * w
        forwards.append(float(before.min()))
        backwards.append(float((before + np.maximum(trip, (a - 1) * b)).min()) + b)
        weights.append(
            float((before + np.maximum(trip, (a - 1) * b + (m - 1 - early) * w)).min()) + b + w
        )
    rounds = -(-m // k)
    rest = m - 1 - (rounds - 1) * k  # microbatches after the last one of the chain
    between = min(b, w) if stash > 0 and limit - k * held < stash else 0.0
    chain = (rounds - 1) * (f + trip + b + between)
    forward = max(min(forwards), chain + (1 + rest) * f)
    backward = max(min(backwards), chain + f + trip + (1 + rest) * b, forward + trip + b)
    return forward, backward, max(min(weights), backward + w)
