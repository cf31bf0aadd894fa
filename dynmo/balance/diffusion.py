"""Diffusion along the pipeline, and DynMo's Algorithm 3 as published.

Diffusion keeps the order of the layers. Algorithm 3 does not.

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

    Attributes:
        partition: The placement.
        rounds: Number of rounds.
        moves: Each layer's crossing of a boundary, in the order made.
    """

    partition: Partition
    rounds: int
    moves: tuple[Move, ...]


def diffuse(weights: Sequence[float], current: Partition, *, fits: Fits | None = None) -> Diffusion:
    """Path diffusion: per round at most one layer crosses each boundary.

    A layer goes to the neighbouring stage. A round is accepted when the loads, sorted from the
    largest, fall lexicographically, and every stage that gains a layer `fits`. No placement
    therefore comes back, and the diffusion ends. It ends when neither the flows nor one path
    between two stages lower the loads further. The result is usually within one layer of `exact`,
    without a guarantee.

    Args:
        weights: Load of each layer.
        current: The placement to start from.
        fits: Checks the memory of a stage. None: everything fits.

    Raises:
        PartitionError: The weights are for another number of layers, negative or not finite.
    """
    sums = _weight_sums(weights, current)
    bounds, crossings, rounds = list(current.bounds), list[Move](), 0
    while (better := _next_round(sums, bounds, fits)) is not None:
        crossings.extend(moves(Partition.from_bounds(bounds), Partition.from_bounds(better)))
        bounds, rounds = better, rounds + 1
    return Diffusion(Partition.from_bounds(bounds), rounds, tuple(crossings))


def _weight_sums(weights: Sequence[float], current: Partition) -> list[int]:
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


@dataclass(frozen=True)
class Transfers:
    """The result of Algorithm 3.

    Attributes:
        ranks: The layers of each rank, in the order in which the rank holds them.
        moves: The transfers in order.
    """

    ranks: tuple[tuple[int, ...], ...]
    moves: tuple[Move, ...]


def published_diffusion(
    weights: Sequence[float],
    current: Partition,
    *,
    layer_bytes: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
    iterations: int = 100,
) -> Transfers:
    """DynMo's Algorithm 3 (appendix C.3), a baseline on loads alone.

    The runtime never uses it.

    Every overloaded rank offers its lightest layer to the least loaded rank, wherever that sits.
    The receiver appends it. A rank then holds layers that are not neighbours, and the network would
    run in another order. The result is therefore sets of layers, not a `Partition`. As published,
    memory is a sum of bytes per layer, whatever the schedule keeps.

    The printed text compares with the variance of the start of the iteration. This function
    compares with the present variance, because the stale one accepts transfers that worsen the
    balance.

    Args:
        weights: Load of each layer.
        current: The placement to start from.
        layer_bytes: Bytes of each layer. Needs `limits`.
        limits: Bytes of each rank. Needs `layer_bytes`.
        iterations: The most iterations. An iteration that accepts nothing is the last.

    Raises:
        PartitionError: The weights are for another number of layers, or only one of `layer_bytes`
            and `limits` is given.
    """
    sums = _weight_sums(weights, current)
    if (layer_bytes is None) != (limits is None):
        raise PartitionError(
            "a memory check needs both layer_bytes and limits; give both or neither"
        )
    weight = [stop - start for start, stop in pairwise(sums)]
    ranks = [list(current.range_of(rank)) for rank in range(current.stages)]
    load = [sum(weight[layer] for layer in held) for held in ranks]

    def has_room(target: int, layer: int) -> bool:
        if layer_bytes is None or limits is None:
            return True
        held = sum(layer_bytes[other] for other in ranks[target])
        return held + layer_bytes[layer] <= limits[target]

    done: list[Move] = []
    for _ in range(iterations):
        accepted = len(done)
        overloaded = [
            rank for rank in range(current.stages) if load[rank] * current.stages > sums[-1]
        ]
        for source in overloaded:
            target = min(range(current.stages), key=lambda rank: load[rank])
            layer = min(ranks[source], key=lambda held: weight[held], default=None)
            if layer is None or target == source:
                continue
            # Two loads change and the mean does not. The variance falls by
            # 2 w (load of source - load of target - w) / ranks.
            falls = weight[layer] * (load[source] - load[target] - weight[layer]) > 0
            if not falls or not has_room(target, layer):
                continue
            ranks[source].remove(layer)
            ranks[target].append(layer)
            load[source] -= weight[layer]
            load[target] += weight[layer]
            done.append(Move(layer, source, target))
        if len(done) == accepted:
            break
    return Transfers(tuple(map(tuple, ranks)), tuple(done))
