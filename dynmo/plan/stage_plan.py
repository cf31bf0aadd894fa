"""The stage planner: from a placement of layers to a schedule within the memory.

    layers + placement -> costs of stages -> caps -> schedule -> bytes of each rank at its peak

Runs, dry runs and plans all call `plan_stages`, so a plan says what a run does.

A schedule is made to keep no more alive than its caps. Three things come on top: messages that
wait, the bytes that an op needs for itself, and sums over the replicas. Their size is known of a
whole schedule only. If a rank needs more than it has, the caps are lowered by as much, and the
schedule is made again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from dynmo.cost.layer_cost import Costs, LayerCost, LinkCost, StageCost
from dynmo.errors import PartitionError, ScheduleError
from dynmo.plan.partition import Partition
from dynmo.plan.speeds import Speeds
from dynmo.plan.stage_costs import Make, frozen_stages, pipeline_costs
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import entry, make, stage_ranks_of
from dynmo.schedule.memory import (
    Limit,
    bare,
    rank_limits,
    rank_memory,
    reduction_bytes,
    static_bytes,
)
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import peak_memory, simulate

_ROUNDS = 8
# A search asks again for the schedules of its best placements. A large one has 100 MB.
_make = lru_cache(maxsize=8)(make)


@dataclass(frozen=True)
class StageRequest:
    """The request for a schedule, apart from layers and placement.

    Attributes:
        microbatches: Microbatches of a step of one replica.
        chunks: Stages per rank. None means the schedule's own number.
        memory_limit: Bytes of a rank, or of each. None means unlimited.
        post_validation: Whether a step begins before the previous one is final.
        replicas: Number of pipelines that sum their gradients.
        accumulation_groups: In how many groups a replica sums its gradients. None if unknown: the
            layers' pending gradients then count as always there.
        speeds: Speed of each rank. None: all are 1.
    """

    schedule: str
    ranks: int
    microbatches: int
    chunks: int | None = None
    memory_limit: Limit = None
    objective: Objective = Objective.SPAN
    post_validation: bool = False
    replicas: int = 1
    accumulation_groups: int | None = None
    speeds: Speeds | None = None

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        return stage_ranks_of(self.schedule, self.ranks, self.chunks)

    @cached_property
    def limits(self) -> tuple[int, ...] | None:
        """Bytes of each rank. None means unlimited."""
        return rank_limits(self.memory_limit, self.ranks)

    def costs(
        self,
        layers: Sequence[LayerCost],
        partition: Partition,
        links: Sequence[LinkCost] | None = None,
    ) -> Costs:
        """Returns the costs of a placement's stages, each on its rank."""
        speeds = self.speeds
        if speeds is not None and len(speeds) != self.ranks:
            raise PartitionError(f"{len(speeds)} speeds for {self.ranks} ranks; give one per rank")
        own = None if speeds is None else [speeds[rank] for rank in self.stage_ranks]
        return pipeline_costs(layers, partition, links=links, speeds=own)

    def make(self, costs: Costs | None, caps: Sequence[float], first_trainable: int) -> Schedule:
        """Makes the schedule. See `catalogue.make`."""
        return _make(
            self.schedule,
            self.ranks,
            self.microbatches,
            costs=costs,
            chunks=self.chunks,
            caps=tuple(caps),
            first_trainable=first_trainable,
            objective=self.objective,
        )

    def memory(
        self, layers: Sequence[LayerCost], counts: Sequence[int], schedule: Schedule
    ) -> tuple[int, ...]:
        """Bytes of each rank at its peak.

        Runs and plans are refused by this account. `layers` have recomputation in their costs.
        """
        groups = self.accumulation_groups
        if groups is None:
            layers = [
                replace(x, weight_bytes=x.weight_bytes + x.pending_gradient_bytes) for x in layers
            ]
        return rank_memory(
            layers,
            counts,
            schedule,
            post_validation=self.post_validation,
            replicas=self.replicas,
            accumulation_groups=groups or 1,
        )


@dataclass(frozen=True)
class StagePlan:
    """The schedule of one placement.

    Attributes:
        costs: Costs of the stages, as the schedule was made for them.
        caps: The most live memory of each rank that was aimed at first, in the costs' unit.
        schedule: The schedule. If none fits the memory, the one that needs the least.
    """

    request: StageRequest
    layers: tuple[LayerCost, ...]
    partition: Partition
    costs: Costs
    caps: tuple[float, ...]
    schedule: Schedule

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Bytes of each rank at its peak."""
        return self.request.memory(self.layers, self.partition.counts, self.schedule)


def plan_stages(
    request: StageRequest,
    layers: tuple[LayerCost, ...],
    partition: Partition,
    links: Sequence[LinkCost] | None,
    first_trainable: int,
) -> StagePlan:
    """Makes the schedule of a placement within the memory of its ranks.

    If no schedule fits, the one that needs the least memory is returned. The caller must check.

    Args:
        request: The name of the schedule, and what it must fit.
        layers: Cost of each layer. A layer of a frozen prefix has no B, no W and no activations. A
            recomputed layer has its recomputation in B and its activations in the workspaces.
        partition: Number of layers on each stage.
        links: One for each boundary between stages. None means that messages take no time.
        first_trainable: Index of the first layer that trains.
    """
    costs = with_unit_memory(request.costs(layers, partition, links))
    first = min(partition.owner(first_trainable), partition.stages - 1)
    limits, stage_ranks = request.limits, request.stage_ranks
    one = one_microbatch(costs, stage_ranks)

    def plan(caps: Sequence[float], schedule: Schedule) -> StagePlan:
        return StagePlan(request, layers, partition, costs, tuple(caps), schedule)

    if limits is None:
        caps = roomy_caps(costs, stage_ranks)
        return plan(caps, request.make(costs, caps, first))
    held = static_bytes(bare(layers), partition.counts, stage_ranks)
    caps = tuple(
        max(least, float(limit - own)) for least, own, limit in zip(one, held, limits, strict=True)
    )
    if not entry(request.schedule).from_costs:
        return plan(caps, request.make(costs, caps, first))
    return plan(caps, _fitting(request, layers, partition, costs, caps, one, first))


def schedule_on(
    request: StageRequest,
    layers: tuple[LayerCost, ...] | None,
    partition: Partition,
    links: Sequence[LinkCost] | None,
    first_trainable: int,
) -> Schedule:
    """Returns the schedule of a placement.

    Without costs, or if it is not made from costs, all stages count as equal, with activations of 1
    and caps of twice those of 1F1B.
    """
    if layers is None or not entry(request.schedule).from_costs:
        caps = (2.0 * len(request.stage_ranks),) * request.ranks
        return request.make(None, caps, partition.owner(first_trainable))
    return plan_stages(request, layers, partition, links, first_trainable).schedule


def _fitting(
    request: StageRequest,
    layers: Sequence[LayerCost],
    partition: Partition,
    costs: Costs,
    caps: tuple[float, ...],
    one: tuple[float, ...],
    first: int,
) -> Schedule:
    """Lowers the caps until the schedule fits the memory.

    `one` are the least caps, for one microbatch at a time.
    """
    limits = request.limits
    assert limits is not None
    schedule = best = request.make(costs, caps, first)
    most = float("inf")
    for turn in range(_ROUNDS):
        needed = request.memory(layers, partition.counts, schedule)
        beyond = [need - limit for need, limit in zip(needed, limits, strict=True)]
        if max(beyond) < most:
            best, most = schedule, max(beyond)
        if most <= 0 or caps == one:
            break
        alive = peak_memory(schedule, costs)
        over = [max(0, more) for more in beyond]
        lower = tuple(
            max(least, min(a, b) - more)
            for least, a, b, more in zip(one, caps, alive, over, strict=True)
        )
        # One microbatch at a time is the last that there is to try.
        caps = one if lower == caps or turn == _ROUNDS - 2 else lower
        try:
            schedule = request.make(costs, caps, first)
        except ScheduleError:
            break
    return best


def schedule_for_balancers(request: StageRequest, layers: Sequence[LayerCost]) -> Make:
    """Makes schedules for placements that a balancer compares.

    Every rank is assumed to hold the mean of the static memory. Only the chosen placement gets a
    schedule within each rank's true limit, from `plan_stages`.
    """
    limits = request.limits
    aside = 0
    if limits is not None:
        aside += sum(layer.static_bytes for layer in layers) // request.ranks
        aside += max(layer.workspace_bytes for layer in layers)
        aside += reduction_bytes(layers) if request.replicas > 1 else 0

    def scheduled(costs: Costs) -> Schedule:
        costs = with_unit_memory(costs)
        if limits is None:
            caps = roomy_caps(costs, request.stage_ranks)
        else:
            least = one_microbatch(costs, request.stage_ranks)
            caps = tuple(max(a, b - aside) for a, b in zip(least, limits, strict=True))
        return request.make(costs, caps, frozen_stages(costs))

    return scheduled


def inherent_idle(
    request: StageRequest, layers: tuple[LayerCost, ...], f: float, b: float, w: float
) -> float:
    """Returns the idle ratio of a schedule whose stages all have the same F, B and W.

    Messages take no time. `layers` tell what a schedule within a memory limit keeps alive.
    """
    stages = len(request.stage_ranks)
    kept, stash = (
        math.fsum(getattr(x, key) for x in layers) / stages or 1.0
        for key in ("activation_bytes", "stash_bytes")
    )
    stage = StageCost(f, b, w, kept, stash - kept, -stash)
    costs = Costs((stage,) * stages, (0.0,) * (stages - 1))
    if not layers:
        request = replace(request, memory_limit=None)
    return simulate(schedule_for_balancers(request, layers)(costs), costs).idle_ratio


def with_unit_memory(costs: Costs) -> Costs:
    """Gives every stage activations of 1 if no sizes are known.

    A schedule should not take memory for free.
    """
    if any(stage.mem_f for stage in costs.stages):
        return costs
    return Costs(tuple(StageCost(x.f, x.b, x.w) for x in costs.stages), costs.links)


def one_microbatch(costs: Costs, stage_ranks: Sequence[int]) -> tuple[float, ...]:
    """The memory that one microbatch keeps alive on each rank, in the costs' unit."""
    kept = [0.0] * (max(stage_ranks) + 1)
    for stage, rank in zip(costs.stages, stage_ranks, strict=True):
        kept[rank] += stage.held
    return tuple(kept)


def roomy_caps(costs: Costs, stage_ranks: Sequence[int]) -> tuple[float, ...]:
    """Caps without a memory limit: twice the most that 1F1B keeps on a rank.

    1F1B keeps p microbatches there (Zero Bubble's ZB-2p). More gains next to nothing.
    """
    kept = one_microbatch(costs, stage_ranks)
    return (2.0 * len(kept) * max(kept),) * len(kept)
