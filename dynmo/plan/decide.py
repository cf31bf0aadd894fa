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
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from pydantic import TypeAdapter

from dynmo.cost.input_file import read_text
from dynmo.errors import InputError, PartitionError, ScheduleError
from dynmo.files import parse_json
from dynmo.plan.balancers import balancer, is_forced
from dynmo.plan.best import handicap, search
from dynmo.plan.evaluate import Plan, Replica, evaluate
from dynmo.plan.partition import moves_between_ranks, uniform
from dynmo.plan.pays import Verdict, gain_of
from dynmo.plan.problem import Choice, Problem, Readings, Rules
from dynmo.plan.question import Decision, Question, Remeshed
from dynmo.plan.ranks import RankQuestion
from dynmo.schedule.catalogue import SHAPES, entry
from dynmo.schedule.simulator import simulate

_NOTHING = Verdict(False, 0.0, "stay: nothing else is better")


def decide(problem: Problem, now: Plan, rules: Rules, readings: Readings) -> Decision:
    """Decides whether, and how, a run goes on otherwise than now.

    Equal questions have equal answers, so every rank may ask for itself.
    """
    asked = {"placement": _Placements, "mesh": _Meshes, "ranks": RankQuestion}[rules.kind]
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


# -- placement -------------------------------------------------------------------------------------


@final
class _Placements(Question):
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


@final
class _Meshes(Remeshed):
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
        price, price_back = (
            self.arrival(old, new, ranks) for old, new in ((self.now, best), (best, self.now))
        )
        return Decision(best, self.compare(best, price, price_back, lambda plan: plan.seconds))


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
