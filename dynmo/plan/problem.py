"""What is known before a plan is made, and what may be chosen.

Problem                       costs of layers, ranks and links, the work of a step
Choice                        mesh, placement, layers that are recomputed
Problem, Choice --evaluate--> Plan: schedule, seconds, bytes
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import Forecast, LayerCost
from dynmo.plan.options import Balance, Elastic
from dynmo.plan.partition import Cost, Partition, accumulation_problem, divisors
from dynmo.schedule.bounds import Objective
from dynmo.schedule.memory import Limit

Layers = tuple[LayerCost, ...]
Speeds = tuple[float, ...]
"""Speed of each rank, relative to the middle one's."""

Kind = Literal["placement", "mesh", "ranks"]
"""What is decided on."""

RecomputeMode = Literal["none", "auto", "all"]
"""The layers that are recomputed: none, those that must be so that everything fits, or all.

A recomputed layer keeps only its input and runs F again in B."""

UNKNOWN_SIZE = 16  # samples of a microbatch if the costs do not say; it can be halved and doubled


@dataclass(frozen=True)
class Mesh:
    """A number of pipelines, and their microbatches.

    Attributes:
        pipeline: Number of ranks of one pipeline.
        replicas: Number of pipelines.
        microbatches: Microbatches of each replica.
        micro_batch: Sequences in one microbatch.
    """

    pipeline: int
    replicas: int
    microbatches: int
    micro_batch: int
    schedule: str

    @property
    def gpus(self) -> int:
        return self.pipeline * self.replicas

    @property
    def global_batch(self) -> int:
        return self.replicas * self.microbatches * self.micro_batch

    def fewer_replicas(self, groups: int) -> tuple[int, ...]:
        """Returns the numbers of replicas that other numbers of ranks may have.

        `groups` are the accumulation groups of all replicas. A model may not allow more replicas
        than now.
        """
        batch = self.replicas * self.microbatches
        fewer = (each for each in divisors(batch) if each <= self.replicas)
        return tuple(each for each in fewer if not accumulation_problem(groups, each, batch))

    def near_sizes(self, groups: int, replicas: Collection[int]) -> tuple[int, ...]:
        """Returns sizes of a microbatch that the accumulation groups allow.

        Candidates are the present size, its halves and its doubles.
        """
        size, batch = self.micro_batch, self.global_batch
        near = sorted({size // 4, size // 2, size, 2 * size, 4 * size} - {0})
        return tuple(
            each
            for each in near
            if batch % each == 0
            and not any(accumulation_problem(groups, count, batch // each) for count in replicas)
        )

    def __str__(self) -> str:
        return (
            f"{self.pipeline} ranks x {self.replicas} replicas, {self.microbatches} microbatches "
            f"of {self.micro_batch} with {self.schedule}"
        )


@dataclass(frozen=True)
class Work:
    """The work of a step, and the rules that every plan of it keeps.

    Attributes:
        post_validation: Whether a step begins before the previous one is final.
        chunks: Stages per rank. None means the schedule's own number.
        accumulation_groups: Number of accumulation groups of the whole mesh. None: unknown. The
            layers' pending gradients then count as always there.
        zero: 1 if ZeRO divides the optimizer state over the replicas, else 0.
        cost: What balancers even out.
        seed: For your own balancer, if it chooses at random.
        step: The next step.
        end: The step after the last.
    """

    objective: Objective = Objective.SPAN
    post_validation: bool = False
    chunks: int | None = None
    accumulation_groups: int | None = None
    zero: int = 0
    cost: Cost = "time"
    seed: int = 0
    step: int = 0
    end: int = 0


@dataclass(frozen=True)
class Problem:
    """What is known: the same record in a run, in `dynmo plan` and in `dynmo simulate`.

    Attributes:
        profile: Costs of the layers for one microbatch, and the links between ranks.
        memory_limit: Bytes of a rank, or of each. None means unlimited.
        speeds: Speed of each rank of a pipeline. None: all are 1. Costs are those at speed 1.
        bandwidth: Bytes per second between replicas. inf: sums over them take no time.
        machines: Name of the machine of each rank, empty for the one that cannot be given back.
            Empty if none is known.
        forecasts: What each dynamic case expects.
    """

    profile: Profile
    work: Work = field(default_factory=Work)
    memory_limit: Limit = None
    speeds: Speeds | None = None
    bandwidth: float = math.inf
    machines: tuple[str, ...] = ()
    forecasts: tuple[tuple[Forecast, ...], ...] = ()

    @property
    def layers(self) -> Layers:
        return self.profile.layers

    @property
    def size(self) -> int:
        """Samples of the microbatch that the costs are of."""
        return self.profile.microbatch or UNKNOWN_SIZE

    @property
    def names_ranks(self) -> bool:
        """True if something holds for some ranks only, so that their number is fixed."""
        return self.speeds is not None or isinstance(self.memory_limit, tuple)

    def mesh(self, pipeline: int, microbatches: int, schedule: str, replicas: int = 1) -> Mesh:
        """Returns a mesh with microbatches of the measured size."""
        return Mesh(pipeline, replicas, microbatches, self.size, schedule)


@dataclass(frozen=True)
class Choice:
    """What a search chooses.

    Attributes:
        recomputed: Layers that run F again in B, instead of keeping their activations.
    """

    mesh: Mesh
    partition: Partition
    recomputed: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Allowed:
    """Which meshes a search may choose.

    Attributes:
        gpus: Number of ranks of all replicas.
        batch: Samples of a step, over all replicas.
        sizes: Samples of a microbatch to try. Empty: the measured number, its halves and doubles.
        schedules: Names of the schedules to try. Empty: the usual ones.
        replicas: The numbers of replicas that are allowed. Empty: any.
        keep: Number of plans that are wanted.
    """

    gpus: int
    batch: int
    sizes: tuple[int, ...] = ()
    schedules: tuple[str, ...] = ()
    replicas: tuple[int, ...] = ()
    balancer: str = "exact"
    recompute: RecomputeMode = "none"
    keep: int = 10


# -- in a run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """What may change, and when it should.

    Attributes:
        kind: What is decided on.
        schedules: Schedules that may take the present one's place. Empty: it stays.
        replicas: The numbers of replicas that another mesh may have.
        sizes: The samples of a microbatch that it may have. Empty: as now.
        available_ranks: Number of ranks, newcomers included.
        most_ranks: The largest number of ranks that the run has had.
    """

    kind: Kind = "placement"
    balance: Balance = field(default_factory=Balance)
    elastic: Elastic = field(default_factory=Elastic)
    schedules: tuple[str, ...] = ()
    replicas: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    # Records of earlier versions have the second names.
    available_ranks: Annotated[
        int, Field(validation_alias=AliasChoices("available_ranks", "there"))
    ] = 1
    most_ranks: Annotated[int, Field(validation_alias=AliasChoices("most_ranks", "most"))] = 1


@dataclass(frozen=True)
class Readings:
    """What a run has measured beside the costs.

    Attributes:
        halves: The costs from the earlier and from the later readings alone. Empty if some time has
            one reading only.
        doubt: Factor of the usual gain that a move must promise.
        preempted: Share of the ops' time that other processes take.
        fixed_seconds: Seconds of a move beyond its layers' way over the links.
        seconds_per_byte: Seconds of a move per byte, instead of those of the links.
        pause: Seconds that a change of ranks takes beyond its bytes.
        scheduled: Costs that the present schedule was made from. None if it knows no costs.
        scheduled_speeds: Speeds that it was made from.
        is_measured: Whether `scheduled` was measured.
        reference: Seconds that a step took at first. None means the best predicted seconds now.
        rank_speeds: Speed of each rank of the mesh. None: no rank is slow to stay.
    """

    halves: tuple[Layers, ...] = ()
    doubt: float = 1.0
    preempted: float = 0.0
    fixed_seconds: float = 0.0
    seconds_per_byte: float | None = None
    pause: float = 0.0
    scheduled: Layers | None = None
    scheduled_speeds: Speeds | None = None
    is_measured: bool = False
    reference: float | None = None
    rank_speeds: Speeds | None = None
