"""Contiguous ranges of layers, one per stage, and the exact way to choose them.

    counts (3, 2, 3)   layers  0 1 2 | 3 4 | 5 6 7
                       stage     0   |  1  |   2         bounds (0, 3, 5, 8)

Every rank has one stage here. For several stages per rank, see `chunks`.

Loads are integers (`chains.integer_sums`). The bottleneck is therefore a sum of layers, never a
number near one, and a tie is a tie.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.errors import PartitionError
from dynmo.plan.chains import Problem, enough, same_layers
from dynmo.schedule.memory import MemoryLimits

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


def exact(
    weights: Sequence[float],
    ranks: int,
    *,
    memory: MemoryLimits | None = None,
    current: Partition | None = None,
    move_bytes: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    links: Sequence[LinkCost] | None = None,
    output_bytes: Sequence[int] | None = None,
) -> Partition:
    """Places contiguous layers so that the largest stage time is least (DynMo, section 3.3).

    A stage's time is its load divided by its rank's speed, plus the time of sending its output.
    Sending takes links[s].seconds(output_bytes of its last layer). The last stage sends nothing.
    This is DynMo's reading of a slow network (E.1): the work of A and the transfer after it should
    equal the work of B.

    Ties are resolved in this order:

    1. the fewest bytes moved away from `current` (`move_bytes` of each layer, or layers)
    2. the least sum of squared times, then of squared counts
    3. the last boundaries nearest to the front

    Weights that are not small integers count in units of 2^-52 of their sum. Times are squared in
    whole units of 2^-25 of the bottleneck or finer. If there are too many ties, only those near
    `current`, or near an even spread, are compared.

    Raises:
        PartitionError: There are fewer layers than ranks, a number is negative or not finite, or no
            placement fits `memory`.
    """
    problem = Problem(weights, ranks, memory, speeds, links, output_bytes)
    if current is not None:
        same_layers(current.layers, problem.layers)
    if move_bytes is not None:
        same_layers(len(move_bytes), problem.layers)
    sizes = [1] * problem.layers if move_bytes is None else move_bytes
    bottleneck = problem.least_bottleneck()
    return Partition.from_bounds(
        problem.best_tie(bottleneck, None if current is None else current.bounds, sizes)
    )


def ties(
    weights: Sequence[float],
    ranks: int,
    *,
    memory: MemoryLimits | None = None,
    current: Partition | None = None,
    move_bytes: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
) -> list[Partition]:
    """Some of the placements with the least largest stage time, all different."""
    problem = Problem(weights, ranks, memory, speeds)
    if current is not None:
        same_layers(current.layers, problem.layers)
    bottleneck = problem.least_bottleneck()
    sizes = [1] * problem.layers if move_bytes is None else move_bytes
    tied_bounds = [problem.best_tie(bottleneck, None, sizes), *problem.extremes(bottleneck)]
    if current is not None:
        tied_bounds.insert(0, problem.best_tie(bottleneck, current.bounds, sizes))
    return [Partition.from_bounds(bounds) for bounds in dict.fromkeys(map(tuple, tied_bounds))]
