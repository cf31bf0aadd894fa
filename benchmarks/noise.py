"""Replays a schedule with ops whose times vary, and with slow links between nodes.

The order of the ops stays as planned. `benchmarks.zero_bubble` shows the figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import mean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynmo.cost.layer_cost import Costs
from dynmo.schedule.op import Dependency, Op, Schedule, check_order, dependencies
from dynmo.schedule.simulator import lane_times


def in_order(schedule: Schedule) -> Iterator[tuple[int, Op, tuple[Dependency, ...]]]:
    """Lists every rank, op and the op's dependencies, in an order in which the ops can run."""
    check_order(schedule)
    flat = [(rank, op) for rank, row in enumerate(schedule.ops) for op in row]
    for at in schedule.order.at:
        rank, op = flat[int(at)]
        yield rank, op, tuple(dependencies(schedule, op))


class Disturbance(NamedTuple):
    """What varies.

    Attributes:
        spread: Each op's time is multiplied by a random factor of mean 1 and this standard
            deviation (lognormal).
        delay: Each op takes longer by a random time with this mean (exponential).
        slower_links: Factor of the link times between nodes.
        busy: A message keeps its receiver busy for its link time, instead of passing beside work.
    """

    spread: float = 0.0
    delay: float = 0.0
    slower_links: float = 1.0
    busy: bool = False


CALM = Disturbance()


class Replay:
    """A schedule that can be replayed many times. A replay waits for every message."""

    def __init__(self, schedule: Schedule, costs: Costs, node: int = 8) -> None:
        self._ranks = schedule.ranks
        self._seconds = lane_times(costs)[schedule.order.rows[:, 1]].tolist()
        # The rank of each op, and the ops that it waits for with the boundary that each crosses.
        self._ops: list[tuple[int, list[tuple[int, int | None]]]] = []
        index: dict[Op, int] = {}
        ranks = schedule.stage_ranks
        for rank, op, needs in in_order(schedule):
            index[op] = len(index)
            crossed = [
                (index[before], None if b is None or ranks[b] == ranks[b + 1] else b)
                for before, b in needs
            ]
            self._ops.append((rank, crossed))
        self._links = costs.links
        self._between_nodes = [a // node != b // node for a, b in pairwise(ranks)]

    def span(self, disturbance: Disturbance = CALM, draws: int = 1) -> float:
        """Returns the mean span over the draws."""
        links = [
            link * (disturbance.slower_links if far else 1.0)
            for link, far in zip(self._links, self._between_nodes, strict=True)
        ]
        seconds = self._drawn(disturbance, draws)
        if disturbance.busy:
            received = [sum(links[b] for _, b in needs if b is not None) for _, needs in self._ops]
            seconds += np.array(received)[:, None]
            links = [0.0] * len(links)
        clock = [np.zeros(draws)] * self._ranks
        started: list[NDArray[np.float64] | None] = [None] * self._ranks
        ended: list[NDArray[np.float64]] = []
        for (rank, needs), took in zip(self._ops, seconds, strict=True):
            start = clock[rank]
            for before, boundary in needs:
                arrival = ended[before]
                start = np.maximum(
                    start, arrival if boundary is None else arrival + links[boundary]
                )
            if started[rank] is None:
                started[rank] = start
            clock[rank] = start + took
            ended.append(clock[rank])
        spans = [
            end - start for end, start in zip(clock, started, strict=True) if start is not None
        ]
        return mean(float(x) for x in np.max(spans, axis=0))

    def _drawn(self, disturbance: Disturbance, draws: int) -> NDArray[np.float64]:
        """Returns the seconds of each op in each draw."""
        draw, shape = np.random.Generator(np.random.Philox(0)), (len(self._seconds), draws)
        seconds = np.repeat(np.array(self._seconds)[:, None], draws, axis=1)
        if disturbance.spread:
            variance = math.log1p(disturbance.spread**2)
            seconds *= draw.lognormal(-variance / 2, math.sqrt(variance), shape)
        if disturbance.delay:
            seconds += draw.exponential(disturbance.delay, shape)
        return seconds
