"""Replays a changing workload under a policy, without running it.

The replay says what balancing would bring, on any number of ranks.

    moments    |  costs 0  |  costs 1  |  costs 2  | ...      each holds for some steps
    decisions  ^     ^     ^     ^     ^     ^                every so many steps

A decision rests on the costs up to the step before.

A decision is that of a run: `decide_move` is asked with what a run would know. The profiler
condenses the newest steps' costs (`readings`). If a dynamic case announces that costs change, the
profiler drops the readings that no longer hold. Costs that differ with the tokens of each step are
not announced.

Two others run beside the policy. `static` leaves the layers where they started, evenly spread. In
`perfect` every stage has the same part of every F, B and W, as if layers could be cut anywhere. If
`static` or the policy takes less time, `perfect` takes that time: a frozen prefix by itself needs
no backward of its stages.

After its last op, a rank reduces the gradients of its layers with its r - 1 copies (r replicas), on
a ring:

    2 (r - 1) latency  +  2 (r - 1) / r * gradient bytes / bytes per second
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

from dynmo.cost.layer_cost import Costs, LayerCost, LinkCost, StageCost
from dynmo.cost.profile_file import TIMES, Profile
from dynmo.cost.readings import Readings, Times
from dynmo.errors import InputError, PartitionError
from dynmo.plan.balance_request import balancer
from dynmo.plan.decisions import propose, weigh_move
from dynmo.plan.layout import moves_between_ranks
from dynmo.plan.mesh_plan import Mesh
from dynmo.plan.options import Balance
from dynmo.plan.partition import Cost, Partition, uniform
from dynmo.plan.plan_request import Plan, PlanRequest, evaluate_partition
from dynmo.plan.situation import Layers, Situation
from dynmo.plan.speeds import Speeds
from dynmo.plan.stage_costs import frozen_stages
from dynmo.schedule.automatic.make import make
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import entry, stage_ranks_of
from dynmo.schedule.memory import Limit
from dynmo.schedule.simulator import Timeline, simulate

_FREE = LinkCost(0.0, math.inf)


@dataclass(frozen=True)
class Policy:
    """The balancer, its frequency, and what a move must bring. See `trigger`.

    Attributes:
        every: Steps from one decision to the next.
        seconds_per_byte: Seconds per byte of a move. None: as long as the link takes.
    """

    balancer: str = "exact"
    cost: Cost = "time"
    every: int = 10
    margin: float = 1.0
    hysteresis: float = 0.02
    seconds_per_byte: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Workload:
    """A workload that changes while it trains.

    Attributes:
        moments: First step and cost of each layer, for each change of the costs. The first moment
            is at step 0.
        names: Names of the layers.
        steps: Number of steps.
        microbatches: Microbatches of a step of one replica.
        replicas: Number of pipelines that sum their gradients.
        chunks: Stages per rank. None means the schedule's own number.
        memory_limit: Bytes of a rank, or of each. None means unlimited.
        speeds: Speed of each rank. None: all are 1.
        initial: Layers on each stage at the start. None: evenly spread.
        link: Link between ranks.
        replica_link: Link between copies.
        announced: A dynamic case announces that the costs change.
    """

    name: str
    moments: tuple[tuple[int, tuple[LayerCost, ...]], ...]
    names: tuple[str, ...]
    steps: int
    ranks: int
    microbatches: int
    replicas: int = 1
    schedule: str = "zb-h1"
    chunks: int | None = None
    objective: Objective = Objective.MAKESPAN
    memory_limit: Limit = None
    initial: tuple[int, ...] | None = None
    link: LinkCost = _FREE
    replica_link: LinkCost = _FREE
    policy: Policy = Policy()
    announced: bool = True
    speeds: Speeds | None = None

    @property
    def layers(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one step, and the share of them that ranks do not work."""

    seconds: float
    idle_ratio: float


@dataclass(frozen=True)
class Rebalance:
    """A decision before `step`. The numbers are those of the move, made or not.

    Attributes:
        source: Layers on each stage before.
        target: Layers on each stage that the balancer proposes.
        layers: Number of layers that change ranks.
        predicted_gain: Share of a step's time that the move is predicted to save.
    """

    step: int
    moved: bool
    source: tuple[int, ...]
    target: tuple[int, ...]
    layers: int
    moved_bytes: int
    seconds: float
    predicted_gain: float
    reason: str


@dataclass(frozen=True)
class MomentResult:
    """The steps first..last, in which the costs stay.

    Seconds and idle ratios of a step are means over these steps, without moves.

    Attributes:
        rebalances: Number of moves.
        move_seconds: Seconds of the moves.
        partition: Layers on each stage after the last step.
    """

    first: int
    last: int
    seconds: float
    static: float
    perfect: float
    idle_ratio: float
    static_idle_ratio: float
    rebalances: int
    moved_layers: int
    moved_bytes: int
    move_seconds: float
    partition: tuple[int, ...]


@dataclass(frozen=True)
class ReplayResult:
    """Every step of the policy, of `static` and of `perfect`, and the decisions.

    `partitions` are the layers on each stage in each step.
    """

    workload: Workload
    policy: tuple[StepTime, ...]
    static: tuple[StepTime, ...]
    perfect: tuple[StepTime, ...]
    rebalances: tuple[Rebalance, ...]
    partitions: tuple[tuple[int, ...], ...]

    @property
    def moves(self) -> tuple[Rebalance, ...]:
        return tuple(x for x in self.rebalances if x.moved)

    @property
    def bound(self) -> int:
        return -(-self.workload.layers // self.workload.ranks)

    @property
    def seconds(self) -> float:
        """Seconds of all steps, and of the moves between them."""
        return math.fsum(x.seconds for x in self.policy) + math.fsum(x.seconds for x in self.moves)

    @property
    def static_seconds(self) -> float:
        return math.fsum(x.seconds for x in self.static)

    @property
    def perfect_seconds(self) -> float:
        return math.fsum(x.seconds for x in self.perfect)

    @property
    def phases(self) -> tuple[MomentResult, ...]:
        starts = [start for start, _ in self.workload.moments]
        stops = [*starts[1:], self.workload.steps]
        return tuple(
            self._moment_result(start, stop) for start, stop in zip(starts, stops, strict=True)
        )

    def _moment_result(self, start: int, stop: int) -> MomentResult:
        done = [x for x in self.moves if start <= x.step < stop]
        return MomentResult(
            start,
            stop - 1,
            _mean([x.seconds for x in self.policy[start:stop]]),
            _mean([x.seconds for x in self.static[start:stop]]),
            _mean([x.seconds for x in self.perfect[start:stop]]),
            _mean([x.idle_ratio for x in self.policy[start:stop]]),
            _mean([x.idle_ratio for x in self.static[start:stop]]),
            len(done),
            sum(x.layers for x in done),
            sum(x.moved_bytes for x in done),
            math.fsum(x.seconds for x in done),
            self.partitions[stop - 1],
        )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _first_trainable(layers: Sequence[LayerCost]) -> int:
    return next((i for i, x in enumerate(layers) if x.b or x.w), len(layers) - 1)


def replay(workload: Workload, listen: Callable[[int], None] | None = None) -> ReplayResult:
    """Replays a workload. Calls `listen` with the number of finished steps after every step.

    Raises:
        InputError: The schedule cannot be made, or the placement does not fit the memory.
    """
    return Replayer(workload).run(listen)


@final
class SimulatedProfiler:
    """Condenses costs of steps as a run's profiler condenses its measurements: by `Readings`."""

    def __init__(self, layers: int, readings_per_step: int = 2) -> None:
        self._per_step = readings_per_step
        self._readings = [Readings() for _ in range(layers)]
        self._latest: Layers = ()

    def observe(self, layers: Layers) -> None:
        self._latest = layers
        for readings, layer in zip(self._readings, layers, strict=True):
            readings.add_alike(Times(layer.f, layer.b, layer.w), self._per_step > 1)

    def forget(self, layers: Iterable[int]) -> None:
        """Drops the readings of layers that have changed or moved."""
        for index in layers:
            self._readings[index] = Readings()

    def costs(self) -> Layers:
        return self._with([readings.seconds for readings in self._readings])

    def halves(self) -> tuple[Layers, ...]:
        """Returns the costs by the earlier and by the later readings alone.

        Empty if some layer has one reading only.
        """
        known = [x for readings in self._readings if (x := readings.halves) is not None]
        if len(known) < len(self._readings):
            return ()
        return tuple(self._with([x[half] for x in known]) for half in (0, 1))

    def _with(self, times: Sequence[Times]) -> Layers:
        return tuple(
            layer if (layer.f, layer.b, layer.w) == x else replace(layer, f=x.f, b=x.b, w=x.w)
            for layer, x in zip(self._latest, times, strict=True)
        )


@final
class Replayer:
    """Predicts the steps of one workload, and decides as a run does."""

    def __init__(self, workload: Workload) -> None:
        balancer(workload.policy.balancer)  # is there, and can be called
        self.workload = workload
        self.stage_ranks = stage_ranks_of(workload.schedule, workload.ranks, workload.chunks)
        self.from_costs = entry(workload.schedule).from_costs
        even = uniform(workload.layers, len(self.stage_ranks))
        self.even = even
        self.start = even if workload.initial is None else Partition(workload.initial)
        if (self.start.layers, self.start.stages) != (even.layers, even.stages):
            raise InputError(
                f"policy.initial counts {self.start.layers} layers on {self.start.stages} stages, "
                f"but there are {even.layers} layers "
                f"on {even.stages} stages"
            )
        # Costs by number: first those of the moments, then those that the profiler condenses.
        self.costs = [layers for _, layers in workload.moments]
        self.numbers = {layers: number for number, layers in reversed(list(enumerate(self.costs)))}
        self.profiler = SimulatedProfiler(workload.layers, 2 if workload.announced else 1)
        self.plans: dict[tuple[int, tuple[int, ...]], Plan] = {}
        self.targets: dict[tuple[int, tuple[int, ...]], Partition] = {}
        pairs = {(min(a, b), max(a, b)) for a, b in pairwise(self.stage_ranks) if a != b}
        self.links = tuple((pair, workload.link) for pair in sorted(pairs))
        self.known: dict[tuple[int, int, tuple[int, ...]], StepTime] = {}

    def run(self, listen: Callable[[int], None] | None) -> ReplayResult:
        workload, policy = self.workload, self.workload.policy
        current = self.start
        policy_steps, static, ideal = list[StepTime](), list[StepTime](), list[StepTime]()
        considered: list[Rebalance] = []
        partitions: list[tuple[int, ...]] = []
        perfect = [self.perfect(moment) for moment in range(len(workload.moments))]
        measured = 0  # the number of the costs that the schedule was last made from
        for step in range(workload.steps):
            if step and step % policy.every == 0:
                measured = self.number(self.profiler.costs())
                if policy.balancer != "none":
                    rebalance = self.consider(step, measured, current)
                    if rebalance is not None:
                        considered.append(rebalance)
                        current = self.after(rebalance, current)
            moment = self.moment(step)
            if workload.announced and step:
                self.profiler.forget(self.changed_layers(self.moment(step - 1), moment))
            self.profiler.observe(self.costs[moment])
            had = self.step(moment, measured, current), self.step(moment, measured, self.even)
            policy_steps.append(had[0])
            static.append(had[1])
            # Even stages share a frozen prefix's work, so that all of them run backwards. A
            # placement may therefore do better than even stages.
            ideal.append(min(perfect[moment], *had, key=lambda x: x.seconds))
            partitions.append(current.counts)
            if listen is not None:
                listen(step + 1)
        return ReplayResult(
            workload,
            tuple(policy_steps),
            tuple(static),
            tuple(ideal),
            tuple(considered),
            tuple(partitions),
        )

    def after(self, rebalance: Rebalance, current: Partition) -> Partition:
        """Moves the layers if the decision says so."""
        if not rebalance.moved:
            return current
        target = Partition(rebalance.target)
        moves = moves_between_ranks(current, target, self.stage_ranks)
        self.profiler.forget(move.layer for move in moves)
        return target

    def moment(self, step: int) -> int:
        return max(index for index, (start, _) in enumerate(self.workload.moments) if start <= step)

    def number(self, layers: tuple[LayerCost, ...]) -> int:
        if layers not in self.numbers:
            self.numbers[layers] = len(self.costs)
            self.costs.append(layers)
        return self.numbers[layers]

    def changed_layers(self, before: int, after: int) -> list[int]:
        pairs = zip(self.costs[before], self.costs[after], strict=True)
        return [index for index, (old, new) in enumerate(pairs) if old != new]

    def request(self, moment: int, current: Partition) -> PlanRequest:
        workload = self.workload
        layers = self.costs[moment]
        profile = Profile(
            layers,
            workload.names,
            _first_trainable(layers),
            self.links,
            partition=current.counts,
            ranks=workload.ranks,
        )
        return PlanRequest(
            profile,
            workload.ranks,
            workload.microbatches,
            workload.schedule,
            workload.policy.balancer,
            workload.chunks,
            workload.memory_limit,
            workload.objective,
            cost=workload.policy.cost,
            speeds=workload.speeds,
        )

    # -- deciding, as a run does -------------------------------------------------------------------

    def situation(self, step: int, measured: int, current: Partition) -> Situation:
        workload, policy, layers = self.workload, self.workload.policy, self.costs[measured]
        return Situation(
            step=step,
            end=workload.steps,
            layers=layers,
            halves=self.profiler.halves(),
            names=workload.names,
            first_trainable=_first_trainable(layers),
            links=self.links,
            mesh=Mesh(
                workload.ranks, workload.replicas, workload.microbatches, 1, workload.schedule
            ),
            partition=current,
            chunks=workload.chunks,
            objective=workload.objective,
            memory_limit=workload.memory_limit,
            speeds=workload.speeds,
            scheduled_speeds=workload.speeds,
            accumulation_groups=workload.replicas,
            seconds_per_byte=policy.seconds_per_byte,
            balance=Balance(
                balancer=policy.balancer,
                cost=policy.cost,
                margin=policy.margin,
                hysteresis=policy.hysteresis,
            ),
            seed=policy.seed,
        )

    def consider(self, step: int, measured: int, current: Partition) -> Rebalance | None:
        """Decides if layers move, by the function that a run calls."""
        now = self.situation(step, measured, current)
        key = measured, current.counts
        if key not in self.targets or now.balance.balancer.startswith("python:"):
            try:
                self.targets[key] = propose(now)
            except PartitionError:  # no placement fits the memory
                self.targets[key] = current
        choice = weigh_move(now, self.targets[key])
        if choice is None:
            return None
        moves = moves_between_ranks(current, choice.target, self.stage_ranks)
        return Rebalance(
            step,
            choice.decision.move,
            current.counts,
            choice.target.counts,
            len(moves),
            sum(now.layers[move.layer].moved_bytes for move in moves),
            choice.on_the_way,
            choice.decision.predicted_gain,
            choice.decision.reason,
        )

    # -- how long a step takes ---------------------------------------------------------------------

    def plan(self, moment: int, partition: Partition) -> Plan:
        key = moment, partition.counts
        if key not in self.plans:
            self.plans[key] = evaluate_partition(self.request(moment, partition), partition)
        return self.plans[key]

    def step(self, moment: int, measured: int, partition: Partition) -> StepTime:
        """Time of a step under the schedule made from the last measured costs."""
        if not self.from_costs:
            measured = moment
        key = moment, measured, partition.counts
        if key not in self.known:
            plan = self.plan(moment, partition)
            timeline = plan.timeline
            if measured != moment:
                schedule = self.plan(measured, partition).schedule
                # With another frozen prefix the order is made anew at once, because there are other
                # ops.
                if schedule.first_trainable == plan.schedule.first_trainable:
                    timeline = simulate(schedule, plan.costs)
            self.known[key] = self.finish(timeline, plan)
        return self.known[key]

    def finish(self, timeline: Timeline, plan: Plan) -> StepTime:
        """Time of a step: the ops, then the reduction of every rank's gradients."""
        held = [0] * self.workload.ranks
        for layer, cost in enumerate(plan.request.layers):
            held[self.stage_ranks[plan.partition.owner(layer)]] += (
                cost.gradient_bytes if cost.w else 0
            )
        return self.until(timeline, [self.reduce(x) for x in held])

    def until(self, timeline: Timeline, reduce: Sequence[float]) -> StepTime:
        """Time of a step: the ops, then the reductions."""
        begin = min(row[0].start for row in timeline.ranks)
        makespan = self.workload.objective is Objective.MAKESPAN
        seconds = max(
            row[-1].end + tail - (begin if makespan else row[0].start)
            for row, tail in zip(timeline.ranks, reduce, strict=True)
        )
        busy = math.fsum(timeline.busy) / len(timeline.busy)
        return StepTime(seconds, 1 - busy / seconds if seconds else 0.0)

    def reduce(self, size: float) -> float:
        return 2 * self.workload.replica_link.ring_seconds(size, self.workload.replicas)

    def perfect(self, moment: int) -> StepTime:
        """Time of a step if every stage has the mean of F, B, W and gradients.

        The links are those of the even placement.
        """
        workload, stages = self.workload, len(self.stage_ranks)
        even = self.plan(moment, self.even)
        layers = even.request.layers
        speeds = workload.speeds or (1.0,)
        shares = stages * math.fsum(speeds) / len(speeds)
        f, b, w = (math.fsum(getattr(x, key) for x in layers) / shares for key in TIMES)
        kept, stash = (
            math.fsum(getattr(x, key) for x in layers) / stages or 1.0
            for key in ("activation_bytes", "stash_bytes")
        )
        costs = Costs((StageCost(f, b, w, kept, stash - kept, -stash),) * stages, even.costs.links)
        caps = (2.0 * stages * kept,) * workload.ranks
        schedule = make(
            workload.schedule,
            workload.ranks,
            workload.microbatches,
            costs=costs,
            chunks=workload.chunks,
            caps=caps,
            first_trainable=min(frozen_stages(costs), stages - 1),
            objective=workload.objective,
        )
        size = math.fsum(x.gradient_bytes for x in layers if x.w) / workload.ranks
        return self.until(simulate(schedule, costs), [self.reduce(size)] * workload.ranks)
