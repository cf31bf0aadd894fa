"""A whole plan from measured costs, without running anything: where the layers live, in which order the ranks work, what it takes.

costs of layers -> balancer -> placement -> costs of stages -> schedule -> simulator -> step time, idleness, memory
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Literal

from dynmo.balance.balancers import BalanceRequest, balancer
from dynmo.balance.partition import Cost, Move, Partition, imbalance, moves, uniform
from dynmo.balance.placed import Make, freeze, frozen_stages, pipeline_costs
from dynmo.balance.recompute import choose, memory, recomputed
from dynmo.costs import Costs, LayerCost, LinkCost, uniform_costs
from dynmo.errors import InputError, NoRoomError, PartitionError, ScheduleError
from dynmo.memory import Pairs, live_limits, reduction_bytes
from dynmo.profile_file import Profile
from dynmo.schedule.bound import Objective
from dynmo.schedule.catalogue import check_microbatches, entry, make, placement_of
from dynmo.schedule.chunk_bound import lower_bound_on
from dynmo.schedule.op import Schedule
from dynmo.simulator import Timeline, resident, simulate

LARGE = 6000  # ops of a kind: a simulation takes a tenth of a second

Recompute = Literal["none", "auto", "all"]
"""Which layers keep only their input and run F again in B: none, those that must so that all fits, or all."""


@dataclass(frozen=True)
class Job:
    """What to plan for. memory_limit: bytes of a rank. any_links: take the slowest known link where the file lists other boundaries. cost:
    what the balancer goes by; seed and step: for the balancer that is random. quick: "exact" does not simulate its ties, and a placement
    that does not fit is not repaired. recomputed: layers that are recomputed whatever `recompute` says. replicas: of this pipeline, that
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
    recompute: Recompute = "none"
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
        return recomputed(self.kept, self.recomputed)

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
    """`partition` has a count per stage, `memory` bytes per rank, `stage_cost` seconds of one microbatch's F, B and W per stage."""

    job: Job
    partition: Partition
    costs: Costs
    schedule: Schedule
    timeline: Timeline
    lower_bound: float
    memory: tuple[int, ...]

    @property
    def step(self) -> float:
        """Predicted seconds of a step, by the objective."""
        return self.timeline.makespan if self.job.objective is Objective.MAKESPAN else self.timeline.span

    @property
    def stage_cost(self) -> tuple[float, ...]:
        return tuple(stage.seconds for stage in self.costs.stages)

    @property
    def rank_cost(self) -> tuple[float, ...]:
        """The same of each rank's stages together."""
        pairs = list(zip(self.stage_cost, self.job.placement, strict=True))
        return tuple(math.fsum(cost for cost, holder in pairs if holder == rank) for rank in range(self.job.ranks))

    @property
    def imbalance(self) -> float:
        return imbalance(self.rank_cost)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The layers that change ranks, from the placement as it is; source and target are ranks."""
        placement = self.job.placement
        across = (Move(layer, placement[a], placement[b]) for layer, a, b in moves(self.job.current, self.partition))
        return tuple(move for move in across if move.source != move.target)

    @property
    def moved_bytes(self) -> int:
        return sum(self.job.profile.layers[move.layer].moved_bytes for move in self.moves)


def attempt(job: Job) -> Plan:
    """The plan for just this job. Raises PartitionError or ScheduleError where it cannot be made or does not fit the memory."""
    if job.recompute == "all":
        return _attempt(replace(job, recompute="none", recomputed=frozenset(range(len(job.kept)))))
    if job.recompute == "auto" and job.memory_limit is not None:
        return _recomputing(replace(job, recompute="none"), job.memory_limit)
    return _attempt(job)


def _recomputing(job: Job, limit: int) -> Plan:
    """The best of: fitting without recomputing; and the placement that would be best with enough memory, made to fit by recomputing. Other
    costs want another placement, and that may want other layers to be recomputed: a few rounds of both."""
    found: list[Plan] = []
    failed = _into(found, lambda: _attempt(job))
    free = _attempt(replace(job, memory_limit=None))  # what is wrong apart from memory is told as it is
    if found and found[0].step <= free.step:
        return found[0]
    for _ in range(3):
        try:
            chosen = choose(job.kept, free.partition.counts, free.schedule, limit, job.replicas)
        except PartitionError:
            # This placement does not fit in any way. From one that does with all recomputed, what is not needed is given back.
            every = replace(job, recomputed=frozenset(range(len(job.kept))))
            problem = _into(found, lambda every=every: _attempt(every))
            if problem is not None:
                failed = failed or problem
                break
            free = found[-1]
            continue
        again, partition = replace(job, recomputed=chosen), free.partition
        _into(found, lambda again=again, partition=partition: judge(again, partition))
        _into(found, lambda again=again: _attempt(again))
        nearer = _attempt(replace(again, memory_limit=None))
        if nearer.partition == free.partition:
            break
        free = nearer
    if not found:
        assert failed is not None
        raise failed
    return min(found, key=lambda plan: plan.step)


def _into(found: list[Plan], make: Callable[[], Plan]) -> InputError | None:
    try:
        found.append(make())
    except (PartitionError, ScheduleError) as error:
        return error
    return None


def _limits(job: Job) -> tuple[int | None, ...]:
    """What balancers are told. They do not know what comes for a moment only, so there is a second try with that set aside."""
    if job.memory_limit is None or not job.reserve:
        return (job.memory_limit,)
    return (job.memory_limit, max(0, job.memory_limit - job.reserve))


def _attempt(job: Job) -> Plan:
    check_microbatches(job.schedule, job.ranks, job.microbatches)
    best: Plan | None = None
    failed: InputError | None = None
    for pairs, limit in product(_residents(job), _limits(job)):
        request = BalanceRequest(
            job.layers,
            job.current,
            job.cost,
            resident=pairs,
            memory_limit=None if limit is None else (limit,) * len(job.placement),
            seed=job.seed,
            step=job.step,
            names=job.profile.names,
            make=None if job.quick and job.balancer == "exact" else _maker(job),
            links=job.links,
            objective=job.objective,
            first_trainable_layer=job.profile.first_trainable,
            placement=job.placement,
        )
        try:
            found = judge(job, balancer(job.balancer)(request))
        except (PartitionError, ScheduleError) as error:
            failed = failed or error
            continue
        if best is None or found.step < best.step:
            best = found
        if job.schedule != "zb-auto":
            break
    if best is None and job.memory_limit is not None and not job.quick:
        best = _repaired(job)
    if best is None:
        assert failed is not None
        raise failed
    return best


def _residents(job: Job) -> Iterator[tuple[Pairs, ...] | None]:
    """What the schedule keeps alive, as the balancer is told: a schedule that is made within limits may keep little or much."""
    if job.memory_limit is None:
        yield None
        return
    stages = len(job.placement)
    costs = uniform_costs(stages, 1.0, 1.0, 1.0)
    made = make(job.schedule, job.ranks, job.microbatches, costs=costs, chunks=job.chunks, caps=(float(job.ranks),) * job.ranks)
    yield resident(made)
    if job.schedule == "zb-auto" and job.ranks > 1:
        yield (((1, 0), (0, 1)),) * stages
    elif not entry(job.schedule).from_costs and job.profile.first_trainable:
        # With a frozen prefix the others may keep less. How many stages it fills, only the placement says.
        for frozen in range(1, stages):
            yield resident(make(job.schedule, job.ranks, job.microbatches, chunks=job.chunks, first_trainable=frozen))


_TRIES = 600_000  # ops of the plans that are looked at


def _repaired(job: Job) -> Plan | None:
    """What a rank keeps is less than its stages' peaks together, so the balancers may refuse what fits: from the placement without a limit,
    one boundary at a time, as long as the fullest rank gets emptier. For balancers that choose; a baseline's placement is what it is."""
    if job.balancer not in ("exact", "schedule-aware") or job.schedule == "zb-auto":
        return None
    if len(job.placement) == job.ranks and not job.profile.first_trainable:
        return None  # here a stage's peaks are all there is, and nothing fits that was refused
    free, limit = replace(job, memory_limit=None, quick=True), job.memory_limit
    assert limit is not None
    try:
        starts = [_attempt(free).partition, job.current]
    except InputError:
        return None
    tries = min(300, _TRIES // (3 * len(job.placement) * job.microbatches))
    for start in starts:
        plan = judge(free, start)
        while max(plan.memory) > limit and tries > 0:
            nearer: Plan | None = None
            for counts in _neighbours(plan.partition.counts):
                other = judge(free, Partition(counts))
                tries -= 1
                if max(other.memory) < max((nearer or plan).memory):
                    nearer = other
            if nearer is None:
                break
            plan = nearer
        if max(plan.memory) <= limit:
            return judge(job, plan.partition)
    return None


def _neighbours(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for boundary in range(len(counts) - 1):
        for by in (-1, 1):
            if counts[boundary] + by > 0 and counts[boundary + 1] - by > 0:
                yield (*counts[:boundary], counts[boundary] + by, counts[boundary + 1] - by, *counts[boundary + 2 :])


def _maker(job: Job) -> Make:
    """The schedule that would run at some stages' costs. What a rank holds anyway is taken as everyone's mean: only the plan that is
    chosen is made within its ranks' true limits."""
    held = sum(layer.static_bytes for layer in job.layers) / job.ranks

    def scheduled(costs: Costs) -> Schedule:
        costs, kept = _with_memory(costs), [0.0] * job.ranks
        for stage, rank in zip(costs.stages, job.placement, strict=True):
            kept[rank] += stage.held
        if job.memory_limit is None:
            caps = (2.0 * job.ranks * max(kept),) * job.ranks
        else:
            caps = tuple(max(own, job.memory_limit - job.reserve - held) for own in kept)
        return _make(job, costs, caps)

    return scheduled


def _make(job: Job, costs: Costs, caps: tuple[float, ...]) -> Schedule:
    return make(
        job.schedule,
        job.ranks,
        job.microbatches,
        costs=costs,
        chunks=job.chunks,
        caps=caps,
        first_trainable=frozen_stages(costs),
        objective=job.objective,
    )


def _with_memory(costs: Costs) -> Costs:
    """Where no sizes are known, every stage's activations count 1: a schedule should not take memory for free."""
    if any(stage.mem_f for stage in costs.stages):
        return costs
    return Costs(tuple(replace(stage, mem_f=1.0, mem_b=-0.5, mem_w=-0.5) for stage in costs.stages), costs.links)


def judge(job: Job, partition: Partition) -> Plan:
    """What this placement would take, by the simulator, with the schedule made for it. Raises NoRoomError where it does not fit."""
    costs = pipeline_costs(job.layers, partition, links=job.links)
    shaped = _with_memory(costs)
    if shaped is costs:
        limit = None if job.memory_limit is None else job.memory_limit - job.reserve
        caps = live_limits(job.layers, partition.counts, job.placement, limit)
    else:
        caps = (2.0 * len(job.placement),) * job.ranks
    made = _make(job, shaped, caps)
    needs = memory(job.kept, job.recomputed, partition.counts, made, job.replicas)
    for rank, need in enumerate(needs):
        if job.memory_limit is not None and need > job.memory_limit:
            raise NoRoomError(
                f"rank {rank} needs {need} bytes under {job.schedule} with the placement {'+'.join(map(str, partition.counts))}, over the "
                f"limit of {job.memory_limit}; use more ranks, a larger limit, smaller microbatches or a schedule that keeps less"
            )
    timeline = simulate(made, costs)
    if not math.isfinite(timeline.makespan):
        raise InputError("the times are so large that their sum is not a number any more; choose a larger unit")
    reached = timeline.makespan if job.objective is Objective.MAKESPAN else timeline.span
    limits = None if job.memory_limit is None else caps
    bound = lower_bound_on(job.placement, shaped, job.microbatches, frozen_stages(costs), job.objective, limits)
    # A bound that is reached may come out a rounding error above what reached it, since it is summed in another order.
    return Plan(job, partition, costs, made, timeline, min(bound, reached), needs)
