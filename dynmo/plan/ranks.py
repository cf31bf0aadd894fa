"""Decides how many ranks a run has. See `decide`.

A run takes the fewest ranks whose best mesh is fast enough:

    ranks        4        5        6        8 (now)     12
    a step       0.52 s   0.44 s   0.39 s   0.33 s      0.27 s      best mesh that fits the memory
                 too slow fewest                                    a step may take 0.45 s

Noise must not make it go to and fro. Two thresholds therefore lie apart around the limit, with h =
hysteresis:

    fewer ranks    only if they take at most   limit / (1 + h)
    more ranks     only if the ranks now, with their best placement, take over   limit x (1 + h)
                   and the larger number is faster by more than h

A rank that is slow to stay leaves first. Ranks without it are also fast enough if their step is no
longer than the one of all ranks, slow ones included:

    ranks        4, one at half speed      3 without it
    a step       0.40 s                    0.40 s

If no number of ranks is fast enough, a run grows to the fastest one. It never shrinks to a step
that takes longer than the limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import final

from dynmo.errors import InputError, NoRoomError
from dynmo.plan.alternatives import RankOptions
from dynmo.plan.balancers import merge
from dynmo.plan.best import NoMeshFitsError
from dynmo.plan.evaluate import Plan, evaluate
from dynmo.plan.partition import kept_ranks
from dynmo.plan.pays import Change, Verdict, at, confirm, gain_of, intervals, pays
from dynmo.plan.placement import place
from dynmo.plan.problem import Layers, Problem, Readings, Rules
from dynmo.plan.question import Decision, Remeshed, plan_at


@final
class RankQuestion(Remeshed):
    """Searches the best mesh of other numbers of ranks. Searches of each interval are kept."""

    def __init__(self, problem: Problem, now: Plan, rules: Rules, readings: Readings) -> None:
        super().__init__(problem, now, rules, readings)
        self.speeds = readings.rank_speeds
        if self.speeds is not None and rules.elastic.algorithm == "fewest":
            replicas = self.now.mesh.replicas
            slowest = tuple(
                min(self.speeds[i : i + replicas]) for i in range(0, self.size, replicas)
            )
            self.now = evaluate(replace(self.problem, speeds=slowest), self.now.choice)
        self.known: dict[Layers, RankOptions] = {}
        self.balanced: dict[Layers, float] = {}  # seconds of the present mesh with a slow rank
        self.least_ranks = self.most_ranks = self.size
        self.limit = math.inf
        self.best_now = 0.0

    def decide(self) -> Decision:
        elastic, available = self.rules.elastic, max(self.rules.available_ranks, self.size)
        reference = self.readings.reference
        if reference is None:
            reference = self.best_here(self.problem.layers)
        if elastic.target_ranks is not None:
            wanted = elastic.target_ranks
            plan, verdict = self.to_target(wanted, available)
        elif elastic.algorithm != "fewest":
            plan, verdict = merge(self.now, elastic)
            wanted = plan.mesh.gpus
        else:
            self.limit, self.most_ranks = 0.0, available  # the fastest
            if elastic.repack:
                self.least_ranks = min(elastic.min_ranks, self.size)
                self.limit = reference * (1 + elastic.tolerance)
                self.most_ranks = max(self.rules.most_ranks, available)
            plan, verdict = self.confirmed()
            wanted = plan.mesh.gpus if verdict.pays else self.size
            if wanted > available:
                self.most_ranks = available
                plan, verdict = self.confirmed()
        return Decision(plan, verdict, ranks=wanted, reference=reference)

    def to_target(self, target: int, available: int) -> tuple[Plan, Verdict]:
        self.best_now = self.best_here(self.problem.layers)
        stay = ""
        if target == self.size:
            stay = f"stay: the run has its target of {_ranks(target)}"
        elif target > available:
            stay = f"stay: the target is {_ranks(target)}, and 1 to {_ranks(available)} are allowed"
        if stay:
            return self.now, Verdict(False, 0.0, stay)
        try:
            plan = self.options_at(self.problem.layers, target).plan(target)
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
            half.now, half.known = plan_at(self.now, layers), self.known if same else {}
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
        layers = self.problem.layers
        least_gain = 1 + self.rules.balance.hysteresis
        for ranks in range(self.least_ranks, self.size):
            limit = self.limit / least_gain
            if self.leaves_slow(ranks):
                limit = max(limit, self.best_now)
            plan = self.options_at(layers, ranks).find(ranks, limit)
            if plan is not None:
                yield plan
        if self.best_now > self.limit * least_gain:
            larger = range(self.size + 1, self.most_ranks + 1)
            options = self.options_at(layers, self.size + 1)
            plan = options.fewest(larger, self.limit) or options.fastest(larger)
            if plan is not None and plan.seconds * least_gain < self.best_now:
                yield plan

    # -- costs and prices --------------------------------------------------------------------------

    def weigh(self, plan: Plan) -> Verdict:
        """Compares what a change saves with its pauses: GPU-seconds if ranks become free."""
        ranks = plan.mesh.gpus
        shrinks, weight = ranks < self.size, self.size if ranks < self.size else 1

        def seconds(layers: Layers) -> tuple[float, float] | None:
            options = self.options_at(layers, ranks)
            if shrinks:
                then = options.find(ranks, self.limit_of(ranks, layers))
                return then and (self.size * then.seconds, ranks * then.seconds)
            here = self.best_here(layers)
            then = options.find(ranks, here) if here > self.limit else None
            return then and (here, then.seconds)

        price, price_back = (weight * (self.readings.pause + x) for x in self.arrivals(plan))
        balance, unit = self.rules.balance, "GPU-seconds" if shrinks else "s"
        change = Change(price, price_back, balance.margin, 0.0, unit, self.compared(plan))
        verdict = pays(change, intervals(self.problem), seconds)
        beaten = self.limit_of(ranks, self.problem.layers) if shrinks else self.best_now
        lead = 1.0 if math.isinf(beaten) else gain_of(beaten, plan.seconds)
        gain, reason = gain_of(self.now.seconds, plan.seconds), verdict.reason
        return replace(verdict, gain=gain, reason=reason.removeprefix("move: "), lead=lead)

    def options_at(self, layers: Layers, ranks: int) -> RankOptions:
        """The meshes of so many ranks at some costs. Expected costs get a quick search only.

        All layers count as on the slowest of these ranks.
        """
        speed, quick = self.slowest(ranks), layers != self.problem.layers
        if speed != 1:
            layers = tuple(
                replace(layer, f=layer.f / speed, b=layer.b / speed, w=layer.w / speed)
                for layer in layers
            )
        if layers not in self.known:
            self.known[layers] = RankOptions(at(self.problem, layers), self.allowed, quick)
        return self.known[layers]

    def kept(self, ranks: int) -> tuple[int, ...]:
        """Those of the present ranks that stay in a run of so many."""
        machines = self.problem.machines or ("",) * self.size
        return kept_ranks(machines, min(self.size, ranks), self.speeds)

    def slowest(self, ranks: int) -> float:
        return 1.0 if self.speeds is None else min(self.speeds[i] for i in self.kept(ranks))

    def leaves_slow(self, ranks: int) -> bool:
        return self.slowest(ranks) > self.slowest(self.size)

    def limit_of(self, ranks: int, layers: Layers) -> float:
        """Seconds that a step of fewer ranks may take."""
        slow = self.best_here(layers) if self.leaves_slow(ranks) else 0.0
        return max(self.limit, slow)

    def best_here(self, layers: Layers) -> float:
        """Seconds of a step on the ranks now, with the best or the current placement.

        The whole search runs only if the quick one is too slow, because growing depends on that. It
        also runs if there is no limit, because the reference is this figure then.
        """
        options, stay = self.options_at(layers, self.size), self.here(layers)
        try:
            best = min(stay, options.plan(self.size, quick=True).seconds)
            enough = self.limit * (1 + self.rules.balance.hysteresis)
            if best <= enough and math.isfinite(self.limit):
                return best
            return min(best, options.plan(self.size).seconds)
        except InputError:
            return stay

    def here(self, layers: Layers) -> float:
        """Seconds of a step with the present mesh, and with fewer layers on a slow rank."""
        now = plan_at(self.now, layers)
        if self.speeds is None or self.rules.balance.balancer == "none":
            return now.seconds
        if layers not in self.balanced:
            plan = place(now.problem, now.mesh, now.partition)
            self.balanced[layers] = now.seconds if plan.beyond else plan.seconds
        return self.balanced[layers]

    def arrivals(self, plan: Plan) -> tuple[float, float]:
        """Seconds of the bytes in the change, and in the one back."""
        ranks, now = plan.mesh.gpus, self.size
        kept = self.kept(ranks)
        places = {rank: place for place, rank in enumerate(kept)}
        returned = [places.get(rank) for rank in range(now)]
        origins = [*kept, *[None] * (ranks - len(kept))]
        return self.arrival(self.now, plan, origins), self.arrival(plan, self.now, returned)

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
        if self.leaves_slow(ranks):
            took = f"{self.best_now:.4g} s with slow ranks"
            return f"{which} ranks take {takes}, {took}; {self.allows()}"
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
