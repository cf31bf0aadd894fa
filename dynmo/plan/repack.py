"""Fewer ranks for a model that has become small (DynMo, appendix C.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynmo.errors import PartitionError
from dynmo.plan.partition import Partition

Seconds = Callable[[Partition], float]
"""Predicted seconds of a step on a placement."""


@dataclass(frozen=True)
class Repack:
    """A placement on fewer ranks, and the predicted seconds of a step on it."""

    partition: Partition
    seconds: float


def fewest_ranks(
    place: Callable[[int], Partition | None],
    seconds: Seconds,
    limit: float,
    most: int,
    least: int = 1,
) -> Repack | None:
    """Finds the fewest ranks on which a step takes at most `limit` seconds.

    Every number of ranks from `least` to `most` is tried, fewest first, because a step need not
    become faster with each rank.

    Args:
        place: The best placement on so many ranks. None if nothing fits their memory.

    Returns:
        None if a step is too slow on any number of ranks, or nothing fits.

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


def kept_ranks(nodes: Sequence[str], count: int) -> tuple[int, ...]:
    """Chooses the ranks that stay when a run goes on with fewer, ascending.

    As many nodes as possible become empty, because a machine is free only when all of its ranks
    are. The smallest nodes go first, the last of equally small ones before the others. Rank 0
    always stays. A node that loses only some of its ranks loses the highest ones.

    Args:
        nodes: Name of the machine of each rank.
        count: Number of ranks that stay.

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
