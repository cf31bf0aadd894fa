"""From a choice to a plan: its schedule, its seconds and its bytes. Nothing is run.

    layers + placement -> costs of stages -> caps -> schedule -> simulator -> seconds
                                                              -> bytes of each rank at its peak

Runs, dry runs and plans all ask `evaluate`, so a plan says what a run does.

A schedule is made to keep no more alive than its caps. Three things come on top: messages that
wait, the bytes that an op needs for itself, and sums over the replicas. Their size is known of a
whole schedule only. If a rank needs more than it has, the caps are lowered by as much, and the
schedule is made again. A plan that does not fit in any way has the schedule that needs the least.

Costs at another size of microbatch are in proportion to it. Under ZeRO-1 a rank holds its part of
one replica's optimizer state, ceil(bytes / replicas). The gradients cross a ring without latency:

    zero = 0    all-reduce        2 (R - 1) / R x gradient bytes / bandwidth
    zero = 1    reduce-scatter      (R - 1) / R x gradient bytes / bandwidth
                all-gather          (R - 1) / R x weight bytes   / bandwidth

The all-reduce and the reduce-scatter of a layer begin when its last W ends. The all-gather begins
after the step's last op, and nothing hides it.

A rank reduces one layer after another, in the order in which their last W's end (within a stage:
from its last layer to its first). It works on meanwhile: the link takes no time from the ops. The
part that is not over by the end of the step's last op is `exposed`.

    rank 0   ... W W[a f a]                    last W of the stage: of f, then of a
             reductions     [ f ][ a ]         exposed: what lies beyond the step's end
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from dynmo.cost.layer_cost import Costs, LayerCost, LinkCost
from dynmo.errors import InputError, NoRoomError, PartitionError, ScheduleError
from dynmo.plan.bisection import rank_speeds
from dynmo.plan.costs import (
    freeze,
    one_microbatch,
    pipeline_costs,
    roomy_caps,
    scale_layers,
    with_unit_memory,
)
from dynmo.plan.partition import Move, Partition, imbalance, moves_between_ranks, uniform
from dynmo.plan.problem import Choice, Mesh, Problem
from dynmo.plan.recompute import with_recompute
from dynmo.schedule.bounds import Objective, lower_bound
from dynmo.schedule.catalogue import entry, make, stage_ranks_of
from dynmo.schedule.memory import bare, rank_limits, rank_memory, static_bytes
from dynmo.schedule.op import Kind, Schedule
from dynmo.schedule.simulator import Span, Timeline, peak_memory, simulate

# A search asks again for the schedules of its best placements. A large one has 100 MB.
_make = lru_cache(maxsize=8)(make)
_ROUNDS = 8  # the most schedules that are made to fit one memory


@dataclass(frozen=True)
class Replica:
    """One replica of a mesh: what its layers cost, and who holds which stage."""

    problem: Problem
    mesh: Mesh

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """Costs of the layers for a microbatch of the mesh, without recomputation."""
        problem, mesh, work = self.problem, self.mesh, self.problem.work
        layers = problem.layers
        if mesh.micro_batch != problem.size:
            layers = scale_layers(layers, mesh.micro_batch / problem.size)
        if work.zero:
            layers = tuple(layer.shared(mesh.replicas) for layer in layers)
        if work.accumulation_groups is not None:
            groups = work.accumulation_groups // mesh.replicas
            layers = tuple(layer.with_accumulation(groups) for layer in layers)
        return freeze(layers, problem.profile.first_trainable) if layers else ()

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        return stage_ranks_of(self.mesh.schedule, self.mesh.pipeline, self.problem.work.chunks)

    @cached_property
    def current(self) -> Partition:
        """The placement now: the profile's if it has as many stages, else an even one."""
        profile, stages = self.problem.profile, len(self.stage_ranks)
        known = profile.partition
        if known is None or len(known) != stages:
            return uniform(len(self.problem.layers), stages)
        if profile.ranks not in (None, self.mesh.pipeline):
            return uniform(len(self.problem.layers), stages)
        return Partition(known)

    @cached_property
    def links(self) -> tuple[LinkCost, ...]:
        """The link behind each stage but the last."""
        return self.problem.profile.boundaries(self.stage_ranks, exactly=False)

    @cached_property
    def limits(self) -> tuple[int, ...] | None:
        """Bytes of each rank. None means unlimited."""
        return rank_limits(self.problem.memory_limit, self.mesh.pipeline)

    @cached_property
    def speeds(self) -> tuple[float, ...] | None:
        """Speed of each stage's rank. None: all are 1."""
        if self.problem.speeds is None:
            return None
        speeds = rank_speeds(self.problem.speeds, self.mesh.pipeline).tolist()
        return tuple(speeds[rank] for rank in self.stage_ranks)

    def costs(self, layers: Sequence[LayerCost], partition: Partition) -> Costs:
        """Returns the costs of a placement's stages, each on its rank."""
        return pipeline_costs(layers, partition, links=self.links, speeds=self.speeds)

    def make(self, costs: Costs | None, caps: Sequence[float], first_trainable: int) -> Schedule:
        """Makes the schedule. See `catalogue.make`."""
        return _make(
            self.mesh.schedule,
            self.mesh.pipeline,
            self.mesh.microbatches,
            costs=costs,
            chunks=self.problem.work.chunks,
            caps=tuple(caps),
            first_trainable=first_trainable,
            objective=self.problem.work.objective,
        )

    def memory(
        self, layers: Sequence[LayerCost], partition: Partition, schedule: Schedule
    ) -> tuple[int, ...]:
        """Bytes of each rank at its peak. Runs and plans are refused by this account.

        `layers` have recomputation in their costs.
        """
        work = self.problem.work
        groups = work.accumulation_groups
        if groups is None:
            layers = [
                replace(x, weight_bytes=x.weight_bytes + x.pending_gradient_bytes) for x in layers
            ]
        return rank_memory(
            layers,
            partition.counts,
            schedule,
            # A costs file has rollback copies only if its steps had no barrier.
            post_validation=work.post_validation
            or (groups is None and any(x.rollback_bytes for x in layers)),
            replicas=self.mesh.replicas,
            accumulation_groups=1 if groups is None else groups // self.mesh.replicas,
        )

    def schedule_on(self, partition: Partition) -> Schedule:
        """Returns the schedule of a placement.

        Without costs, or if it is not made from costs, all stages count as equal, with activations
        of 1 and caps of twice those of 1F1B.
        """
        if self.layers and entry(self.mesh.schedule).from_costs:
            return evaluate(self.problem, Choice(self.mesh, partition)).schedule
        caps = (2.0 * len(self.stage_ranks),) * self.mesh.pipeline
        return self.make(None, caps, partition.owner(self.problem.profile.first_trainable))


@dataclass(frozen=True)
class Plan:
    """What a choice gives.

    Attributes:
        layers: Costs of one replica's layers, with recomputation.
        costs: Costs of the stages.
        caps: The most live memory of each rank that the schedule was first made within.
        schedule: The schedule. If none fits the memory, the one that needs the least.
    """

    replica: Replica
    partition: Partition
    recomputed: frozenset[int]
    layers: tuple[LayerCost, ...]
    costs: Costs
    caps: tuple[float, ...]
    schedule: Schedule

    @property
    def problem(self) -> Problem:
        return self.replica.problem

    @property
    def mesh(self) -> Mesh:
        return self.replica.mesh

    @property
    def choice(self) -> Choice:
        return Choice(self.mesh, self.partition, self.recomputed)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        return self.replica.stage_ranks

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Bytes of each rank at its peak."""
        return self.replica.memory(self.layers, self.partition, self.schedule)

    @cached_property
    def timeline(self) -> Timeline:
        timeline = simulate(self.schedule, self.costs)
        if not math.isfinite(timeline.makespan):
            raise InputError(
                "the times are so large that their sum is not a number any more; choose a larger "
                "unit"
            )
        return timeline

    @property
    def step(self) -> float:
        """Predicted seconds of a step's ops, by the objective."""
        return self.timeline.length(self.problem.work.objective)

    @cached_property
    def seconds(self) -> float:
        """Predicted seconds of a step, with the sums over the replicas."""
        return self.step if self.mesh.replicas == 1 else _with_reductions(self)

    @property
    def exposed(self) -> float:
        """Seconds of the sums over the replicas that come after all ops."""
        return max(0.0, self.seconds - self.step)

    @property
    def samples_per_second(self) -> float:
        return self.mesh.global_batch / self.seconds if self.seconds else math.inf

    @cached_property
    def beyond(self) -> int:
        """The most bytes that a rank needs beyond its limit. 0 if all fit."""
        limits = self.replica.limits
        if limits is None:
            return 0
        return max(0, *(need - limit for need, limit in zip(self.memory, limits, strict=True)))

    @property
    def rank(self) -> tuple[int, float]:
        """What makes one plan better than another: that it fits, then its seconds."""
        return self.beyond, self.seconds

    @property
    def stage_cost(self) -> tuple[float, ...]:
        return tuple(stage.seconds for stage in self.costs.stages)

    @property
    def rank_cost(self) -> tuple[float, ...]:
        """Seconds of each rank's stages together."""
        pairs = list(zip(self.stage_cost, self.stage_ranks, strict=True))
        return tuple(
            math.fsum(cost for cost, holder in pairs if holder == rank)
            for rank in range(self.mesh.pipeline)
        )

    @property
    def imbalance(self) -> float:
        return imbalance(self.rank_cost)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The layers that change ranks from the current placement. Source and target are ranks."""
        return moves_between_ranks(self.replica.current, self.partition, self.stage_ranks)

    @property
    def moved_bytes(self) -> int:
        return sum(self.layers[move.layer].moved_bytes for move in self.moves)

    @cached_property
    def lower_bound(self) -> float:
        """Seconds of a step that no schedule of this placement can beat."""
        bound = lower_bound(
            with_unit_memory(self.costs),
            self.mesh.microbatches,
            self.schedule.first_trainable,
            self.problem.work.objective,
            None if self.replica.limits is None else self.caps,
            self.stage_ranks,
        )
        # The bound is summed in another order. If it is reached, it may therefore be a rounding
        # error above the time that reached it.
        return min(bound, self.step)

    def check_room(self) -> Plan:
        """Returns the plan.

        Raises:
            NoRoomError: It does not fit the memory.
        """
        limits = self.replica.limits
        if limits is None or not self.beyond:
            return self
        rank = next(r for r, need in enumerate(self.memory) if need > limits[r])
        raise NoRoomError(
            f"rank {rank} needs {self.memory[rank]} bytes under {self.mesh.schedule} with the "
            f"placement {'+'.join(map(str, self.partition.counts))}, over the limit of "
            f"{limits[rank]}; "
            "use more ranks, a larger limit, smaller microbatches or a schedule that keeps less"
        )


def evaluate(problem: Problem, choice: Choice) -> Plan:
    """Makes the schedule of a choice, and predicts its seconds and bytes.

    It does not refuse. A plan that does not fit the memory has `beyond` bytes too many.

    Raises:
        ScheduleError: There is no schedule of this name, microbatches or stages.
    """
    replica, partition = Replica(problem, choice.mesh), choice.partition
    layers = with_recompute(replica.layers, choice.recomputed)
    costs = replica.costs(layers, partition)
    known = with_unit_memory(costs)
    first = min(partition.owner(problem.profile.first_trainable), partition.stages - 1)
    limits, least = replica.limits, one_microbatch(known, replica.stage_ranks)
    if limits is None:
        caps = roomy_caps(known, replica.stage_ranks)
    else:
        held = static_bytes(bare(layers), partition.counts, replica.stage_ranks)
        rooms = zip(least, held, limits, strict=True)
        caps = tuple(max(one, float(limit - own)) for one, own, limit in rooms)
    made = replica.make(known, caps, first)
    plan = best = Plan(replica, partition, choice.recomputed, layers, costs, caps, made)
    if limits is None or not entry(choice.mesh.schedule).from_costs:
        return plan
    lowered = caps
    for turn in range(_ROUNDS):
        if plan.beyond < best.beyond:
            best = plan
        if not plan.beyond or lowered == least:
            break
        alive, before = peak_memory(plan.schedule, known), lowered
        lowered = tuple(
            max(one, min(cap, live) - max(0, need - limit))
            for one, cap, live, need, limit in zip(
                least, lowered, alive, plan.memory, limits, strict=True
            )
        )
        # One microbatch at a time is the last that there is to try.
        if lowered == before or turn == _ROUNDS - 2:
            lowered = least
        try:
            plan = replace(plan, schedule=replica.make(known, lowered, first))
        except ScheduleError:
            break
    return best


def _with_reductions(plan: Plan) -> float:
    """Predicts the seconds of a step with the sums over the replicas."""
    problem, replicas = plan.problem, plan.mesh.replicas
    link, zero = LinkCost(0.0, problem.bandwidth), problem.work.zero
    ends: list[float] = []
    gathers: list[float] = []
    for row in plan.timeline.ranks:
        trained = sorted(_ready(plan, row), key=lambda pair: pair[0])
        over = -math.inf
        for ready, layer in trained:
            over = max(over, ready) + (1 if zero else 2) * link.ring_seconds(
                layer.gradient_bytes, replicas
            )
        ends.append(max(over, row[-1].end))
        weights = sum(layer.weight_bytes for _, layer in trained)
        gathers.append(link.ring_seconds(weights, replicas) if zero else 0.0)
    begins = [row[0].start for row in plan.timeline.ranks]
    if problem.work.objective is Objective.MAKESPAN:  # the optimizer is a barrier
        seconds = max(ends) + max(gathers) - min(begins)
    else:
        seconds = max(
            end + gather - begin for end, gather, begin in zip(ends, gathers, begins, strict=True)
        )
    if not math.isfinite(seconds):
        raise PartitionError(
            f"at {problem.bandwidth} bytes per second a step takes longer than a number can say; "
            "give a bandwidth that there is"
        )
    return seconds


def _ready(plan: Plan, row: Sequence[Span]) -> Iterator[tuple[float, LayerCost]]:
    """The layers of a rank that train, each with the time at which its last W ends."""
    for op, start, _ in row:
        if op.kind in (Kind.W, Kind.BW) and op.microbatch == plan.mesh.microbatches - 1:
            for index in reversed(plan.partition.range_of(op.stage)):
                layer = plan.layers[index]
                start += layer.w + (layer.b if op.kind is Kind.BW else 0.0)
                if layer.w:
                    yield start, layer
