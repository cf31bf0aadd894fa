"""A question of `decide`, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynmo.plan.evaluate import Plan, evaluate
from dynmo.plan.pays import Change, Verdict, at, confirm, intervals, pays
from dynmo.plan.problem import Allowed, Layers, Problem, Readings, Rules
from dynmo.schedule.memory import least_limit


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


class Question:
    """One question, with the problem that its candidates solve."""

    def __init__(self, problem: Problem, now: Plan, rules: Rules, readings: Readings) -> None:
        self.problem, self.now = problem, now
        self.rules, self.readings = rules, readings

    def compare(
        self, plan: Plan, price: float, price_back: float, seconds: Callable[[Plan], float]
    ) -> Verdict:
        """Compares a step with one as it is now. Each half of the readings must say the same."""
        balance, readings = self.rules.balance, self.readings
        change = Change(price, price_back, balance.margin, balance.hysteresis * readings.doubt)

        def verdict(problem: Problem) -> Verdict:
            return pays(change, intervals(problem), both)

        def both(layers: Layers) -> tuple[float, float]:
            return seconds(plan_at(self.now, layers)), seconds(plan_at(plan, layers))

        whole = verdict(self.problem)
        if not whole.pays:
            return whole
        parts = [verdict(at(self.problem, layers)).pays for layers in readings.halves]
        return confirm(whole, parts, readings.preempted)


def plan_at(plan: Plan, layers: Layers) -> Plan:
    """Returns the plan of the same choice at other costs."""
    problem = at(plan.problem, layers)
    return plan if problem is plan.problem else evaluate(problem, plan.choice)


class Remeshed(Question):
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
