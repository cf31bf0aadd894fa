"""Which layers, stages and ranks belong together: placements, layouts, meshes.

counts (3, 2, 3)   layers  0 1 2 | 3 4 | 5 6 7       contiguous ranges of layers, one per stage
                   stage     0   |  1  |   2         bounds (0, 3, 5, 8)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import ConfigError, PartitionError, ScheduleError
from dynmo.schedule.catalogue import (
    check_microbatches,
    chunks_of,
    full_schedule,
    stage_ranks_of,
)
from dynmo.schedule.op import Schedule

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
        for stage, count in enumerate(self.counts or (0,)):
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


def imbalance(loads: Sequence[float]) -> float:
    """DynMo's dL = (max - min) / mean (section 2.2). 0 if nothing is loaded."""
    mean = math.fsum(loads) / len(loads)
    return (max(loads) - min(loads)) / mean if mean else 0.0


def weigh(layers: Sequence[LayerCost], cost: Cost) -> tuple[float, ...]:
    """One weight per layer: F + B + W in seconds, or the number of parameters.

    A frozen layer weighs as many parameters as a trained one. This fault of the baseline is kept.
    """
    return tuple(layer.seconds if cost == "time" else layer.parameters for layer in layers)


def stage_loads(weights: Sequence[float], partition: Partition) -> tuple[float, ...]:
    """The sum of the weights of each stage, correctly rounded."""
    assert len(weights) == partition.layers
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


# -- the layout of a model: layers of each stage, rank of each stage, microbatches -----------------
#
#     layers      e  a f | a  f a | f a  f | a f  h
#     stages         0   |   1    |   2    |   3
#     ranks          0   |   1    |   1    |   0
#
# A pipeline has one layout at a time. It gets another one if layers move (the same ranks) or if the
# mesh is reshaped (more replicas of fewer ranks, or the reverse).

RecomputeRule = Collection[int] | Callable[[Partition, Schedule, int], Collection[int]]
"""The layers that are recomputed in B, or a pure function that returns them.

The function takes a placement, the schedule with every stage training, and the number of
replicas."""


@dataclass(frozen=True)
class Layout:
    """The layout of one pipeline of a mesh.

    `sliced`: the pipeline's ranks are slices of one GPU, in one process.
    """

    schedule: str
    ranks: int
    replicas: int
    microbatches: int
    partition: Partition
    stage_ranks: tuple[int, ...]
    recomputed: frozenset[int]
    sliced: bool = False

    @property
    def processes(self) -> tuple[int, ...]:
        """The rank of the world that holds each stage."""
        return (0,) * len(self.stage_ranks) if self.sliced else self.stage_ranks

    @property
    def shape(self) -> tuple[int, int]:
        """Ranks (or slices) of a pipeline, and number of replicas."""
        return self.ranks, self.replicas

    def stages_of(self, process: int) -> tuple[int, ...]:
        return tuple(stage for stage, holder in enumerate(self.processes) if holder == process)

    def rank_of(self, layer: int) -> int:
        """The rank of the world that holds the layer."""
        return self.processes[self.partition.owner(layer)]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Pairs of ranks of the world that hold neighbouring stages, the lower first."""
        return sorted(
            {(min(pair), max(pair)) for pair in pairwise(self.processes) if pair[0] != pair[1]}
        )


@dataclass(frozen=True)
class Layouts:
    """Makes the layouts that one pipeline can have, for one model.

    Attributes:
        schedule: Name of the first layout's schedule.
        accumulation_groups: Number of accumulation groups of the whole mesh.
        shapes: Names of all schedules that a layout may have. Empty: the first one's alone.
    """

    layers: int
    schedule: str
    chunks: int | None
    accumulation_groups: int
    recompute: RecomputeRule
    sliced: bool = False
    shapes: tuple[str, ...] = ()

    def make(
        self,
        ranks: int,
        replicas: int,
        microbatches: int,
        partition: Partition | None = None,
        schedule: str | None = None,
    ) -> Layout:
        """Makes a layout. Without a placement, each stage has equally many layers.

        Raises:
            InputError: The numbers or the placement do not fit the model, the schedule or each
                other.
        """
        schedule = schedule or self.schedule
        if schedule not in (self.schedule, *self.shapes):
            raise ConfigError(
                f"the schedule stays {self.schedule}, so it cannot become {schedule}; use "
                'schedule = "auto"'
            )
        check_microbatches(schedule, ranks, microbatches)
        problem = accumulation_problem(self.accumulation_groups, replicas, replicas * microbatches)
        if problem:
            raise ConfigError(
                f"accumulation groups: {self.accumulation_groups} {problem}; "
                "use another number of groups, replicas or microbatches"
            )
        stage_ranks = stage_ranks_of(schedule, ranks, self.chunks)
        partition = partition or uniform(self.layers, len(stage_ranks))
        layers, stages = self.layers, len(stage_ranks)
        if (partition.layers, partition.stages) != (layers, stages):
            unit = "ranks" if stages == ranks else "stages"
            raise PartitionError(
                f"a placement of {partition.layers} layers on {partition.stages} {unit}, for "
                f"{layers} layers on {stages} {unit}"
            )
        recompute = self.recompute
        if callable(recompute):
            recompute = recompute(
                partition, full_schedule(schedule, ranks, microbatches, self.chunks), replicas
            )
        recomputed, sizes = frozenset(recompute), (ranks, replicas, microbatches)
        return Layout(schedule, *sizes, partition, stage_ranks, recomputed, self.sliced)

    def resized(
        self,
        layout: Layout,
        ranks: int,
        replicas: int,
        partition: Partition | None = None,
        microbatches: int | None = None,
    ) -> Layout:
        """The same batch on another number of ranks.

        `microbatches` are those of a step, of all replicas. None: the present number.

        Raises:
            InputError: The replicas do not divide the microbatches, or as `make`.
        """
        batch = microbatches or layout.microbatches * layout.replicas
        microbatches, rest = divmod(batch, replicas)
        if rest:
            raise ConfigError(
                f"{replicas} replicas do not divide the {batch} microbatches of a step"
            )
        # The present schedule stays if the placement has as many stages.
        fitting = (
            name
            for name in (layout.schedule, *self.shapes)
            if partition and len(stage_ranks_of(name, ranks, self.chunks)) == partition.stages
        )
        schedule = next(fitting, layout.schedule)
        return self.make(ranks, replicas, microbatches, partition, schedule)


def moves_between_ranks(
    old: Partition,
    new: Partition,
    stage_ranks: Sequence[int] | None = None,
    new_stage_ranks: Sequence[int] | None = None,
) -> tuple[Move, ...]:
    """The layers whose rank changes, in layer order. Sources and targets are ranks, not stages.

    `new_stage_ranks` are the ranks of the new stages, if those are others. Without `stage_ranks`,
    each stage is a rank.
    """
    assert old.layers == new.layers, "both are of the same model"
    if stage_ranks is None:
        stage_ranks = range(max(old.stages, new.stages))
    targets = stage_ranks if new_stage_ranks is None else new_stage_ranks
    return tuple(
        Move(layer, source, target)
        for layer in range(old.layers)
        if (source := stage_ranks[old.owner(layer)]) != (target := targets[new.owner(layer)])
    )


# -- the meshes that ranks can form, their accumulation groups, and the ranks that stay ------------


def accumulation_problem(groups: int, replicas: int, microbatches: int) -> str | None:
    """Why a number of accumulation groups does not fit a mesh, or None if it does.

    The microbatches are those of a step, over all replicas. The answer is the end of a sentence
    that begins with the number of groups.
    """
    if microbatches % groups:
        return f"does not divide the {microbatches} microbatches of a step"
    each, rest = divmod(groups, replicas)
    if rest or (replicas > 1 and each & (each - 1)):
        return f"is not {replicas} (replicas) times a power of two"
    return None


@dataclass(frozen=True)
class MeshRule:
    """What every mesh of a run must fit.

    Microbatches of a step and accumulation groups are those of all replicas. `layers` is None if
    the model is not known.
    """

    schedule: str
    chunks: int | None
    microbatches: int
    groups: int
    layers: int | None

    def shapes(self, ranks: int) -> tuple[tuple[int, int], ...]:
        """(ranks of a pipeline, replicas) of each mesh of so many ranks, fewest replicas first."""
        chunks, shapes = chunks_of(self.schedule, self.chunks), list[tuple[int, int]]()
        for replicas in divisors(math.gcd(ranks, self.microbatches)):
            pipeline = ranks // replicas
            try:
                check_microbatches(self.schedule, pipeline, self.microbatches // replicas)
            except ScheduleError:
                continue
            fits = accumulation_problem(self.groups, replicas, self.microbatches) is None
            if fits and (self.layers is None or pipeline * chunks <= self.layers):
                shapes.append((pipeline, replicas))
        return tuple(shapes)

    def suggest_groups(self, replicas: Collection[int]) -> str:
        """Numbers of accumulation groups that fit all these numbers of replicas, for a message."""
        fitting = [
            str(n)
            for n in divisors(self.microbatches)
            if not any(accumulation_problem(n, r, self.microbatches) for r in replicas)
        ]
        return " or ".join(fitting[:4]) if fitting else "another train.global_batch"


def divisors(total: int) -> list[int]:
    return sorted(
        {d for i in range(1, math.isqrt(total) + 1) if total % i == 0 for d in (i, total // i)}
    )


def nearest_divisors(value: int, total: int) -> str:
    """The divisors of `total` next to `value`, for an error message."""
    found = divisors(total)
    below, above = [d for d in found if d < value], [d for d in found if d > value]
    return ", ".join(map(str, below[-1:] + above[:1]))


def kept_ranks(
    nodes: Sequence[str], count: int, speeds: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Chooses the ranks that stay when a run goes on with fewer, ascending.

    As many nodes as possible become empty, because a machine is free only when all of its ranks
    are. The smallest nodes go first, the last of equally small ones before the others. The one
    without a name goes last. A node that loses only some of its ranks loses the highest ones.

    Slow ranks go before all others, except for the first one of the machine without a name.

    Args:
        nodes: Name of the machine of each rank. Empty for the one that cannot be given back.
        count: Number of ranks that stay.
        speeds: Speed of each rank. None: all are equally fast.

    Example:
        >>> kept_ranks(("a", "a", "b", "b", "b", "c", "c"), 5)
        (0, 1, 2, 3, 4)
    """
    assert 1 <= count <= len(nodes)
    speeds = list(speeds or (1.0,) * len(nodes))
    if "" in nodes:
        speeds[nodes.index("")] = max(speeds)
    sizes = Counter(nodes)
    last = {node: rank for rank, node in enumerate(nodes)}
    order = sorted(sizes, key=lambda node: (not node, sizes[node], -last[node]))
    place = {node: position for position, node in enumerate(order)}
    leaving = sorted(range(len(nodes)), key=lambda rank: (speeds[rank], place[nodes[rank]], -rank))
    return tuple(sorted({*range(len(nodes))} - {*leaving[: len(nodes) - count]}))
