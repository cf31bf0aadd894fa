"""Diffusion along the pipeline. It keeps the order of the layers.

    loads        9       3       3      mean 5
    flow     0   |  +4   |  +2   |   0          prefix of the loads - i * mean, over boundary i
    layers     4 3 2 | 2 1 | 1 2

One layer at a time may cross each boundary. It goes downstream if the flow is positive. With links,
the time of sending a stage's output counts as a part of its load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dynmo.cost.layer_cost import LinkCost
from dynmo.errors import PartitionError
from dynmo.plan.bisection import Chain, integer_sums
from dynmo.plan.partition import Move, Partition, moves

Fits = Callable[[int, int, int], bool]
"""(stage, start, stop) -> do the layers start..stop-1 fit the stage? See `MemoryLimits.fits`."""
Sending = Callable[[int, int], int]
"""(stage, stop) -> the time of sending the output of layer stop-1, in units of the sums."""


@dataclass(frozen=True)
class Diffusion:
    """The result of a diffusion: the placement before the first round, and after each one."""

    placements: tuple[Partition, ...]

    @property
    def partition(self) -> Partition:
        return self.placements[-1]

    @property
    def rounds(self) -> int:
        return len(self.placements) - 1

    @property
    def moves(self) -> tuple[Move, ...]:
        """The layers' crossings of a boundary, in the order made."""
        return tuple(move for pair in pairwise(self.placements) for move in moves(*pair))


def diffuse(
    weights: Sequence[float],
    current: Partition,
    *,
    fits: Fits | None = None,
    links: Sequence[LinkCost] | None = None,
    output_bytes: Sequence[int] | None = None,
) -> Diffusion:
    """Path diffusion: per round at most one layer crosses each boundary, to the neighbouring stage.

    A round is accepted when the loads, sorted from the largest, fall lexicographically, and every
    stage that gains a layer `fits`. No placement therefore comes back, and the diffusion ends. It
    ends when neither the flows nor one path between two stages lower the loads further. The result
    is usually within one layer of `exact`, without a guarantee.

    `links` and `output_bytes` count as in `partition.exact`: a stage's load is its work plus the
    time of sending its output (DynMo, E.1).
    """
    sums = weight_sums(weights, current)
    sends = Chain(weights, current.stages, None, None, links, output_bytes).sends
    sending = _sending(np.rint(sends).astype(np.int64).tolist())
    placements = [current]
    while (better := _next_round(sums, sending, placements[-1].bounds, fits)) is not None:
        placements.append(Partition.from_bounds(better))
    return Diffusion(tuple(placements))


def weight_sums(weights: Sequence[float], current: Partition) -> list[int]:
    if len(weights) != current.layers:
        raise PartitionError(
            f"{len(weights)} weights for a placement of {current.layers} layers; "
            "give one weight per layer"
        )
    return integer_sums(weights)


def _sending(units: list[list[int]]) -> Sending:
    return lambda stage, stop: units[stage][stop] if len(units[stage]) > 1 else 0


def _next_round(
    sums: Sequence[int], sending: Sending, bounds: Sequence[int], fits: Fits | None
) -> list[int] | None:
    before = sorted(_loads(sums, sending, bounds), reverse=True)
    for better in _candidates(sums, sending, bounds):
        if (
            any(start >= stop for start, stop in pairwise(better))
            or sorted(_loads(sums, sending, better), reverse=True) >= before
        ):
            continue
        if fits is None or all(
            fits(stage, start, stop)
            for stage, (start, stop) in enumerate(pairwise(better))
            if start < bounds[stage] or stop > bounds[stage + 1]
        ):
            return better
    return None


def _candidates(
    sums: Sequence[int], sending: Sending, bounds: Sequence[int]
) -> Iterator[list[int]]:
    """Placements to try in a round.

    The first one shifts every boundary over which a layer lessens the flow, together. Then one
    layer moves along the path from one stage to another. Paths from the most loaded to the least
    loaded come first. The paths get a load down a slope such as 4 3 2, where no neighbours can
    trade.
    """
    ranks = len(bounds) - 1
    load = _loads(sums, sending, bounds)
    total, sent = sum(load), 0
    shifted = list(bounds)
    for i in range(1, ranks):
        sent += sending(i - 1, bounds[i])
        # The flow is multiplied by the number of ranks, to stay with integers.
        wanted = i * total - ranks * sent
        shifted[i] = min(
            (bounds[i], bounds[i] - 1, bounds[i] + 1),
            key=lambda b, wanted=wanted: abs(sums[b] * ranks - wanted),
        )
    yield shifted
    order = sorted(range(ranks), key=lambda stage: (-load[stage], stage))
    for source in order:
        for target in reversed(order):
            if load[target] < load[source]:
                low, high, step = (source, target, -1) if source < target else (target, source, 1)
                yield [bound + step * (low < i <= high) for i, bound in enumerate(bounds)]


def _loads(sums: Sequence[int], sending: Sending, bounds: Sequence[int]) -> list[int]:
    return [
        sums[stop] - sums[start] + sending(stage, stop)
        for stage, (start, stop) in enumerate(pairwise(bounds))
    ]
