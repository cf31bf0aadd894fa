"""Contiguous ranges of layers, one per stage.

counts (3, 2, 3)   layers  0 1 2 | 3 4 | 5 6 7
                   stage     0   |  1  |   2         bounds (0, 3, 5, 8)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import PartitionError

Cost = Literal["time", "parameters"]


@dataclass(frozen=True)
class Partition:
    """Number of layers on each stage. The layers of a stage are contiguous.

    Args:
        counts: At least one stage, and at least one layer on each.

    Raises:
        PartitionError: There is no stage, or a stage without layers.

    Example:
        >>> Partition((3, 2, 3)).bounds
        (0, 3, 5, 8)
        >>> Partition((3, 2, 3)).owner(4)
        1
    """

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts:
            raise PartitionError("a placement without stages; give at least one count of layers")
        for stage, count in enumerate(self.counts):
            if count < 1:
                raise PartitionError(
                    f"stage {stage} of the placement {self.counts} has {count} layers; every "
                    "stage needs at least 1"
                )

    @classmethod
    def from_bounds(cls, bounds: Sequence[int]) -> Partition:
        return cls(tuple(stop - start for start, stop in pairwise(bounds)))

    @property
    def layers(self) -> int:
        return self.bounds[-1]

    @property
    def stages(self) -> int:
        return len(self.counts)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """First layer of each stage, then the number of layers."""
        return tuple(accumulate(self.counts, initial=0))

    def range_of(self, stage: int) -> range:
        if not 0 <= stage < self.stages:
            raise PartitionError(f"stage {stage} of a placement on {self.stages} stages")
        return range(self.bounds[stage], self.bounds[stage + 1])

    def owner(self, layer: int) -> int:
        if not 0 <= layer < self.layers:
            raise PartitionError(f"layer {layer} of a placement of {self.layers} layers")
        return bisect_right(self.bounds, layer) - 1


class Move(NamedTuple):
    """`layer` goes from stage `source` to stage `target`."""

    layer: int
    source: int
    target: int


def moves(old: Partition, new: Partition) -> tuple[Move, ...]:
    """The layers whose stage changes, in layer order."""
    same_layers(old.layers, new.layers)
    both = ((layer, old.owner(layer), new.owner(layer)) for layer in range(old.layers))
    return tuple(Move(layer, source, target) for layer, source, target in both if source != target)


def imbalance(loads: Sequence[float]) -> float:
    """DynMo's dL = (max - min) / mean (section 2.2). 0 if nothing is loaded."""
    if not loads:
        raise PartitionError("the imbalance of no loads; give one load per stage")
    mean = math.fsum(loads) / len(loads)
    return (max(loads) - min(loads)) / mean if mean else 0.0


def weigh(layers: Sequence[LayerCost], cost: str) -> tuple[float, ...]:
    """One weight per layer: F + B + W in seconds, or the number of parameters.

    A frozen layer weighs as many parameters as a trained one. This fault of the baseline is kept.
    """
    if cost == "time":
        return tuple(layer.seconds for layer in layers)
    if cost == "parameters":
        return tuple(layer.parameters for layer in layers)
    raise PartitionError(f"unknown cost {cost!r}; choose one of time, parameters")


def stage_loads(weights: Sequence[float], partition: Partition) -> tuple[float, ...]:
    """The sum of the weights of each stage, correctly rounded."""
    same_layers(len(weights), partition.layers)
    return tuple(math.fsum(weights[start:stop]) for start, stop in pairwise(partition.bounds))


def uniform(layers: int, ranks: int) -> Partition:
    """Equally many layers on every stage. The first stages take the rest, as in DeepSpeed."""
    enough(layers, ranks)
    each, more = divmod(layers, ranks)
    return Partition((each + 1,) * more + (each,) * (ranks - more))


def enough(layers: int, ranks: int) -> None:
    """Checks that each rank can have a layer."""
    if ranks < 1:
        raise PartitionError(f"a placement on {ranks} ranks; at least 1 is needed")
    if layers < ranks:
        raise PartitionError(f"{ranks} ranks need at least {ranks} layers; the model has {layers}")


def same_layers(have: int, want: int) -> None:
    if have != want:
        raise PartitionError(
            f"{have} layers where {want} are expected; both must be of the same model"
        )
