"""Delays of messages: their draws, placements that know their means, and a step with them.

`benchmarks.delays` says what is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.cost_traces import Layers, in_halves, problem_of
from benchmarks.noise import in_order
from dynmo.cost.layer_cost import LayerCost
from dynmo.plan.balancers import balancer
from dynmo.plan.bisection import exact
from dynmo.plan.costs import pipeline_costs
from dynmo.plan.evaluate import evaluate
from dynmo.plan.partition import Partition, uniform
from dynmo.plan.problem import Choice, Mesh
from dynmo.schedule.op import Op, Schedule
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
    problem, static = problem_of(layers, tuple(means)), in_halves(uniform(len(layers) // 2, ranks))
    now = evaluate(problem, Choice(Mesh(ranks, 1, 2 * ranks, 1, "zb-h1"), static))
    return {
        "static": static,
        "no links": exact([x.seconds for x in layers], ranks, current=static),
        "diffusion": balancer("diffusion")(problem, now),
        "exact": balancer("exact")(problem, now),
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
