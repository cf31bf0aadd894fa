"""A request for a plan, and the result for one placement of it.

The result has the schedule made for the placement, its seconds by the simulator, and its memory:

    costs of layers + placement -> costs of stages -> schedule -> simulator
        -> step time, idleness, memory
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dynmo.cost.layer_cost import Costs, LayerCost, LinkCost
from dynmo.cost.profile_file import Profile
from dynmo.errors import InputError, NoRoomError, PartitionError
from dynmo.plan.bisection import rank_speeds
from dynmo.plan.layout import moves_between_ranks
from dynmo.plan.partition import Cost, Move, Partition, imbalance, uniform
from dynmo.plan.recompute import with_recompute
from dynmo.plan.speeds import Speeds
from dynmo.plan.stage_costs import freeze
from dynmo.plan.stage_plan import StageRequest, plan_stages
from dynmo.schedule.bounds import Objective
from dynmo.schedule.chunk_bounds import lower_bound_on
from dynmo.schedule.memory import Limit, rank_limits, reduction_bytes
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import Timeline, simulate

RecomputeMode = Literal["none", "auto", "all"]
"""The layers that are recomputed: none, those that must be so that everything fits, or all.

A recomputed layer keeps only its input and runs F again in B."""


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan.

    Attributes:
        microbatches: Microbatches of a step of one replica.
        chunks: Stages per rank. None means the schedule's own number.
        memory_limit: Bytes of a rank, or of each. None means unlimited.
        any_links: Use the slowest known link if the file lists other boundaries.
        quick: "exact" does not simulate its ties, and a placement that does not fit is hardly
            repaired.
        recomputed: Layers that are recomputed whatever `recompute` says.
        replicas: Number of replicas of this pipeline that sum their gradients. Only the memory of
            the sums counts here. `mesh_plan` adds their seconds.
        speeds: Speed of each rank. None: all are 1.
    """

    profile: Profile
    ranks: int
    microbatches: int
    schedule: str = "zb-h1"
    balancer: str = "exact"
    chunks: int | None = None
    memory_limit: Limit = None
    objective: Objective = Objective.SPAN
    any_links: bool = False
    cost: Cost = "time"
    seed: int = 0
    step: int = 0
    quick: bool = False
    recompute: RecomputeMode = "none"
    recomputed: frozenset[int] = frozenset()
    replicas: int = 1
    speeds: Speeds | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise PartitionError(f"{self.ranks} ranks; at least 1 is needed")
        # Their lengths are checked. One for all would be copied for each rank.
        if self.speeds is not None:
            rank_speeds(self.speeds, self.ranks)
        if isinstance(self.memory_limit, tuple):
            rank_limits(self.memory_limit, self.ranks)
        if self.memory_limit is not None and not any(
            x.static_bytes or x.activation_bytes for x in self.profile.layers
        ):
            raise PartitionError(
                "a memory limit, but the costs have no sizes; "
                "give weight_bytes, activation_bytes, ... (one per layer)"
            )

    @cached_property
    def kept(self) -> tuple[LayerCost, ...]:
        """The layers' costs without recomputing."""
        return freeze(self.profile.layers, self.profile.first_trainable)

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        return with_recompute(self.kept, self.recomputed)

    @cached_property
    def reserve(self) -> int:
        """The most bytes that come for a moment, beside what is live between ops.

        Recomputing a layer brings its activations back during its B. Summing gradients over the
        replicas also takes memory.
        """
        pairs = zip(self.kept, self.layers, strict=True)
        back = max(
            (kept.activation_bytes - left.activation_bytes for kept, left in pairs), default=0
        )
        return back + (reduction_bytes(self.kept) if self.replicas > 1 else 0)

    @cached_property
    def stages(self) -> StageRequest:
        return StageRequest(
            self.schedule,
            self.ranks,
            self.microbatches,
            self.chunks,
            self.memory_limit,
            self.objective,
            # A costs file has rollback copies only if its steps had no barrier.
            post_validation=any(layer.rollback_bytes for layer in self.layers),
            replicas=self.replicas,
            speeds=self.speeds,
        )

    @property
    def names_ranks(self) -> bool:
        """True if something holds for some ranks only, so that their number is fixed."""
        return self.speeds is not None or isinstance(self.memory_limit, tuple)

    @property
    def limits(self) -> tuple[int, ...] | None:
        """Bytes of each rank. None means unlimited."""
        return self.stages.limits

    def fits(self, needs: Sequence[int]) -> bool:
        limits = self.limits
        return limits is None or all(a <= b for a, b in zip(needs, limits, strict=True))

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        return self.stages.stage_ranks

    @cached_property
    def links(self) -> tuple[LinkCost, ...]:
        return self.profile.boundaries(self.stage_ranks, not self.any_links)

    @cached_property
    def current(self) -> Partition:
        """The placement now: the file's if it has as many stages, else an even one."""
        known, stages = self.profile.partition, len(self.stage_ranks)
        fits = (
            known is not None and len(known) == stages and self.profile.ranks in (None, self.ranks)
        )
        return Partition(known) if known is not None and fits else uniform(len(self.layers), stages)


@dataclass(frozen=True)
class Plan:
    """The result for one placement.

    Attributes:
        lower_bound: Seconds of a step that no schedule of this placement can beat.
        caps: The most live memory of each rank that the schedule was first made within.
        memory: Bytes of each rank at its peak.
    """

    request: PlanRequest
    partition: Partition
    costs: Costs
    schedule: Schedule
    timeline: Timeline
    lower_bound: float
    caps: tuple[float, ...]
    memory: tuple[int, ...]

    @property
    def step(self) -> float:
        """Predicted seconds of a step, by the objective."""
        return self.timeline.length(self.request.objective)

    @property
    def stage_cost(self) -> tuple[float, ...]:
        return tuple(stage.seconds for stage in self.costs.stages)

    @property
    def rank_cost(self) -> tuple[float, ...]:
        """Seconds of each rank's stages together."""
        pairs = list(zip(self.stage_cost, self.request.stage_ranks, strict=True))
        return tuple(
            math.fsum(cost for cost, holder in pairs if holder == rank)
            for rank in range(self.request.ranks)
        )

    @property
    def imbalance(self) -> float:
        return imbalance(self.rank_cost)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The layers that change ranks from the current placement. Source and target are ranks."""
        request = self.request
        return moves_between_ranks(request.current, self.partition, request.stage_ranks)

    @property
    def moved_bytes(self) -> int:
        return sum(self.request.profile.layers[move.layer].moved_bytes for move in self.moves)


def memory_needs(request: PlanRequest, partition: Partition, schedule: Schedule) -> tuple[int, ...]:
    """Bytes of each rank at its peak under `schedule`."""
    return request.stages.memory(request.layers, partition.counts, schedule)


class TooFullError(NoRoomError):
    """One placement does not fit the memory. `needs` are the bytes of each rank."""

    def __init__(self, request: PlanRequest, partition: Partition, needs: Sequence[int]) -> None:
        limits = request.limits or (0,) * len(needs)
        rank = next(rank for rank, need in enumerate(needs) if need > limits[rank])
        super().__init__(
            f"rank {rank} needs {needs[rank]} bytes under {request.schedule} with the placement "
            f"{'+'.join(map(str, partition.counts))}, over the limit of {limits[rank]}; "
            "use more ranks, a larger limit, smaller microbatches or a schedule that keeps less"
        )
        self.partition, self.needs = partition, tuple(needs)


def evaluate_partition(request: PlanRequest, partition: Partition) -> Plan:
    """Evaluates one placement by the simulator, with the schedule made for it.

    Raises:
        TooFullError: The placement does not fit the memory.
    """
    stage_plan = plan_stages(
        request.stages, request.layers, partition, request.links, request.profile.first_trainable
    )
    if not request.fits(stage_plan.memory):
        raise TooFullError(request, partition, stage_plan.memory)
    costs = request.stages.costs(request.layers, partition, request.links)
    schedule = stage_plan.schedule
    timeline = simulate(schedule, costs)
    if not math.isfinite(timeline.makespan):
        raise InputError(
            "the times are so large that their sum is not a number any more; choose a larger unit"
        )
    reached = timeline.length(request.objective)
    limits = None if request.memory_limit is None else stage_plan.caps
    bound = lower_bound_on(
        request.stage_ranks,
        stage_plan.costs,
        request.microbatches,
        schedule.first_trainable,
        request.objective,
        limits,
    )
    # The bound is summed in another order. If it is reached, it may therefore be a rounding error
    # above the time that reached it.
    return Plan(
        request,
        partition,
        costs,
        schedule,
        timeline,
        min(bound, reached),
        stage_plan.caps,
        stage_plan.memory,
    )
