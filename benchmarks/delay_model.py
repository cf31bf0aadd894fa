"""Delays of messages: their draws, placements that know their means, and a step with them.

`benchmarks.delays` says what is drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from benchmarks.cost_traces import Layers, in_halves
from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.plan.balance_request import BalanceRequest, balancer
from dynmo.plan.bisection import exact
from dynmo.plan.partition import Partition, uniform
from dynmo.plan.stage_costs import by_name, pipeline_costs
from dynmo.schedule.bounds import Objective
from dynmo.schedule.op import Op, Schedule, in_order
from dynmo.schedule.simulator import lane_times

NODE = 4  # ranks


def base_of(where: str, share: float, blocks: int, ranks: int) -> list[float]:
    """Returns the seconds of a message over each boundary without delay.

    Args:
        where: "every channel" or "between nodes".
        share: A message's time as a share of the F of an even stage of dense blocks.
        blocks: Depth of the model.
        ranks: Ranks of the pipeline.
    """
    slow = [where == "every channel" or rank % NODE == NODE - 1 for rank in range(ranks - 1)]
    return [share * blocks / ranks * is_slow for is_slow in slow]


def placements(layers: Layers, means: Sequence[float], ranks: int) -> dict[str, Partition]:
    # Costs of a trace have no sizes, so a link's time is its latency.
    request = BalanceRequest(
        layers,
        in_halves(uniform(len(layers) // 2, ranks)),
        make=by_name("zb-h1", 2 * ranks),
        links=tuple(LinkCost(mean, math.inf) for mean in means),
        objective=Objective.MAKESPAN,
    )
    return {
        "static": request.current,
        "no links": exact(request.weights, ranks, current=request.current),
        "diffusion": balancer("diffusion")(request),
        "exact": balancer("exact")(request),
    }


def drawn(draw: random.Random, factor: float) -> float:
    return min(factor, max(1.0, draw.gauss((1 + factor) / 2, (factor - 1) / 6)))


def makespan(
    schedule: Schedule,
    layers: Sequence[LayerCost],
    placement: Partition,
    base: Sequence[float],
    factor: float,
    seed: int,
) -> float:
    """Replays a step. Each message of all placements has the same draw."""
    costs, draw = pipeline_costs(layers, placement), random.Random(seed)
    ended: dict[Op, float] = {}
    clock = [0.0] * schedule.ranks
    seconds = lane_times(costs)[schedule.order.rows[:, 1]].tolist()
    for took, (rank, op, needs) in zip(seconds, in_order(schedule), strict=True):
        start = clock[rank]
        for before, boundary in needs:
            late = 0.0 if boundary is None else base[boundary] * drawn(draw, factor)
            start = max(start, ended[before] + late)
        clock[rank] = ended[op] = start + took
    return max(clock)
