"""Fewer ranks for a model that has become small (DynMo, appendix C.4).

Algorithm 4 merges ranks:

    8 ranks   3 3 3 3 3 3 3 3        first-fit merges neighbours while their memory fits one rank
    5 ranks   6 6 6 3 3

`fewest_ranks` asks for every number of ranks what the best placement would take, and returns the
fewest ranks that are fast enough. The published algorithms merge ranks by memory alone. They are
kept as baselines, by name. All of them keep the layers in order, so they merge neighbours only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dynmo.balance.partition import Partition
from dynmo.errors import PartitionError

Seconds = Callable[[Partition], float]
"""Predicted seconds of a step on a placement."""


@dataclass(frozen=True)
class Repack:
    """A placement on fewer ranks.

    Attributes:
        partition: The layers of each rank.
        seconds: Predicted seconds of a step.
    """

    partition: Partition
    seconds: float


def fewest_ranks(
    place: Callable[[int], Partition | None],
    seconds: Seconds,
    limit: float,
    most: int,
    least: int = 1,
) -> Repack | None:
    """Finds the fewest ranks on which a step is fast enough.

    Every number of ranks is tried, fewest first, because a step need not become faster with each
    rank.

    Args:
        place: The best placement on so many ranks. None if nothing fits their memory.
        seconds: Predicts the seconds of a step.
        limit: The most seconds that a step may take.
        most: The ranks that there are.
        least: The fewest ranks to consider.

    Returns:
        The placement. None if a step is too slow on any number of ranks, or nothing fits.

    Raises:
        PartitionError: `least` is not between 1 and `most`.

    Example:
        >>> even = lambda ranks: Partition((12 // ranks,) * ranks) if 12 % ranks == 0 else None
        >>> choice = fewest_ranks(even, lambda partition: max(partition.counts), limit=4, most=6)
        >>> choice.partition.counts
        (4, 4, 4)
    """
    if not 1 <= least <= most:
        raise PartitionError(f"at least {least} of {most} ranks cannot be; give 1 to {most}")
    for ranks in range(least, most + 1):
        partition = place(ranks)
        if partition is not None and (taken := seconds(partition)) <= limit:
            return Repack(partition, taken)
    return None


def first_fit(
    partition: Partition, memory: Sequence[float], limit: float, target: int
) -> Partition:
    """Algorithm 4: merges each rank into the next one if both fit.

    It stops when `target` ranks are left.
    """
    left, rank = _loads(partition, memory), 0
    while rank + 1 < len(left) and len(left) > target:
        if left[rank].bytes + left[rank + 1].bytes < limit:
            left[rank : rank + 2] = [left[rank].with_next(left[rank + 1])]
        else:
            rank += 1
    return Partition(tuple(load.layers for load in left))


def best_fit(partition: Partition, memory: Sequence[float], limit: float, target: int) -> Partition:
    """Merges like `first_fit`, but the neighbours that leave the least room first."""
    left = _loads(partition, memory)
    while len(left) > target:
        fitting = [
            (a.bytes + b.bytes, -rank)
            for rank, (a, b) in enumerate(pairwise(left))
            if a.bytes + b.bytes < limit
        ]
        if not fitting:
            break
        rank = -max(fitting)[1]
        left[rank : rank + 2] = [left[rank].with_next(left[rank + 1])]
    return Partition(tuple(load.layers for load in left))


def round_robin(
    partition: Partition, memory: Sequence[float], limit: float, target: int
) -> Partition:
    """Merges like `first_fit`, but one pair after the other.

    It begins again behind the last pair.
    """
    left, rank, misses = _loads(partition, memory), 0, 0
    while 1 < len(left) > target and misses < len(left):
        rank = 0 if rank + 1 >= len(left) else rank
        fits = left[rank].bytes + left[rank + 1].bytes < limit
        if fits:
            left[rank : rank + 2] = [left[rank].with_next(left[rank + 1])]
        misses = 0 if fits else misses + 1
        rank += 1
    return Partition(tuple(load.layers for load in left))


def halving(partition: Partition, memory: Sequence[float], limit: float, target: int) -> Partition:
    """PipeTransformer: merges all pairs of neighbours at once.

    It merges only if every pair fits and at least `target` ranks are left.
    """
    left = _loads(partition, memory)
    while len(left) % 2 == 0 and len(left) // 2 >= target:
        pairs = list(zip(left[::2], left[1::2], strict=True))
        if any(a.bytes + b.bytes >= limit for a, b in pairs):
            break
        left = [a.with_next(b) for a, b in pairs]
    return Partition(tuple(load.layers for load in left))


BASELINES: dict[str, Callable[[Partition, Sequence[float], float, int], Partition]] = {
    "first-fit": first_fit,
    "best-fit": best_fit,
    "round-robin": round_robin,
    "halving": halving,
}


def kept_ranks(nodes: Sequence[str], count: int) -> tuple[int, ...]:
    """Chooses the ranks that stay when a run goes on with fewer.

    As many nodes as possible become empty, because a machine is free only when all of its ranks
    are. The smallest nodes go first, the last of equally small ones before the others. Rank 0
    always stays. A node that loses only some of its ranks loses the highest ones.

    Args:
        nodes: Name of the machine of each rank.
        count: Number of ranks that stay.

    Returns:
        The ranks that stay, ascending.

    Raises:
        PartitionError: `count` is not between 1 and the number of ranks.

    Example:
        >>> kept_ranks(("a", "a", "b", "b", "b", "c", "c"), 5)
        (0, 1, 2, 3, 4)
    """
    if not 1 <= count <= len(nodes):
        raise PartitionError(f"{count} of {len(nodes)} ranks cannot stay; give 1 to {len(nodes)}")
    sizes = Counter(nodes)
    last = {node: rank for rank, node in enumerate(nodes)}
    order = sorted(sizes, key=lambda node: (node == nodes[0], sizes[node], -last[node]))
    place = {node: position for position, node in enumerate(order)}
    leaving = sorted(range(1, len(nodes)), key=lambda rank: (place[nodes[rank]], -rank))
    return tuple(sorted({*range(len(nodes))} - {*leaving[: len(nodes) - count]}))


@dataclass(frozen=True)
class _Load:
    """Neighbouring layers of one rank: how many, and their bytes."""

    layers: int
    bytes: float

    def with_next(self, other: _Load) -> _Load:
        return _Load(self.layers + other.layers, self.bytes + other.bytes)


def _loads(partition: Partition, memory: Sequence[float]) -> list[_Load]:
    if len(memory) != partition.layers:
        raise PartitionError(
            f"{len(memory)} sizes for {partition.layers} layers; give one for each layer"
        )
    ranges: Iterator[range] = map(partition.range_of, range(partition.stages))
    return [_Load(len(layers), sum(memory[layer] for layer in layers)) for layers in ranges]
