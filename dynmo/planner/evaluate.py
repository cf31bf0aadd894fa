"""A request for a plan, and what one placement of it would take: the schedule made for it, its
seconds by the simulator, its memory.

costs of layers + placement -> costs of stages -> schedule -> simulator -> step time, idleness,
memory
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dynmo.balance.partition import Cost, Move, Partition, imbalance, moves, uniform
from dynmo.balance.stage_costs import freeze, pipeline_costs
from dynmo.cost.layer_cost import Costs, LayerCost, LinkCost
from dynmo.cost.profile_file import Profile
from dynmo.errors import InputError, NoRoomError, PartitionError
from dynmo.planner.recompute import with_recompute
from dynmo.planner.stage_schedule import StageRequest, plan_stages
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import placement_of
from dynmo.schedule.chunk_bounds import lower_bound_on
from dynmo.schedule.memory import reduction_bytes
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import Timeline, simulate

RecomputeMode = Literal["none", "auto", "all"]
"""Which layers keep only their input and run F again in B: none, those that must so that all fits,
or all."""


@dataclass(frozen=True)
class PlanRequest:
    """What to plan for. memory_limit: bytes of a rank. any_links: take the slowest known link where
    the file lists other boundaries. cost: what the balancer goes by; seed and step: for the
    balancer that is random. quick: "exact" does not simulate its ties, and a placement that does
    not fit is hardly repaired. recomputed: layers that are recomputed whatever `recompute` says.
    replicas: of this pipeline, that sum their gradients, which takes memory; its seconds are
    `mesh`'s."""

    profile: Profile
    ranks: int
    microbatches: int
    schedule: str = "zb-h1"
    balancer: str = "exact"
    chunks: int | None = None
    memory_limit: int | None = None
    objective: Objective = Objective.SPAN
    any_links: bool = False
    cost: Cost = "time"
    seed: int = 0
    step: int = 0
    quick: bool = False
    recompute: RecomputeMode = "none"
    recomputed: frozenset[int] = frozenset()
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise PartitionError(f"{self.ranks} ranks; at least 1 is needed")
        if self.memory_limit is not None and not any(
            x.static_bytes or x.activation_bytes for x in self.profile.layers
        ):
            raise PartitionError(
                "a memory limit, but the costs have no sizes; give weight_bytes, activation_bytes, ... (one per layer)"
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
        """The most bytes that come for a moment, beside what is live between ops: recomputing a
        layer brings them back during its B, and summing gradients over the replicas takes them."""
        pairs = zip(self.kept, self.layers, strict=True)
        back = max(
            (kept.activation_bytes - left.activation_bytes for kept, left in pairs), default=0
        )
        return back + (reduction_bytes(self.kept) if self.replicas > 1 else 0)

    @cached_property
    def stages(self) -> StageRequest:
        """What the stage planner is asked."""
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
        )

    @cached_property
    def placement(self) -> tuple[int, ...]:
        return placement_of(self.schedule, self.ranks, self.chunks)

    @cached_property
    def links(self) -> tuple[LinkCost, ...]:
        return self.profile.boundaries(self.placement, not self.any_links)

    @cached_property
    def current(self) -> Partition:
        """Where the layers are: as the file says, if that was for as many stages; else evenly
        spread."""
        known, stages = self.profile.partition, len(self.placement)
        fits = (
            known is not None and len(known) == stages and self.profile.ranks in (None, self.ranks)
        )
        return Partition(known) if known is not None and fits else uniform(len(self.layers), stages)


@dataclass(frozen=True)
class Plan:
    """What one placement takes.

    Attributes:
        request: What was asked.
        partition: Number of layers on each stage.
        costs: Of the stages.
        schedule: Made for this placement.
        timeline: The step by the simulator.
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
        return (
            self.timeline.makespan
            if self.request.objective is Objective.MAKESPAN
            else self.timeline.span
        )

    @property
    def stage_cost(self) -> tuple[float, ...]:
        return tuple(stage.seconds for stage in self.costs.stages)

    @property
    def rank_cost(self) -> tuple[float, ...]:
        """The same of each rank's stages together."""
        pairs = list(zip(self.stage_cost, self.request.placement, strict=True))
        return tuple(
            math.fsum(cost for cost, holder in pairs if holder == rank)
            for rank in range(self.request.ranks)
        )

    @property
    def imbalance(self) -> float:
        return imbalance(self.rank_cost)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The layers that change ranks, from the placement as it is; source and target are
        ranks."""
        placement = self.request.placement
        across = (
            Move(layer, placement[a], placement[b])
            for layer, a, b in moves(self.request.current, self.partition)
        )
        return tuple(move for move in across if move.source != move.target)

    @property
    def moved_bytes(self) -> int:
        return sum(self.request.profile.layers[move.layer].moved_bytes for move in self.moves)


def memory_needs(request: PlanRequest, partition: Partition, schedule: Schedule) -> tuple[int, ...]:
    """Bytes of each rank at its peak under `schedule`."""
    return request.stages.memory(request.layers, partition.counts, schedule)


class TooFullError(NoRoomError):
    """Of one placement. `needs`: bytes of each rank."""

    def __init__(self, request: PlanRequest, partition: Partition, needs: Sequence[int]) -> None:
        rank = next(rank for rank, need in enumerate(needs) if need > (request.memory_limit or 0))
        super().__init__(
            f"rank {rank} needs {needs[rank]} bytes under {request.schedule} with the placement "
            f"{'+'.join(map(str, partition.counts))}, over the limit of {request.memory_limit}; "
            "use more ranks, a larger limit, smaller microbatches or a schedule that keeps less"
        )
        self.partition, self.needs = partition, tuple(needs)


def evaluate_partition(request: PlanRequest, partition: Partition) -> Plan:
    """What this placement would take, by the simulator, with the schedule made for it. Raises
    NoRoomError where it does not fit."""
    stage_plan = plan_stages(
        request.stages, request.layers, partition, request.links, request.profile.first_trainable
    )
    if request.memory_limit is not None and max(stage_plan.memory) > request.memory_limit:
        raise TooFullError(request, partition, stage_plan.memory)
    costs, schedule = (
        pipeline_costs(request.layers, partition, links=request.links),
        stage_plan.schedule,
    )
    timeline = simulate(schedule, costs)
    if not math.isfinite(timeline.makespan):
        raise InputError(
            "the times are so large that their sum is not a number any more; choose a larger unit"
        )
    reached = timeline.makespan if request.objective is Objective.MAKESPAN else timeline.span
    limits = None if request.memory_limit is None else stage_plan.caps
    bound = lower_bound_on(
        request.placement,
        stage_plan.costs,
        request.microbatches,
        schedule.first_trainable,
        request.objective,
        limits,
    )
    # A bound that is reached may come out a rounding error above what reached it, since it is
    # summed in another order.
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
