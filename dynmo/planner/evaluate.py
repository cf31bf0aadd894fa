"""A request for a plan, and what one placement of it would take: the schedule made for it, its seconds by the simulator, its memory.

costs of layers + placement -> costs of stages -> schedule -> simulator -> step time, idleness, memory
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from dynmo.balance.partition import Cost, Move, Partition, imbalance, moves, uniform
from dynmo.balance.stage_costs import freeze, frozen_stages, pipeline_costs
from dynmo.cost.layer_cost import Costs, LayerCost, LinkCost
from dynmo.cost.profile_file import Profile
from dynmo.errors import InputError, NoRoomError, PartitionError
from dynmo.planner.fit_memory import lower_caps
from dynmo.planner.recompute import planned_memory, with_recompute
from dynmo.schedule.automatic.make import make
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import entry, placement_of
from dynmo.schedule.chunk_bounds import lower_bound_on
from dynmo.schedule.memory import live_limits, reduction_bytes
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import Timeline, simulate

RecomputeMode = Literal["none", "auto", "all"]
"""Which layers keep only their input and run F again in B: none, those that must so that all fits, or all."""


@dataclass(frozen=True)
class PlanRequest:
    """What to plan for. memory_limit: bytes of a rank. any_links: take the slowest known link where the file lists other boundaries. cost:
    what the balancer goes by; seed and step: for the balancer that is random. quick: "exact" does not simulate its ties, and a placement
    that does not fit is hardly repaired. recomputed: layers that are recomputed whatever `recompute` says. replicas: of this pipeline, that
    sum their gradients, which takes memory; its seconds are `mesh`'s."""

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
        if self.memory_limit is not None and not any(x.static_bytes or x.activation_bytes for x in self.profile.layers):
            raise PartitionError("a memory limit, but the costs have no sizes; give weight_bytes, activation_bytes, ... (one per layer)")

    @cached_property
    def kept(self) -> tuple[LayerCost, ...]:
        """The layers' costs without recomputing."""
        return freeze(self.profile.layers, self.profile.first_trainable)

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        return with_recompute(self.kept, self.recomputed)

    @cached_property
    def reserve(self) -> int:
        """The most bytes that come for a moment, beside what is live between ops: recomputing a layer brings them back during its B, and
        summing gradients over the replicas takes them."""
        pairs = zip(self.kept, self.layers, strict=True)
        back = max((kept.activation_bytes - left.activation_bytes for kept, left in pairs), default=0)
        return back + (reduction_bytes(self.kept) if self.replicas > 1 else 0)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        return placement_of(self.schedule, self.ranks, self.chunks)

    @cached_property
    def links(self) -> tuple[LinkCost, ...]:
        return self.profile.boundaries(self.placement, not self.any_links)

    @cached_property
    def current(self) -> Partition:
        """Where the layers are: as the file says, if that was for as many stages; else evenly spread."""
        known, stages = self.profile.partition, len(self.placement)
        fits = known is not None and len(known) == stages and self.profile.ranks in (None, self.ranks)
        return Partition(known) if known is not None and fits else uniform(len(self.layers), stages)


@dataclass(frozen=True)
class Plan:
    """`partition` has a count per stage, `stage_cost` seconds of one microbatch's F, B and W per stage."""

    request: PlanRequest
    partition: Partition
    costs: Costs
    schedule: Schedule
    timeline: Timeline
    lower_bound: float

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Bytes of each rank at its peak."""
        return memory_needs(self.request, self.partition, self.schedule)

    @property
    def step(self) -> float:
        """Predicted seconds of a step, by the objective."""
        return self.timeline.makespan if self.request.objective is Objective.MAKESPAN else self.timeline.span

    @property
    def stage_cost(self) -> tuple[float, ...]:
        return tuple(stage.seconds for stage in self.costs.stages)

    @property
    def rank_cost(self) -> tuple[float, ...]:
        """The same of each rank's stages together."""
        pairs = list(zip(self.stage_cost, self.request.placement, strict=True))
        return tuple(math.fsum(cost for cost, holder in pairs if holder == rank) for rank in range(self.request.ranks))

    @property
    def imbalance(self) -> float:
        return imbalance(self.rank_cost)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The layers that change ranks, from the placement as it is; source and target are ranks."""
        placement = self.request.placement
        across = (Move(layer, placement[a], placement[b]) for layer, a, b in moves(self.request.current, self.partition))
        return tuple(move for move in across if move.source != move.target)

    @property
    def moved_bytes(self) -> int:
        return sum(self.request.profile.layers[move.layer].moved_bytes for move in self.moves)


def make_schedule_for(request: PlanRequest, costs: Costs, caps: tuple[float, ...]) -> Schedule:
    return make(
        request.schedule,
        request.ranks,
        request.microbatches,
        costs=costs,
        chunks=request.chunks,
        caps=caps,
        first_trainable=frozen_stages(costs),
        objective=request.objective,
    )


def with_unit_memory(costs: Costs) -> Costs:
    """Where no sizes are known, every stage's activations count 1: a schedule should not take memory for free."""
    if any(stage.mem_f for stage in costs.stages):
        return costs
    return Costs(tuple(replace(stage, mem_f=1.0, mem_b=-0.5, mem_w=-0.5) for stage in costs.stages), costs.links)


def schedule_within_memory(request: PlanRequest, partition: Partition, costs: Costs) -> tuple[Costs, tuple[float, ...], Schedule]:
    """The schedule of this placement, and the costs and caps that it is made for."""
    shaped = with_unit_memory(costs)
    if shaped is not costs:
        caps = (2.0 * len(request.placement),) * request.ranks
        return shaped, caps, make_schedule_for(request, shaped, caps)
    limit = request.memory_limit
    caps = live_limits(request.layers, partition.counts, request.placement, None if limit is None else limit - request.reserve)
    if limit is None or not entry(request.schedule).from_costs:
        return shaped, caps, make_schedule_for(request, shaped, caps)
    schedule = lower_caps(
        limit,
        lambda caps: make_schedule_for(request, shaped, tuple(caps)),
        lambda schedule: memory_needs(request, partition, schedule),
        caps,
        shaped,
        request.placement,
    )
    return shaped, caps, schedule


def memory_needs(request: PlanRequest, partition: Partition, schedule: Schedule) -> tuple[int, ...]:
    """Bytes of each rank at its peak under `schedule`."""
    return planned_memory(request.kept, request.recomputed, partition.counts, schedule, request.replicas)


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
    """What this placement would take, by the simulator, with the schedule made for it. Raises NoRoomError where it does not fit."""
    costs = pipeline_costs(request.layers, partition, links=request.links)
    shaped, caps, schedule = schedule_within_memory(request, partition, costs)
    if request.memory_limit is not None:
        needs = memory_needs(request, partition, schedule)
        if max(needs) > request.memory_limit:
            raise TooFullError(request, partition, needs)
    timeline = simulate(schedule, costs)
    if not math.isfinite(timeline.makespan):
        raise InputError("the times are so large that their sum is not a number any more; choose a larger unit")
    reached = timeline.makespan if request.objective is Objective.MAKESPAN else timeline.span
    limits = None if request.memory_limit is None else caps
    bound = lower_bound_on(request.placement, shaped, request.microbatches, frozen_stages(costs), request.objective, limits)
    # A bound that is reached may come out a rounding error above what reached it, since it is summed in another order.
    return Plan(request, partition, costs, schedule, timeline, min(bound, reached))
