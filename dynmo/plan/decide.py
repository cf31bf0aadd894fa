"""Decides before a step. One pure function of what is known.

    Problem, Plan now --candidates--> Plan, Plan, ... --pays--> Verdict --> Decision

    placement   another placement, under the same schedule or another; the order of the ops
    mesh        another mesh of the same ranks
    ranks       another number of ranks, by the rule that `elastic` names

The candidates come in the order in which they are wanted. The first that pays is taken.

Few layers on a rank cannot be balanced, however they are placed: the larger of two halves stays the
larger. Twice as many layers on half as many stages can be balanced, if the memory holds them.

    4 ranks                 2 ranks x 2 replicas
    rank 0  a b             rank 0  a b c d
         1  c d                  1  a b c d
         2  e f                  2  e f g h      rank 0 must get c and d, rank 1 a and b, ...
         3  g h                  3  e f g h

A run takes the fewest ranks whose best mesh is fast enough:

    ranks        4        5        6        8 (now)     12
    a step       0.52 s   0.44 s   0.39 s   0.33 s      0.27 s      best mesh that fits the memory
                 too slow fewest                                    a step may take 0.45 s

Noise must not make it go to and fro. Two thresholds therefore lie apart around the limit, with h =
hysteresis:

    fewer ranks    only if they take at most   limit / (1 + h)
    more ranks     only if the ranks now, with their best placement, take over   limit x (1 + h)
                   and the larger number is faster by more than h

If no number of ranks is fast enough, a run grows to the fastest one. It never shrinks to a step
that takes longer than the limit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from pydantic import TypeAdapter

from dynmo.cost.input_file import read_text
from dynmo.errors import InputError, NoRoomError, PartitionError, ScheduleError
from dynmo.files import parse_json
from dynmo.plan.alternatives import RankOptions
from dynmo.plan.balancers import balancer, is_forced, merge
from dynmo.plan.best import NoMeshFitsError, handicap, search
from dynmo.plan.evaluate import Plan, Replica, evaluate
from dynmo.plan.partition import kept_ranks, moves_between_ranks, uniform
from dynmo.plan.pays import Change, Verdict, at, confirm, gain_of, intervals, pays
from dynmo.plan.problem import Allowed, Choice, Layers, Problem, Readings, Rules
from dynmo.schedule.catalogue import SHAPES, entry
from dynmo.schedule.memory import least_limit
from dynmo.schedule.simulator import simulate


@dataclass(frozen=True)
class Decision:
    """A possible change, and whether it is made.

    Attributes:
        plan: The plan that was weighed. The present one if there is no other.
        verdict: Whether the run goes on with `plan`.
        remade: Share of a step that the schedule saves if it is made anew from the present costs.
            None if it stays.
        ranks: Number of ranks that the run would like.
        reference: Seconds that a step took at first. A step may take the tolerance longer.
        refusal: Why no change is possible, for want of memory or of a placement.
    """

    plan: Plan
    verdict: Verdict
    remade: float | None = None
    ranks: int = 0
    reference: float | None = None
    refusal: str | None = None

    @property
    def answer(self) -> dict[str, Any]:
        """What ranks must agree on: no floats, whose last bit may differ between kinds of CPU."""
        mesh = self.plan.mesh
        return {
            "change": self.verdict.pays,
            "uncertain": self.verdict.uncertain,
            "mesh": [mesh.pipeline, mesh.replicas, mesh.microbatches],
            "schedule": mesh.schedule,
            "partition": list(self.plan.partition.counts),
            "remade": self.remade is not None,
            "ranks": self.ranks,
        }


_NOTHING = Verdict(False, 0.0, "stay: nothing else is better")


def decide(problem: Problem, now: Plan, rules: Rules, readings: Readings) -> Decision:
    """Decides whether, and how, a run goes on otherwise than now.

    Equal questions have equal answers, so every rank may ask for itself.
    """
    asked = {"placement": _Placements, "mesh": _Meshes, "ranks": _Ranks}[rules.kind]
    try:
        decision = asked(problem, now, rules, readings).decide()
    except PartitionError as error:
        verdict = Verdict(False, 0.0, f"stay: {error}")
        decision = Decision(now, verdict, reference=readings.reference, refusal=str(error))
    if rules.kind != "placement":
        return decision
    plan = decision.plan if decision.verdict.pays else now
    return replace(decision, remade=_remade(plan, rules, readings))


def _remade(plan: Plan, rules: Rules, readings: Readings) -> float | None:
    """Returns the share of a step that a schedule made anew saves. None if the schedule stays.

    One reading alone proves nothing. It must save a quarter of `balance.hysteresis`.
    """
    problem = plan.problem
    if not readings.halves or not entry(plan.mesh.schedule).from_costs:
        return None
    profile = replace(problem.profile, layers=readings.scheduled or ())
    known = replace(problem, profile=profile, speeds=readings.scheduled_speeds)
    schedule = Replica(known, plan.mesh).schedule_on(plan.partition)
    before = simulate(schedule, plan.costs).length(problem.work.objective)
    gain = gain_of(before, plan.step)
    if readings.is_measured and gain <= rules.balance.hysteresis / 4:
        return None
    return max(0.0, gain)


class _Question:
    """One question, with the problem that its candidates solve."""

    def __init__(self, problem: Problem, now: Plan, rules: Rules, readings: Readings) -> None:
        self.problem, self.now = problem, now
        self.rules, self.readings = rules, readings

    def compare(
        self, plan: Plan, there: float, back: float, seconds: Callable[[Plan], float]
    ) -> Verdict:
        """Compares a step with one as it is now. Each half of the readings must say the same."""
        balance, readings = self.rules.balance, self.readings
        change = Change(there, back, balance.margin, balance.hysteresis * readings.doubt)

        def verdict(problem: Problem) -> Verdict:
            return pays(change, intervals(problem), both)

        def both(layers: Layers) -> tuple[float, float]:
            return seconds(_at(self.now, layers)), seconds(_at(plan, layers))

        whole = verdict(self.problem)
        if not whole.pays:
            return whole
        parts = [verdict(at(self.problem, layers)).pays for layers in readings.halves]
        return confirm(whole, parts, readings.preempted)


def _at(plan: Plan, layers: Layers) -> Plan:
    """Returns the plan of the same choice at other costs."""
    problem = at(plan.problem, layers)
    return plan if problem is plan.problem else evaluate(problem, plan.choice)


# -- placement -------------------------------------------------------------------------------------


@final
class _Placements(_Question):
    def decide(self) -> Decision:
        """Takes the first candidate that pays, or else weighs the first one."""
        first: Decision | None = None
        forced = is_forced(self.rules.balance.balancer)
        for plan in self.candidates():
            decision = Decision(plan, self.weigh(plan, forced))
            if decision.verdict.pays or (decision.verdict.uncertain and not forced):
                return decision
            first = first or decision
        return first or Decision(self.now, _NOTHING)

    def candidates(self) -> Iterator[Plan]:
        """The best placement under each schedule that is allowed, the fastest first."""
        now, schedule = self.now, self.now.mesh.schedule
        if self.rules.balance.balancer == "none":
            return
        names = {schedule, *self.rules.schedules}
        found: list[tuple[float, Plan]] = []
        failed: PartitionError | None = None
        for name in sorted(names, key=SHAPES.index) if len(names) > 1 else names:
            try:
                plan = self.placed(name)
            except PartitionError as error:
                failed = failed or error
            except ScheduleError:
                if name == schedule:
                    raise
            else:
                best = min(plan.step, now.step) if name == schedule else plan.step
                found.append((best * handicap(name) if len(names) > 1 else best, plan))
        if not found and failed is not None:
            raise failed
        for _, plan in sorted(found, key=lambda each: each[0]):
            if plan.choice != now.choice:
                yield plan

    def placed(self, schedule: str) -> Plan:
        problem, now = self.problem, self.now
        if schedule != now.mesh.schedule:
            mesh = replace(now.mesh, schedule=schedule)
            even = uniform(len(problem.layers), len(Replica(problem, mesh).stage_ranks))
            now = evaluate(problem, Choice(mesh, even))
        partition = balancer(self.rules.balance.balancer)(problem, now)
        if partition == now.partition:
            return now if now is self.now else now.check_room()
        return evaluate(problem, Choice(now.mesh, partition)).check_room()

    def weigh(self, plan: Plan, forced: bool) -> Verdict:
        price = self.on_the_way(plan) + self.readings.fixed_seconds
        if forced and plan.mesh == self.now.mesh:
            gain = gain_of(self.now.step, plan.step)
            return Verdict(True, gain, f"{self.rules.balance.balancer}: forced", price=price)
        return self.compare(plan, price, price, lambda plan: plan.step)

    def on_the_way(self, plan: Plan) -> float:
        """Returns the seconds of a move's layers, in sequence, over the slowest link."""
        now = self.now
        moves = moves_between_ranks(
            now.partition, plan.partition, now.stage_ranks, plan.stage_ranks
        )
        sizes = [now.layers[move.layer].moved_bytes for move in moves]
        if self.readings.seconds_per_byte is not None:
            return self.readings.seconds_per_byte * sum(sizes)
        links = [link for _, link in self.problem.profile.links]
        return math.fsum(max((link.seconds(x) for link in links), default=0.0) for x in sizes)


# -- mesh ------------------------------------------------------------------------------------------


class _Remeshed(_Question):
    """A question whose candidates have other numbers of ranks in a pipeline.

    What is known of single ranks does not hold there. Links between replicas count like links
    between stages: as the slowest measured link. The seconds of a step decide, whatever the
    balancer evens out.
    """

    def __init__(self, problem: Problem, now: Plan, rules: Rules, readings: Readings) -> None:
        work, limit = replace(problem.work, cost="time"), least_limit(problem.memory_limit)
        same = replace(problem, work=work, speeds=None, memory_limit=limit)
        if same != problem:
            problem, now = same, evaluate(same, now.choice)
        super().__init__(problem, now, rules, readings)
        mesh, self.size = now.mesh, now.mesh.gpus
        sizes, names = rules.sizes or (mesh.micro_batch,), (mesh.schedule,)
        self.allowed = Allowed(self.size, mesh.global_batch, sizes, names, rules.replicas)

    def arrival(self, old: Plan, new: Plan, origins: Sequence[int | None]) -> float:
        """Returns the seconds until the rank that must get most bytes has them.

        A rank must get the layers that its new stages hold and its old ones did not. `origins` are
        the old numbers of the new ranks, None for a newcomer.
        """
        layers = self.problem.layers
        # A pair of stages counts once, however many replicas have it.
        pairs = {
            (rank // new.mesh.replicas, None if origin is None else origin // old.mesh.replicas)
            for rank, origin in enumerate(origins)
        }
        most = max(
            sum(
                layers[i].moved_bytes
                for i in _held(new, place) - (set() if before is None else _held(old, before))
            )
            for place, before in pairs
        )
        each = self.readings.seconds_per_byte
        return most / self.problem.bandwidth if each is None else most * each


def _held(plan: Plan, place: int) -> set[int]:
    """The layers of the ranks at one place of their pipelines."""
    return {
        i
        for stage, holder in enumerate(plan.stage_ranks)
        if holder == place
        for i in plan.partition.range_of(stage)
    }


@final
class _Meshes(_Remeshed):
    def decide(self) -> Decision:
        """Weighs the mesh that saves most after its price. The present one takes part."""
        work, ranks = self.problem.work, range(self.size)
        plans = search(self.problem, self.allowed).plans

        def net(plan: Plan) -> tuple[float, float]:
            price = self.arrival(self.now, plan, ranks)
            saved = (self.now.seconds - plan.seconds) * (work.end - work.step)
            return saved - price * self.rules.balance.margin, -price

        best = max(plans, key=net)
        if best.mesh == self.now.mesh:
            return Decision(self.now, _NOTHING)
        there, back = self.arrival(self.now, best, ranks), self.arrival(best, self.now, ranks)
        return Decision(best, self.compare(best, there, back, lambda plan: plan.seconds))


# -- ranks -----------------------------------------------------------------------------------------


@final
class _Ranks(_Remeshed):
    """Searches the best mesh of other numbers of ranks. Searches of each interval are kept."""

    def __init__(self, problem: Problem, now: Plan, rules: Rules, readings: Readings) -> None:
        super().__init__(problem, now, rules, readings)
        self.known: dict[Layers, RankOptions] = {}
        self.least = self.most = self.size
        self.limit = math.inf
        self.best_now = 0.0

    def decide(self) -> Decision:
        elastic, there = self.rules.elastic, max(self.rules.there, self.size)
        reference = self.readings.reference
        if reference is None:
            reference = self.best_here(self.problem.layers)
        if elastic.target_ranks is not None:
            wanted = elastic.target_ranks
            plan, verdict = self.to_target(wanted, there)
        elif elastic.algorithm != "fewest":
            plan, verdict = merge(self.now, elastic)
            wanted = plan.mesh.gpus
        else:
            self.limit, self.most = 0.0, there  # the fastest
            if elastic.repack:
                self.least = min(elastic.min_ranks, self.size)
                self.limit = reference * (1 + elastic.tolerance)
                self.most = max(self.rules.most, there)
            plan, verdict = self.confirmed()
            wanted = plan.mesh.gpus if verdict.pays else self.size
            if wanted > there:
                self.most = there
                plan, verdict = self.confirmed()
        return Decision(plan, verdict, ranks=wanted, reference=reference)

    def to_target(self, target: int, most: int) -> tuple[Plan, Verdict]:
        self.best_now = self.best_here(self.problem.layers)
        stay = ""
        if target == self.size:
            stay = f"stay: the run has its target of {_ranks(target)}"
        elif target > most:
            stay = f"stay: the target is {_ranks(target)}, and 1 to {_ranks(most)} are allowed"
        if stay:
            return self.now, Verdict(False, 0.0, stay)
        try:
            plan = self.options_at(self.problem.layers).plan(target)
        except NoMeshFitsError as error:
            raise _no_room(error) from None
        reason = f"the target is {_ranks(target)}; {self.compared(plan)}"
        return plan, Verdict(True, gain_of(self.now.seconds, plan.seconds), reason)

    def confirmed(self) -> tuple[Plan, Verdict]:
        """Chooses. Both halves of the readings must support a change."""
        plan, verdict = self.choose()
        if not verdict.pays:
            return plan, verdict
        ranks, parts = plan.mesh.gpus, list[bool]()
        for layers in self.readings.halves:
            half, same = copy(self), layers == self.problem.layers
            half.problem = replace(at(self.problem, layers), forecasts=())
            half.now, half.known = _at(self.now, layers), self.known if same else {}
            other, said = half.choose()
            agrees = other.mesh.gpus <= ranks if ranks < self.size else other.mesh.gpus > self.size
            parts.append(said.pays and agrees)
        return plan, confirm(verdict, parts, self.readings.preempted)

    def choose(self) -> tuple[Plan, Verdict]:
        self.best_now = self.best_here(self.problem.layers)
        first: Verdict | None = None
        for plan in self.candidates():
            verdict = self.weigh(plan)
            if verdict.pays:
                return plan, verdict
            first = first or verdict
        return self.now, first or Verdict(False, 0.0, self.nothing_to_gain())

    def candidates(self) -> Iterator[Plan]:
        """The fewest ranks that are fast enough, and on. Then more ranks, if these are too slow."""
        options, least_gain = (
            self.options_at(self.problem.layers),
            1 + self.rules.balance.hysteresis,
        )
        for ranks in range(self.least, self.size):
            plan = options.find(ranks, self.limit / least_gain)
            if plan is not None:
                yield plan
        if self.best_now > self.limit * least_gain:
            larger = range(self.size + 1, self.most + 1)
            plan = options.fewest(larger, self.limit) or options.fastest(larger)
            if plan is not None and plan.seconds * least_gain < self.best_now:
                yield plan

    # -- costs and prices --------------------------------------------------------------------------

    def weigh(self, plan: Plan) -> Verdict:
        """Compares what a change saves with its pauses: GPU-seconds if ranks become free."""
        ranks, limit = plan.mesh.gpus, self.limit
        shrinks, weight = ranks < self.size, self.size if ranks < self.size else 1

        def seconds(layers: Layers) -> tuple[float, float] | None:
            options = self.options_at(layers)
            if shrinks:
                then = options.find(ranks, limit)
                return then and (self.size * then.seconds, ranks * then.seconds)
            here = self.best_here(layers)
            then = options.find(ranks, here) if here > limit else None
            return then and (here, then.seconds)

        there, back = (weight * (self.readings.pause + x) for x in self.arrivals(plan))
        balance, unit = self.rules.balance, "GPU-seconds" if shrinks else "s"
        change = Change(there, back, balance.margin, 0.0, unit, self.compared(plan))
        verdict = pays(change, intervals(self.problem), seconds)
        beaten = limit if shrinks else self.best_now
        lead = 1.0 if math.isinf(beaten) else gain_of(beaten, plan.seconds)
        gain, reason = gain_of(self.now.seconds, plan.seconds), verdict.reason
        return replace(verdict, gain=gain, reason=reason.removeprefix("move: "), lead=lead)

    def options_at(self, layers: Layers) -> RankOptions:
        """The meshes at other costs. Expected costs get a quick search only."""
        if layers not in self.known:
            problem = at(self.problem, layers)
            quick = problem is not self.problem
            self.known[layers] = RankOptions(problem, self.allowed, quick)
        return self.known[layers]

    def best_here(self, layers: Layers) -> float:
        """Seconds of a step on the ranks now, with the best or the current placement.

        The whole search runs only if the quick one is too slow, because growing depends on that. It
        also runs if there is no limit, because the reference is this figure then.
        """
        options, stay = self.options_at(layers), _at(self.now, layers).seconds
        try:
            best = min(stay, options.plan(self.size, quick=True).seconds)
            enough = self.limit * (1 + self.rules.balance.hysteresis)
            if best <= enough and math.isfinite(self.limit):
                return best
            return min(best, options.plan(self.size).seconds)
        except InputError:
            return stay

    def arrivals(self, plan: Plan) -> tuple[float, float]:
        """Seconds of the bytes in the change, and in the one back."""
        ranks, now = plan.mesh.gpus, self.size
        kept = kept_ranks(self.problem.machines or ("",) * now, min(now, ranks))
        places = {rank: place for place, rank in enumerate(kept)}
        returned = [places.get(rank) for rank in range(now)]
        there = self.arrival(self.now, plan, [*kept, *[None] * (ranks - len(kept))])
        return there, self.arrival(plan, self.now, returned)

    # -- answers -----------------------------------------------------------------------------------

    def nothing_to_gain(self) -> str:
        takes = f"{_ranks(self.size)} take {self.best_now:.4g} s a step, {self.allows()}"
        if self.best_now > self.limit * (1 + self.rules.balance.hysteresis):
            return f"stay: {takes}; no allowed number of ranks is faster by enough"
        return f"stay: {takes}; no fewer are fast enough"

    def compared(self, plan: Plan) -> str:
        ranks, takes = plan.mesh.gpus, f"{plan.seconds:.4g} s a step"
        if ranks > self.size:
            takes += f" instead of {self.best_now:.4g} s"
        which = f"{ranks} {'of' if ranks < self.size else 'instead of'} {self.size}"
        return f"{which} ranks take {takes}, {self.allows()}"

    def allows(self) -> str:
        return f"{self.limit:.4g} s are allowed" if math.isfinite(self.limit) else "any is allowed"


def _no_room(error: NoMeshFitsError) -> NoRoomError:
    if error.closest is None:
        return NoRoomError(str(error))
    where = f"{_ranks(error.closest.mesh.gpus)} cannot hold the model: {error.shortage}"
    return NoRoomError(f"{where}; use more ranks or a larger limit")


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


# -- records of a run ------------------------------------------------------------------------------

DECISIONS = "decisions.jsonl"  # name of the records' file in a run's folder


@dataclass(frozen=True)
class DecisionRecord:
    """One decision: what was known, and the answer as JSON.

    Attributes:
        now: The choice with which the run trained.
    """

    problem: Problem
    now: Choice
    rules: Rules
    readings: Readings
    answer: dict[str, Any]

    @property
    def stays(self) -> bool:
        """Whether nothing changes."""
        return not (self.answer["change"] or self.answer["remade"])

    def again(self) -> Decision:
        """Decides again from what the run had known."""
        problem = self.problem
        return decide(problem, evaluate(problem, self.now), self.rules, self.readings)

    def to_text(self) -> str:
        """Returns the record as one line of JSON without defaults. Floats read back exactly."""
        data = _RECORD.dump_python(self, mode="json", exclude_defaults=True)
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> DecisionRecord:
        return _RECORD.validate_python(parse_json(text))


_RECORD = TypeAdapter(DecisionRecord)


def read_records(path: Path) -> Iterator[DecisionRecord]:
    """Reads the decisions that a run wrote. A torn last line (the run was cut off) is left out."""
    lines = read_text(path, str(path)).split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                yield DecisionRecord.from_text(line)
        except ValueError as error:
            if line.startswith('{"kind":') and '"situation":' in line:
                raise InputError(
                    f"{path} is of an earlier version of dynmo, which alone can ask its decisions "
                    "again; read it with that version"
                ) from None
            if number == len(lines):
                return
            first = str(error).splitlines()[0]
            raise InputError(f"{path}, line {number} is no decision of a run: {first}") from None
