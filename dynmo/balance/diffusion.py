"""Diffusion along the pipeline, which keeps the order of the layers; and DynMo's Algorithm 3 as
published, which does not.

loads        9       3       3      mean 5
flow     0   |  +4   |  +2   |   0          prefix of the loads - i * mean, over boundary i
layers     4 3 2 | 2 1 | 1 2                over each boundary, one layer at a time may cross, downstream where the flow is positive
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dynmo.balance.chains import integer_sums
from dynmo.balance.partition import Move, Partition, moves
from dynmo.errors import PartitionError

Fits = Callable[[int, int, int], bool]
"""(stage, start, stop) -> whether the layers start..stop-1 fit the stage, as
`MemoryLimits.fits`."""


@dataclass(frozen=True)
class Diffusion:
    """What a diffusion arrived at: in how many rounds, and each layer's crossing of a boundary in
    the order made."""

    partition: Partition
    rounds: int
    moves: tuple[Move, ...]


def diffuse(weights: Sequence[float], current: Partition, *, fits: Fits | None = None) -> Diffusion:
    """Path diffusion from `current`: in each round at most one layer crosses each boundary, to the
    neighbouring stage.

    A round is accepted when the loads, sorted from the largest, fall lexicographically, and every
    stage that gains a layer `fits`. So no placement comes back, and it ends. It ends where neither
    the flows nor one path between two stages lower the loads further: as a rule within one layer of
    `exact`, without a promise. Raises PartitionError for weights of another number of layers,
    negative or not finite.
    """
    if len(weights) != current.layers:
        raise PartitionError(
            f"{len(weights)} weights for a placement of {current.layers} layers; give one weight per layer"
        )
    sums = integer_sums(weights)
    bounds, crossings, rounds = list(current.bounds), list[Move](), 0
    while (better := _next_round(sums, bounds, fits)) is not None:
        crossings.extend(moves(Partition.from_bounds(bounds), Partition.from_bounds(better)))
        bounds, rounds = better, rounds + 1
    return Diffusion(Partition.from_bounds(bounds), rounds, tuple(crossings))


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
    """First every boundary over which a layer lessens the flow, together; then one layer along the
    path from one stage to another, from the most loaded to the least loaded first. The paths are
    what gets a load down a slope such as 4 3 2, where no neighbours can trade.
    """
    ranks, total = len(bounds) - 1, sums[-1]
    shifted = list(bounds)
    for i in range(1, ranks):
        # The flow times the number of ranks, to stay with integers.
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
    """What Algorithm 3 arrived at: the layers of each rank in the order in which the rank holds
    them, and the transfers in order."""

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
    """DynMo's Algorithm 3 (appendix C.3), a baseline on loads alone. The runtime never uses it.

    Every overloaded rank offers its lightest layer to the least loaded rank, wherever that sits;
    the receiver appends it. A rank then holds layers that are not neighbours, and the network would
    run in another order: so the result is sets of layers, not a `Partition`. As published, memory
    is a sum of bytes per layer, whatever the schedule keeps.

    Where the printed text compares with the variance of the start of the iteration, this compares
    with the variance as it is now: the stale one accepts transfers that make the balance worse.
    Stops after `iterations`, or after one that accepts nothing.
    """
    if len(weights) != current.layers:
        raise PartitionError(
            f"{len(weights)} weights for a placement of {current.layers} layers; give one weight per layer"
        )
    if (layer_bytes is None) != (limits is None):
        raise PartitionError(
            "a memory check needs both layer_bytes and limits; give both or neither"
        )
    sums = integer_sums(weights)
    weight = [stop - start for start, stop in pairwise(sums)]
    ranks = [list(current.range_of(rank)) for rank in range(current.ranks)]
    load = [sum(weight[layer] for layer in held) for held in ranks]
    done: list[Move] = []
    for _ in range(iterations):
        accepted = len(done)
        overloaded = [
            rank for rank in range(current.ranks) if load[rank] * current.ranks > sums[-1]
        ]
        for source in overloaded:
            target = min(range(current.ranks), key=lambda rank: load[rank])
            layer = min(ranks[source], key=lambda held: weight[held], default=None)
            if layer is None or target == source:
                continue
            # Two loads change and the mean does not: the variance falls by 2 w (load of source -
            # load of target - w) / ranks.
            if weight[layer] * (load[source] - load[target] - weight[layer]) <= 0:
                continue
            if layer_bytes is not None and limits is not None:
                held = sum(layer_bytes[other] for other in ranks[target])
                if held + layer_bytes[layer] > limits[target]:
                    continue
            ranks[source].remove(layer)
            ranks[target].append(layer)
            load[source] -= weight[layer]
            load[target] += weight[layer]
            done.append(Move(layer, source, target))
        if len(done) == accepted:
            break
    return Transfers(tuple(map(tuple, ranks)), tuple(done))
