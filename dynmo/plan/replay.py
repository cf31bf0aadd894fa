"""What balancing would bring to a workload that changes while it trains.

    moments    |  costs 0  |  costs 1  |  costs 2  | ...      each holds for some steps
    decisions  ^     ^     ^     ^     ^     ^                every so many steps

Nothing is run. A decision is that of a run: `decide` is asked with what a run would know, the
readings of the newest steps before it. If a dynamic case announces that costs change, readings that
no longer hold are dropped. Costs that differ with the tokens of each step are not announced.

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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple, final

from dynmo.cost.costs_file import TIMES, Profile
from dynmo.cost.readings import WINDOW, Times
from dynmo.cost.readings import Readings as Window
from dynmo.errors import InputError
from dynmo.plan.best import plan_on
from dynmo.plan.costs import even_costs, frozen_stages, roomy_caps
from dynmo.plan.decide import DecisionRecord
from dynmo.plan.evaluate import Plan, evaluate
from dynmo.plan.partition import Partition, moves_between_ranks, uniform
from dynmo.plan.problem import Allowed, Choice, Layers, Mesh, Problem, Readings, Rules, Work
from dynmo.plan.workload import Workload
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import chunks_of, entry, stage_ranks_of
from dynmo.schedule.simulator import Timeline, simulate


class StepTime(NamedTuple):
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
    def seconds(self) -> float:
        """Seconds of all steps, and of the moves between them."""
        return math.fsum(x.seconds for x in (*self.policy, *self.moves))


def replay(workload: Workload) -> ReplayResult:
    """Replays a workload.

    Raises:
        InputError: The schedule cannot be made, or the placement does not fit the memory.
    """
    policy, steps = workload.policy, _Steps(workload)
    moments = dict(workload.moments)
    layers = known = moments[0]
    even = uniform(len(layers), len(steps.stage_ranks))
    current = even if policy.initial is None else Partition(tuple(policy.initial))
    if (current.layers, current.stages) != (even.layers, even.stages):
        raise InputError(
            f"policy.initial counts {current.layers} layers on {current.stages} stages, but there "
            f"are {even.layers} layers on {even.stages} stages"
        )
    readings = [Window() for _ in layers]
    rows = list[tuple[StepTime, StepTime, StepTime, tuple[int, ...]]]()
    considered, asked, decided = list[Rebalance](), None, None
    least = -math.inf if policy.balancer.startswith("python:") else policy.hysteresis
    cuts = sorted({*moments, *range(0, workload.steps, policy.every)})
    for start, stop in pairwise([*cuts, workload.steps]):  # costs and placement stay until `stop`
        if start and start % policy.every == 0:
            known, halves = _condensed(readings, layers)
            facts = known, halves, current
            # Whether a gain is too small does not depend on the steps that are left.
            if facts != asked or (decided and decided.predicted_gain >= least):
                decided = _decide(question(workload, start, *facts))
            asked = facts
            if decided:
                considered.append(replace(decided, step=start))
            if decided and decided.moved:
                target = Partition(decided.target)
                for move in moves_between_ranks(current, target, steps.stage_ranks):
                    readings[move.layer] = Window()
                current = target
        before, layers = layers, moments.get(start, layers)
        for index, (old, new) in enumerate(zip(before, layers, strict=True)):
            if workload.announced and old != new:
                readings[index] = Window()
        count = stop - start
        for reading, layer in list(zip(readings, layers, strict=True)) * min(count, WINDOW):
            reading.add_alike(Times(layer.f, layer.b, layer.w), workload.announced)
        each = steps.time(layers, known, current), steps.time(layers, known, even)
        # Even stages share a frozen prefix's work, so that all of them run backwards. A placement
        # may therefore do better than even stages.
        ideal = min(steps.perfect(layers, even), *each, key=lambda x: x.seconds)
        rows += [(*each, ideal, current.counts)] * count
    mine, static, perfect, partitions = zip(*rows, strict=True)
    return ReplayResult(workload, mine, static, perfect, tuple(considered), partitions)


def _condensed(readings: Sequence[Window], layers: Layers) -> tuple[Layers, tuple[Layers, ...]]:
    """Returns costs by all readings, and by the earlier and by the later ones alone.

    The latter are missing if some layer has one reading only.
    """
    times = [(x.seconds, *(x.halves or ())) for x in readings]
    known, *halves = (
        tuple(
            layer if (layer.f, layer.b, layer.w) == x else replace(layer, f=x.f, b=x.b, w=x.w)
            for layer, x in zip(layers, column, strict=True)
        )
        for column in zip(*times, strict=False)
    )
    return known, tuple(halves)


def question(
    workload: Workload, step: int, layers: Layers, halves: tuple[Layers, ...], current: Partition
) -> DecisionRecord:
    """Returns what a run would decide on before a step."""
    policy, (problem, mesh) = workload.policy, _known(workload, layers)
    work = replace(problem.work, seed=policy.seed, step=step, end=workload.steps)
    readings = Readings(halves, seconds_per_byte=policy.seconds_per_byte)
    problem, rules = replace(problem, work=work), Rules(balance=policy)
    return DecisionRecord(problem, Choice(mesh, current), rules, readings, {})


def _decide(asked: DecisionRecord) -> Rebalance | None:
    """Decides if layers move, by the function that a run calls. None: they are in place."""
    decision, now = asked.again(), asked.now.partition
    plan, verdict = decision.plan, decision.verdict
    if plan.partition == now:
        return None
    moves = moves_between_ranks(now, plan.partition, plan.stage_ranks)
    return Rebalance(
        asked.problem.work.step,
        verdict.pays,
        now.counts,
        plan.partition.counts,
        len(moves),
        sum(asked.problem.layers[move.layer].moved_bytes for move in moves),
        verdict.price,
        verdict.gain,
        verdict.reason,
    )


def _known(workload: Workload, layers: Layers) -> tuple[Problem, Mesh]:
    stage_ranks = stage_ranks_of(workload.schedule, workload.ranks, workload.chunks)
    pairs = {(min(a, b), max(a, b)) for a, b in pairwise(stage_ranks) if a != b}
    links = tuple((pair, workload.link.to_link_cost()) for pair in sorted(pairs))
    trained = next((index for index, x in enumerate(layers) if x.b or x.w), len(layers) - 1)
    profile = Profile(layers, workload.names, trained, links, microbatch=1)
    work = Work(workload.objective, chunks=workload.chunks, cost=workload.policy.cost)
    speeds = None if workload.speeds is None else tuple(workload.speeds)
    problem, count = Problem(profile, work, workload.memory_limit, speeds), workload.microbatches
    return problem, problem.mesh(workload.ranks, count, workload.schedule, workload.replicas)


@final
class _Steps:
    """Predicts the steps of a workload."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.stage_ranks = stage_ranks_of(workload.schedule, workload.ranks, workload.chunks)
        self.plan = cache(self._plan)
        self.time = cache(self._time)
        self.perfect = cache(self._perfect)

    def _plan(self, layers: Layers, partition: Partition) -> Plan:
        problem, mesh = _known(self.workload, layers)
        return evaluate(problem, Choice(mesh, partition)).check_room()

    def _time(self, layers: Layers, known: Layers, partition: Partition) -> StepTime:
        """Time of a step under the schedule made from the costs that were known last."""
        plan = made = self.plan(layers, partition)
        if entry(self.workload.schedule).from_costs:
            made = self.plan(known, partition)
            # With another frozen prefix there are other ops, so the order is made anew at once.
            if made.schedule.first_trainable != plan.schedule.first_trainable:
                made = plan
        return self.with_reductions(simulate(made.schedule, plan.costs), plan)

    def with_reductions(self, timeline: Timeline, plan: Plan) -> StepTime:
        held = [0] * self.workload.ranks
        for index, layer in enumerate(plan.layers):
            rank = self.stage_ranks[plan.partition.owner(index)]
            held[rank] += layer.gradient_bytes if layer.w else 0
        return self.until(timeline, held)

    def until(self, timeline: Timeline, held: Sequence[float]) -> StepTime:
        """Time of a step: the ops, then the reduction of every rank's bytes of gradients."""
        workload = self.workload
        link = (workload.replica_link or workload.link).to_link_cost()
        begin = min(row[0].start for row in timeline.ranks)
        barrier = workload.objective is Objective.MAKESPAN
        seconds = max(
            row[-1].end
            + 2 * link.ring_seconds(size, workload.replicas)
            - (begin if barrier else row[0].start)
            for row, size in zip(timeline.ranks, held, strict=True)
        )
        busy = math.fsum(timeline.busy) / len(timeline.busy)
        return StepTime(seconds, 1 - busy / seconds if seconds else 0.0)

    def _perfect(self, layers: Layers, even: Partition) -> StepTime:
        """Time of a step if every stage has the mean of F, B, W and gradients.

        The links are those of the even placement.
        """
        workload, plan = self.workload, self.plan(layers, even)
        speeds = workload.speeds or (1.0,)
        shares = even.stages * math.fsum(speeds) / len(speeds)
        times = (math.fsum(getattr(x, key) for x in plan.layers) / shares for key in TIMES)
        costs = replace(even_costs(plan.layers, even.stages, *times), links=plan.costs.links)
        caps, frozen = roomy_caps(costs, self.stage_ranks), frozen_stages(costs)
        schedule = plan.replica.make(costs, caps, min(frozen, even.stages - 1))
        size = math.fsum(x.gradient_bytes for x in plan.layers if x.w) / workload.ranks
        return self.until(simulate(schedule, costs), [size] * workload.ranks)


# -- fewest ranks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RanksNeeded:
    """The fewest ranks that are fast enough in the steps first .. last. All, if none are.

    Attributes:
        seconds: Seconds of a step on these ranks.
        layers: Layers on each stage.
    """

    first: int
    last: int
    ranks: int
    seconds: float
    layers: tuple[int, ...]


def ranks_needed(workload: Workload, tolerance: float) -> tuple[RanksNeeded, ...]:
    """Finds the fewest ranks for each moment of a workload.

    The costs are known at once, and moves are free. The microbatches stay. A step may take
    `tolerance` longer, as a share, than that of the first moment on all ranks.

    Raises:
        InputError: The first moment does not fit all ranks.
    """
    if workload.speeds is not None or isinstance(workload.memory_limit, tuple):
        key = "memory_limit" if workload.speeds is None else "speeds"
        raise InputError(
            f"{key} names single ranks, but --fewest-ranks searches their number; leave one of the "
            "two out"
        )
    moments, all_ranks = workload.moments, workload.ranks
    stops = [*(start for start, _ in moments[1:]), workload.steps]
    most = min(all_ranks, len(workload.names) // chunks_of(workload.schedule, workload.chunks))
    limit = (1 + tolerance) * _on(all_ranks, workload, moments[0][1])[0]
    rows = list[RanksNeeded]()
    for (start, layers), stop in zip(moments, stops, strict=True):
        for ranks in range(1, most + 1):
            with suppress(InputError):  # it does not fit, or the schedule needs more ranks
                found = _on(ranks, workload, layers)
                if found[0] <= limit:
                    break
        else:
            ranks, found = all_ranks, _on(all_ranks, workload, layers)
        rows.append(RanksNeeded(start, stop - 1, ranks, *found))
    return tuple(rows)


def _on(ranks: int, workload: Workload, layers: Layers) -> tuple[float, tuple[int, ...]]:
    """The seconds of a step on so many ranks, and the placement that the balancer proposes."""
    workload = workload.model_copy(update={"ranks": ranks})
    (problem, mesh), name = _known(workload, layers), workload.policy.balancer
    allowed = Allowed(ranks, workload.microbatches, balancer="exact" if name == "none" else name)
    plan = plan_on(problem, mesh, allowed).check_room()
    return _Steps(workload).with_reductions(plan.timeline, plan).seconds, plan.partition.counts


def mean_ranks(rows: Sequence[RanksNeeded]) -> float:
    """The mean number of ranks over the steps."""
    steps = [row.last - row.first + 1 for row in rows]
    return sum(row.ranks * x for row, x in zip(rows, steps, strict=True)) / sum(steps)
