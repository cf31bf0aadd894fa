"""Decides on how many ranks a run goes on. A pure decision from measured costs.

    ranks        4        5        6        8 (now)     12
    a step       0.52 s   0.44 s   0.39 s   0.33 s      0.27 s      best mesh that fits the memory
                 too slow fewest                                    a step may take 0.45 s

`choose_ranks` takes the fewest ranks whose best mesh is fast enough. Noise must not make a run go
to and fro. Two thresholds therefore lie apart around the limit, with h = hysteresis:

    fewer ranks    only if they take at most   limit / (1 + h)
    more ranks     only if the ranks now, with their best placement, take over   limit x (1 + h)
                   and the larger number is faster by more than h

After either change, costs must move by more than h before the opposite one is considered. If no
number of ranks is fast enough, a run grows to the fastest one. It never shrinks to a step that
takes longer than the limit.

A change must also repay its pauses, as far as the forecast lets one believe in it:

    fewer ranks    GPU-seconds that are freed: (ranks now - ranks then) x seconds of a step then
                   against ranks now x seconds of the pause x margin
    more ranks     seconds that are saved against seconds of the pause x margin

If the forecast says that a change stops paying before the run ends, the way back counts too. Only
as many intervals are evaluated as it takes to repay both ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import final

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import InputError, NoRoomError, PartitionError
from dynmo.options import ENDLESS
from dynmo.plan.mesh_plan import Mesh, MeshPlan
from dynmo.plan.mesh_search import MeshRequest, NoMeshFitsError
from dynmo.plan.meshes import kept_ranks
from dynmo.plan.partition import Partition
from dynmo.plan.rank_options import RankOptions
from dynmo.plan.reshape import largest_arrival, plan_as_now
from dynmo.plan.trigger import SOON, Decision, ForecastInterval, confirmed

# Later intervals of a forecast are not evaluated, and nothing is saved in them.
_INTERVALS = 8

_Saved = Callable[[ForecastInterval], "float | None"]
"""Returns the saving of a step in an interval. None: the change does not pay there."""


@dataclass(frozen=True)
class RankQuestion:
    """The facts that are known before a step.

    Attributes:
        request: The measured costs, and what a mesh search may vary. `gpus` is ignored.
        least: The fewest ranks that are allowed.
        most: The most ranks that may be considered. A run can grow if they are more than now.
        limit_seconds: The most seconds that a step may take.
        steps_left: Number of steps until the run ends.
        target: The number of ranks to go to as soon as its memory fits, whatever its speed. None:
            the speed decides.
        seconds_per_byte: Seconds per byte of layers that change ranks.
        fixed_seconds: Seconds of a change beyond its bytes.
        margin: Multiplies the price of a change.
        hysteresis: The relative difference that counts.
        forecast: The costs from now to the end of the run, cut where they are expected to change,
            as `forecast_intervals` returns them for the profile's layers. Like those, they have the
            optimizer state of all replicas, even if ZeRO divides it. Empty: costs stay.
        nodes: Name of the machine of each rank, which decides the ranks that stay. Empty: the first
            ranks stay.
    """

    request: MeshRequest
    current: Mesh
    partition: Partition
    least: int
    most: int
    limit_seconds: float
    steps_left: int
    target: int | None = None
    seconds_per_byte: float = 0.0
    fixed_seconds: float = 0.0
    margin: float = 1.5
    hysteresis: float = 0.02
    forecast: tuple[ForecastInterval, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankChoice:
    """The mesh and the placement with which a run goes on.

    Attributes:
        mesh: The mesh from now on. As it is if `decision.move` is false.
        seconds: Predicted seconds of a step on it.
        seconds_now: Predicted for the mesh and the placement as they are.
        seconds_best_now: Predicted for the best mesh and placement of as many ranks as now. It may
            be some percent too long if it is within the limit. It is not if the limit is infinite.
        moved_bytes: Bytes of the rank that must get most. 0 if nothing moves.
        decision: Whether to change, and why. The gain is negative if a step becomes slower.
    """

    mesh: Mesh
    partition: Partition
    seconds: float
    seconds_now: float
    seconds_best_now: float
    moved_bytes: int
    decision: Decision


def choose_ranks(question: RankQuestion) -> RankChoice:
    """Decides on how many ranks a run goes on.

    Equal questions have equal answers, so every rank may ask for itself. More ranks than `most` or
    fewer than `least` are left at once, without regard to time or price.
    """
    return _Chooser(question).choose()


def confirmed_ranks(
    question: RankQuestion, choice: RankChoice, parts: Sequence[RankChoice], preempted: float = 0.0
) -> RankChoice:
    """Returns the choice if its measurements are certain enough, or else to stay.

    A change to the target, or to a number of ranks that is allowed at all, needs no confirmation.
    """
    now, ranks = question.current.gpus, choice.mesh.gpus
    free = question.target is None and question.least <= now <= question.most
    if not choice.decision.move or not free:
        return choice
    if ranks < now:
        difference, what = _below(choice.seconds, question.limit_seconds), "a distance to the limit"
        agree = [part.mesh.gpus <= ranks for part in parts]
    else:
        difference, what = _below(choice.seconds, choice.seconds_best_now), "a gain"
        agree = [part.mesh.gpus > now for part in parts]
    pairs = [(part.decision, same) for part, same in zip(parts, agree, strict=True)]
    answers = [replace(x, move=x.move and same) for x, same in pairs]
    decision = confirmed(choice.decision, answers, preempted, difference, what)
    return choice if decision.move else _staying(question, choice, decision)


def _staying(question: RankQuestion, choice: RankChoice, decision: Decision) -> RankChoice:
    return replace(
        choice,
        mesh=question.current,
        partition=question.partition,
        seconds=choice.seconds_now,
        moved_bytes=0,
        decision=decision,
    )


def _below(seconds: float, limit: float) -> float:
    """The share of `limit` by which the seconds are below it."""
    return 1.0 if math.isinf(limit) else 1 - seconds / limit if limit else 0.0


@final
class _Chooser:
    """Answers one question. The searches of each interval's costs are kept."""

    def __init__(self, question: RankQuestion) -> None:
        self.question, self.now = question, question.current.gpus
        request = replace(question.request, gpus=self.now)
        self.request, self.limit = request, question.limit_seconds
        self.known: dict[tuple[LayerCost, ...], RankOptions] = {}
        self.options = self.options_at(request.profile.layers)
        self.seconds_now = plan_as_now(request, question.current, question.partition).seconds
        self.best_now = self.best_here(self.options)
        self.fewer = range(question.least, min(self.now - 1, question.most) + 1)
        self.larger = range(max(self.now + 1, question.least), question.most + 1)
        self.refusal: str | None = None

    def choose(self) -> RankChoice:
        question = self.question
        if question.target is not None:
            return self.to_target(question.target)
        if not question.least <= self.now <= question.most:
            return self.back_into_range()
        change = self.shrink() or self.grow()
        return change or self.staying(self.refusal or self.nothing_to_gain())

    # -- the kinds of changes ----------------------------------------------------------------------

    def to_target(self, target: int) -> RankChoice:
        least, most = self.question.least, self.question.most
        if target == self.now:
            return self.staying(f"stay: the run has its target of {_ranks(target)}")
        if not least <= target <= most:
            allowed = f"{least} to {_ranks(most)} are allowed"
            return self.staying(f"stay: the target is {_ranks(target)}, and {allowed}")
        try:
            plan = self.options.plan(target)
        except NoMeshFitsError as error:
            raise _no_room(error) from None
        return self.moving(plan, f"the target is {_ranks(target)}; {self.compared(plan)}")

    def back_into_range(self) -> RankChoice:
        """Leaves a number of ranks that is not allowed."""
        question, counts = self.question, [*self.fewer, *self.larger]
        plan = self.options.fewest(counts, self.limit) or self.options.fastest(counts)
        if plan is None:
            raise self.nowhere(counts)
        allowed = f"{question.least} to {_ranks(question.most)} are allowed"
        return self.moving(plan, f"{allowed}, not {self.now}; {self.compared(plan)}")

    def shrink(self) -> RankChoice | None:
        """The fewest ranks that are fast enough and repay the change."""
        for ranks in self.fewer:
            plan = self.options.find(ranks, self.limit / (1 + self.question.hysteresis))
            if plan is None:
                continue
            freed = self.now - ranks

            def saved(x: ForecastInterval, ranks: int = ranks, freed: int = freed) -> float | None:
                then = self.options_at(x.layers).find(ranks, self.limit)
                return None if then is None else freed * then.seconds

            worth = self.weigh(plan, saved, self.now)
            if worth.pays:
                reason = f"{self.compared(plan)}; saves {_ranks(freed)} x {worth.duration}"
                return self.moving(plan, reason)
            self.refusal = self.refusal or self.refused(plan, worth, "GPU-seconds")
        return None

    def grow(self) -> RankChoice | None:
        """The fewest ranks that are fast enough, or else the fastest.

        None if the ranks now are fast enough, or if growing does not pay.
        """
        least_gain = 1 + self.question.hysteresis
        if self.best_now <= self.limit * least_gain:
            return None
        options, larger = self.options, self.larger
        plan = options.fewest(larger, self.limit) or options.fastest(larger)
        if plan is None or plan.seconds * least_gain >= self.best_now:
            return None
        ranks = plan.mesh.gpus

        def saved(x: ForecastInterval) -> float | None:
            here = self.best_here(self.options_at(x.layers))
            then = self.options_at(x.layers).find(ranks, here) if here > self.limit else None
            return None if then is None or then.seconds >= here else here - then.seconds

        worth = self.weigh(plan, saved, 1)
        if worth.pays:
            return self.moving(plan, f"{self.compared(plan)}; for {worth.duration}")
        self.refusal = self.refusal or self.refused(plan, worth, "seconds")
        return None

    # -- costs and prices --------------------------------------------------------------------------

    def intervals(self) -> tuple[ForecastInterval, ...]:
        layers = self.request.profile.layers
        return self.question.forecast or (ForecastInterval(0, self.question.steps_left, layers),)

    def options_at(self, layers: tuple[LayerCost, ...]) -> RankOptions:
        """The meshes at other costs. Expected costs get a quick search only."""
        if layers not in self.known:
            request, profile = self.request, self.request.profile
            if layers != profile.layers:
                frozen = len(list(takewhile(lambda x: not x.b and not x.w, layers[:-1])))
                first = max(profile.first_trainable, frozen)
                profile = replace(profile, layers=layers, first_trainable=first)
                request = replace(request, profile=profile)
            self.known[layers] = RankOptions(request, quick=profile is not self.request.profile)
        return self.known[layers]

    def best_here(self, options: RankOptions) -> float:
        """Seconds of a step on the ranks now, with the best or the current placement.

        The whole search runs only if the quick one is too slow, because growing depends on that. It
        also runs if there is no limit, because a caller may ask for this figure then.
        """
        question = self.question
        stay = plan_as_now(options.request, question.current, question.partition).seconds
        try:
            best = min(stay, options.look(self.now).seconds)
            if best <= self.limit * (1 + question.hysteresis) and math.isfinite(self.limit):
                return best
            return min(best, options.plan(self.now).seconds)
        except InputError:
            return stay

    def arrivals(self, plan: MeshPlan) -> tuple[int, int]:
        """Bytes of the rank that must get most in the change, and in the one back."""
        question, layers = self.question, self.request.profile.layers
        kept = kept_ranks(question.nodes or ("",) * self.now, min(self.now, plan.mesh.gpus))
        joined = [None] * (plan.mesh.gpus - len(kept))
        returned = [kept.index(rank) if rank in kept else None for rank in range(self.now)]
        old, new = (question.current, question.partition), (plan.mesh, plan.plan.partition)
        return (
            largest_arrival(layers, *old, *new, [*kept, *joined]),
            largest_arrival(layers, *new, *old, returned),
        )

    def weigh(self, plan: MeshPlan, saved: _Saved, ranks: int) -> _Worth:
        """Compares what a change saves with its pauses, in seconds of so many ranks."""
        question = self.question
        fixed, each = question.fixed_seconds, question.seconds_per_byte
        there, back = (ranks * (fixed + each * size) for size in self.arrivals(plan))
        both, one = (there + back) * question.margin, there * question.margin
        total, steps = 0.0, 0
        for number, interval in enumerate(self.intervals()):
            if number and total > both and steps >= SOON:
                return _Worth(True, steps, total, both, "at least ")
            gain = saved(interval) if number < _INTERVALS else None
            if gain is None:
                pays = total > both and steps >= SOON
                return _Worth(pays, steps, total, both, "", interval.start)
            steps += interval.stop - interval.start
            total += gain * (interval.stop - interval.start)
        return _Worth(total > one, steps, total, one)

    # -- answers -----------------------------------------------------------------------------------

    def moving(self, plan: MeshPlan, reason: str) -> RankChoice:
        gain = 1 - plan.seconds / self.seconds_now if self.seconds_now else 0.0
        return RankChoice(
            plan.mesh,
            plan.plan.partition,
            plan.seconds,
            self.seconds_now,
            self.best_now,
            self.arrivals(plan)[0],
            Decision(True, gain, reason),
        )

    def staying(self, reason: str) -> RankChoice:
        question, seconds = self.question, self.seconds_now
        return RankChoice(
            question.current,
            question.partition,
            seconds,
            seconds,
            self.best_now,
            0,
            Decision(False, 0.0, reason),
        )

    def compared(self, plan: MeshPlan) -> str:
        ranks, takes = plan.mesh.gpus, f"{plan.seconds:.4g} s a step"
        if ranks > self.now:
            takes += f" instead of {self.best_now:.4g} s"
        which = f"{ranks} of {self.now}" if ranks < self.now else f"{ranks} instead of {self.now}"
        return f"{which} ranks take {takes}, {self.allowed()}"

    def allowed(self) -> str:
        return f"{self.limit:.4g} s are allowed" if math.isfinite(self.limit) else "any is allowed"

    def refused(self, plan: MeshPlan, worth: _Worth, unit: str) -> str:
        if worth.stop is not None and worth.saved > worth.price:
            return f"wait: {self.compared(plan)}, but from step {worth.stop} on that would not pay"
        until = "" if worth.stop is None else f" until step {worth.stop}"
        sums = f"{worth.saved:.4g} {unit} saved{until} against {worth.price:.4g} for the pauses"
        return f"stay: {self.compared(plan)}, but {sums}"

    def nothing_to_gain(self) -> str:
        takes = f"{_ranks(self.now)} take {self.best_now:.4g} s a step, {self.allowed()}"
        if self.best_now > self.limit * (1 + self.question.hysteresis):
            return f"stay: {takes}; no allowed number of ranks is faster by enough"
        return f"stay: {takes}; no fewer are fast enough"

    def nowhere(self, counts: Sequence[int]) -> PartitionError:
        """Why none of these numbers of ranks is possible. Memory that lacks least comes first."""
        short: list[NoMeshFitsError] = []
        problem = "there is none"
        for ranks in counts:
            try:
                self.options.plan(ranks)
            except NoMeshFitsError as error:
                short.append(error)
            except InputError as error:
                problem = str(error)
        if not short:
            return PartitionError(f"no number of ranks that is allowed has a mesh: {problem}")
        return _no_room(min(short, key=_need))


@dataclass(frozen=True)
class _Worth:
    """What a change saves in the steps for which it is believed to.

    Attributes:
        price: Saving that is required, margin included.
        prefix: "at least " if more steps may follow.
        stop: The step from which on it does not pay. None: it pays until the run ends.
    """

    pays: bool
    steps: int
    saved: float
    price: float
    prefix: str = ""
    stop: int | None = None

    @property
    def duration(self) -> str:
        if self.steps > ENDLESS:
            return "all steps from now on"
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        until = "" if self.stop is None else f", until the change expected at step {self.stop}"
        return f"{self.prefix}{steps}{until}"


def _need(error: NoMeshFitsError) -> float:
    return math.inf if error.closest is None else error.closest.need or 0


def _no_room(error: NoMeshFitsError) -> NoRoomError:
    if error.closest is None:
        return NoRoomError(str(error))
    where = f"{_ranks(error.closest.mesh.gpus)} cannot hold the model: {error.shortage}"
    return NoRoomError(f"{where}; use more ranks or a larger limit")


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
