"""Other algorithms that merge ranks by memory alone (DynMo, appendix C.4).

`dynmo.plan.balancers` has first-fit, DynMo's own (algorithm 4). Each of these is a rule for
`elastic.algorithm = "python:benchmarks.baselines.merging:NAME"`. The arguments are a placement, the
bytes of each layer, the bytes that a rank must stay under, and the fewest ranks. All keep the
layers in order, so they merge neighbours only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dynmo.errors import PartitionError
from dynmo.plan.partition import Partition


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
