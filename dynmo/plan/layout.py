"""The layout of a model: layers of each stage, rank of each stage, microbatches.

    layers      e  a f | a  f a | f a  f | a f  h
    stages         0   |   1    |   2    |   3
    ranks          0   |   1    |   1    |   0

A pipeline has one layout at a time. It gets another one if layers move (the same ranks) or if the
mesh is reshaped (more replicas of fewer ranks, or the reverse).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dynmo.errors import ConfigError, PartitionError
from dynmo.plan.meshes import accumulation_problem
from dynmo.plan.partition import Move, Partition, same_layers, uniform
from dynmo.schedule.catalogue import check_microbatches, full_schedule, stage_ranks_of
from dynmo.schedule.op import Schedule

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
                f"reduction slots: {self.accumulation_groups} {problem}; "
                "use another number of slots, replicas or microbatches"
            )
        stage_ranks = stage_ranks_of(schedule, ranks, self.chunks)
        partition = partition or uniform(self.layers, len(stage_ranks))
        self._check(partition, stage_ranks)
        recompute = self.recompute
        if callable(recompute):
            recompute = recompute(
                partition, full_schedule(schedule, ranks, microbatches, self.chunks), replicas
            )
        return Layout(
            schedule,
            ranks,
            replicas,
            microbatches,
            partition,
            stage_ranks,
            frozenset(recompute),
            self.sliced,
        )

    def moved(self, layout: Layout, partition: Partition, schedule: str | None = None) -> Layout:
        """The same ranks with the layers elsewhere. `schedule` is another one to run."""
        schedule = schedule or layout.schedule
        return self.make(layout.ranks, layout.replicas, layout.microbatches, partition, schedule)

    def reshaped(
        self, layout: Layout, ranks: int, replicas: int, partition: Partition | None = None
    ) -> Layout:
        """The same ranks and the same batch, as another mesh.

        Raises:
            InputError: The mesh has another number of ranks, the replicas do not divide the
                microbatches, or as `make`.
        """
        everyone, batch = layout.ranks * layout.replicas, layout.microbatches * layout.replicas
        microbatches, rest = divmod(batch, replicas)
        if ranks * replicas != everyone or rest:
            have = f"{everyone} ranks and {batch} microbatches"
            need = "pipeline x replicas must be all ranks, and replicas divide the microbatches"
            raise ConfigError(f"{have} cannot be {replicas} replicas of {ranks} ranks; {need}")
        schedule = self._schedule_for(layout, ranks, partition)
        return self.make(ranks, replicas, microbatches, partition, schedule)

    def resized(
        self,
        layout: Layout,
        ranks: int,
        replicas: int,
        partition: Partition | None = None,
        microbatches: int | None = None,
    ) -> Layout:
        """The same batch on another number of ranks.

        Args:
            microbatches: Microbatches of a step, of all replicas. None: the present number.

        Raises:
            InputError: The replicas do not divide the microbatches, or as `make`.
        """
        batch = microbatches or layout.microbatches * layout.replicas
        microbatches, rest = divmod(batch, replicas)
        if rest:
            raise ConfigError(
                f"{replicas} replicas do not divide the {batch} microbatches of a step"
            )
        schedule = self._schedule_for(layout, ranks, partition)
        return self.make(ranks, replicas, microbatches, partition, schedule)

    def _schedule_for(self, before: Layout, ranks: int, partition: Partition | None) -> str:
        """The schedule of another mesh: the present one, if the placement has as many stages."""
        if partition is None:
            return before.schedule
        fitting = (
            name
            for name in (before.schedule, *self.shapes)
            if len(stage_ranks_of(name, ranks, self.chunks)) == partition.stages
        )
        return next(fitting, before.schedule)

    def _check(self, partition: Partition, stage_ranks: Sequence[int]) -> None:
        layers, stages = self.layers, len(stage_ranks)
        if (partition.layers, partition.stages) != (layers, stages):
            unit = "ranks" if stages == max(stage_ranks) + 1 else "stages"
            raise PartitionError(
                f"a placement of {partition.layers} layers on {partition.stages} {unit}, for "
                f"{layers} layers on {stages} {unit}"
            )


def moves_between_ranks(
    old: Partition,
    new: Partition,
    stage_ranks: Sequence[int],
    new_stage_ranks: Sequence[int] | None = None,
) -> tuple[Move, ...]:
    """The layers whose rank changes, in layer order. Sources and targets are ranks, not stages.

    `new_stage_ranks` are the ranks of the new stages, if those are others.
    """
    same_layers(old.layers, new.layers)
    targets = stage_ranks if new_stage_ranks is None else new_stage_ranks
    across = (
        Move(layer, stage_ranks[old.owner(layer)], targets[new.owner(layer)])
        for layer in range(old.layers)
    )
    return tuple(move for move in across if move.source != move.target)
