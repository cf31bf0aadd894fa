"""Diffusion along the pipeline. It keeps the order of the layers.

    loads        9       3       3      mean 5
    flow     0   |  +4   |  +2   |   0          prefix of the loads - i * mean, over boundary i
    layers     4 3 2 | 2 1 | 1 2

One layer at a time may cross each boundary. It goes downstream if the flow is positive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dynmo.balance.chains import integer_sums
from dynmo.balance.partition import Move, Partition, moves
from dynmo.errors import PartitionError

Fits = Callable[[int, int, int], bool]
"""(stage, start, stop) -> do the layers start..stop-1 fit the stage? See `MemoryLimits.fits`."""


@dataclass(frozen=True)
class Diffusion:
    """The result of a diffusion.

    `moves` are the layers' crossings of a boundary, in the order made.
    """

    partition: Partition
    rounds: int
    moves: tuple[Move, ...]


def diffuse(weights: Sequence[float], current: Partition, *, fits: Fits | None = None) -> Diffusion:
    """Path diffusion: per round at most one layer crosses each boundary, to the neighbouring stage.

    A round is accepted when the loads, sorted from the largest, fall lexicographically, and every
    stage that gains a layer `fits`. No placement therefore comes back, and the diffusion ends. It
    ends when neither the flows nor one path between two stages lower the loads further. The result
    is usually within one layer of `exact`, without a guarantee.
    """
    sums = weight_sums(weights, current)
    bounds, crossings, rounds = list(current.bounds), list[Move](), 0
    while (better := _next_round(sums, bounds, fits)) is not None:
        crossings.extend(moves(Partition.from_bounds(bounds), Partition.from_bounds(better)))
        bounds, rounds = better, rounds + 1
    return Diffusion(Partition.from_bounds(bounds), rounds, tuple(crossings))


def weight_sums(weights: Sequence[float], current: Partition) -> list[int]:
    if len(weights) != current.layers:
        raise PartitionError(
            f"{len(weights)} weights for a placement of {current.layers} layers; "
            "give one weight per layer"
        )
    return integer_sums(weights)


def _next_round(sums: Sequence[int], bounds: list[int], fits: Fits | None) -> list[int] | None:
    before = _sorted_loads(sums, bounds)
    for better in _candidates(sums, bounds):
        if (
            any(start >= stop for start, stop in pairwise(better))
            or _sorted_loads(sums, better) >= before
        ):
            continue
        if fits is None or all(
            fits(stage, start, stop)
            for stage, (start, stop) in enumerate(pairwise(better))
            if start < bounds[stage] or stop > bounds[stage + 1]
        ):
            return better
    return None


def _candidates(sums: Sequence[int], bounds: list[int]) -> Iterator[list[int]]:
    """Placements to try in a round.

    The first one shifts every boundary over which a layer lessens the flow, together. Then one
    layer moves along the path from one stage to another. Paths from the most loaded to the least
    loaded come first. The paths get a load down a slope such as 4 3 2, where no neighbours can
    trade.
    """
    ranks, total = len(bounds) - 1, sums[-1]
    shifted = list(bounds)
    for i in range(1, ranks):
        # The flow is multiplied by the number of ranks, to stay with integers.
        shift = min(
            (bounds[i], bounds[i] - 1, bounds[i] + 1),
            key=lambda b: abs(sums[b] * ranks - i * total),
        )
        shifted[i] = shift
    yield shifted
    load = [sums[stop] - sums[start] for start, stop in pairwise(bounds)]
    order = sorted(range(ranks), key=lambda stage: (-load[stage], stage))
    for source in order:
        for target in reversed(order):
            if load[target] < load[source]:
                low, high, step = (source, target, -1) if source < target else (target, source, 1)
                yield [bound + step * (low < i <= high) for i, bound in enumerate(bounds)]


def _sorted_loads(sums: Sequence[int], bounds: Sequence[int]) -> list[int]:
    return sorted((sums[stop] - sums[start] for start, stop in pairwise(bounds)), reverse=True)
