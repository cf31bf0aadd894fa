"""Measures, decides and acts between two steps.

gather --> Problem, Plan now, Rules, Readings --> decide (pure) --> all ranks agree --> act
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dynmo.change_events import (
    ChangeEvent,
    RebalanceEvent,
    RebalanceResultEvent,
    ReshapeEvent,
    ScheduleEvent,
    SlowRankEvent,
    SpeedsEvent,
)
from dynmo.cost.layer_cost import LayerCost
from dynmo.elastic.manager import own_node
from dynmo.errors import NoRoomError
from dynmo.events import Event
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.ahead import Ahead
from dynmo.pipeline.cases import Cases
from dynmo.pipeline.gathering import (
    choice_of,
    measured_costs,
    problem_of,
    rules_of,
    whole_costs,
)
from dynmo.pipeline.options import PipelineOptions
from dynmo.pipeline.rebalance_watch import MoveGain, RebalanceWatch
from dynmo.plan.evaluate import evaluate
from dynmo.plan.partition import Partition
from dynmo.plan.problem import Readings, Rules
from dynmo.runtime.comm.agreement import agree, maxima, share_texts
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.state.migration import Migration

if TYPE_CHECKING:
    from dynmo.plan.decide import Decision, DecisionRecord

_ACTS = {
    "placement": "whether to move layers",
    "mesh": "whether to reshape",
    "ranks": "how many ranks go on",
}
# Assumed seconds of the first change of ranks.
_FIRST_PAUSE = 1.0


@dataclass
class Overhead:
    """Seconds of a run that balancing has taken so far, on this rank.

    Attributes:
        measure: Seconds to gather costs. The profiler knows the seconds to condense them.
    """

    measure: float = 0.0
    decide: float = 0.0
    move: float = 0.0


class Rebalancer:
    """Decides before a step whether layers move, and moves them.

    It asks the configured balancer every `balance.every` steps. With "auto" it asks when
    `RebalanceWatch` sees a reason. It moves layers if the simulator says that the gain repays the
    move before a dynamic case ends it. No move rests on one reading of a time, or on one half of
    the readings alone (`pays.confirm`). After a move that disappoints, the next one must
    promise more (`MoveGain`).

    Every rank has a Rebalancer and calls every method alike. Costs are the same on all ranks, so
    the decision is the same. The ranks compare it, "stay" included.

    Balancers count more than a rank holds at any one time, such as all gradients. The layers stay
    if the balancer says that no placement fits the memory. One event says so, because the run
    trains.
    """

    def __init__(
        self,
        options: PipelineOptions,
        engine: Engine,
        cases: Cases,
        shapes: tuple[LayerCost, ...] | None,
        moves: int = 0,
    ) -> None:
        self._options, self._engine = options, engine
        self._actions = Actions(engine)
        self._cases, self._shapes = cases, shapes
        # True if the work has changed since the last decision about another mesh.
        self._unshaped = options.elastic.reshape
        self._watch = (
            RebalanceWatch(options.balance.hysteresis) if options.balance.every == "auto" else None
        )
        self._gain = MoveGain()
        self.moves = moves
        # Seconds of the last move beyond its layers' way over the links.
        self._fixed = 0.0
        # Seconds of the last change of ranks.
        self._pause = _FIRST_PAUSE
        self._costs = tuple[LayerCost, ...]()  # those of the last decision
        self._news: list[Event] = []  # of the ranks' speeds
        # The move that travels while the next step runs, and who is told of its end.
        self._ahead: tuple[Ahead, Callable[[int, Migration, float], list[Event]]] | None = None
        self._moves_ahead = options.balance.move_ahead
        self._told_refusal = False  # that the memory allows no decision
        self.overhead = Overhead()
        # The decisions before the step, with what they rested on.
        self.records: list[DecisionRecord] = []

    def observe(
        self, step: int, seconds: float, busy: Sequence[float]
    ) -> RebalanceResultEvent | None:
        if self._watch is not None:
            self._watch.observe(busy)
        return self._gain.observe(step, seconds)

    def close_measurement(self, step: int) -> RebalanceResultEvent | None:
        return self._gain.close(step)

    def on_workload_change(self, step: int) -> RebalanceResultEvent | None:
        self._unshaped = self._options.elastic.reshape
        if self._watch is not None:
            self._watch.on_workload_change()
        return self._gain.on_workload_change(step)

    def should_check(self, step: int) -> bool:
        """Returns True if it may do something before this step."""
        options, every = self._options, self._options.balance.every
        elastic = options.elastic.reshape or options.elastic.changes_ranks
        from_costs = self._engine.schedule_maker.from_costs
        acts = options.balance.balancer != "none" or from_costs or elastic
        if not acts or step >= options.end:
            return False
        if isinstance(every, int):
            return step % every == 0
        return self._watch is not None and self._watch.is_due

    @property
    def measured(self) -> bool:
        return self._gain.measured

    def is_due(self, step: int) -> bool:
        # A run that was just resumed has measured nothing to decide on.
        return self.should_check(step) and self.measured

    # -- deciding ----------------------------------------------------------------------------------

    def decide(
        self,
        step: int,
        rules: Rules,
        machines: Sequence[str] = (),
        reference: float | None = None,
    ) -> Decision:
        """Decides before `step`. All ranks call it together, and compare the answer."""
        from dynmo.plan.decide import DecisionRecord, decide

        start = time.perf_counter()
        engine, world, options = self._engine, self._engine.store.world, self._options
        given = self._fixed, self._gain.doubt, engine.profiler.preempted, self._pause
        fixed, doubt, preempted, pause = maxima(world, given)
        costs = self._costs = self._measured(step, preempted)
        problem = problem_of(
            options,
            engine,
            costs,
            step,
            rules.kind,
            tuple(machines),
            self._cases.forecasts(step - 1),
        )
        maker = engine.schedule_maker
        stays = rules.kind == "placement"  # as many replicas, with the measured shares
        whole = tuple if stays else partial(whole_costs, options, engine)
        readings = Readings(
            halves=tuple(map(whole, engine.costs_of_halves(costs))),
            doubt=doubt,
            preempted=preempted,
            fixed_seconds=fixed,
            pause=pause,
            scheduled=None if maker.scheduled is None else whole(maker.scheduled),
            scheduled_speeds=maker.known_speeds,
            is_measured=maker.known is not None,
            reference=reference,
            rank_speeds=engine.speeds.of_ranks() if rules.kind == "ranks" else None,
        )
        gathered = time.perf_counter()
        now = evaluate(problem, choice_of(options, engine))
        decision = decide(problem, now, rules, readings)
        self.records.append(DecisionRecord(problem, now.choice, rules, readings, decision.answer))
        if decision.verdict.uncertain and self._watch is not None:
            self._watch.check_later()
        self.overhead.measure += gathered - start
        self.overhead.decide += time.perf_counter() - gathered
        agree(world, decision.answer, _ACTS[rules.kind])
        return decision

    def _measured(self, step: int, preempted: float) -> tuple[LayerCost, ...]:
        """Returns the costs of the layers. Measures the speeds of the ranks, too."""
        speeds = self._engine.speeds
        costs = measured_costs(self._engine, self._shapes)
        if not self._cases.keep_kinds:
            return costs
        before, lasting = speeds.current, speeds.lasting
        if speeds.measure(costs, preempted, step) and self._watch is not None:
            self._watch.check_later()
        if speeds.lasting != lasting:
            self._tell_slow(step, lasting)
        if speeds.current == before:
            return costs
        known = speeds.current or (1.0,) * self._engine.store.layout.ranks
        self._news.append(SpeedsEvent(step, known))
        return measured_costs(self._engine, self._shapes)

    def _tell_slow(self, step: int, before: Mapping[int, float]) -> None:
        """Tells which ranks are slow to stay, or no longer are. `before` are those of before."""
        speeds, everyone = self._engine.speeds, self._engine.store.world.everyone
        machines = share_texts(everyone, own_node(), "the machines of slow ranks")
        for rank in sorted({*before, *speeds.lasting}):
            if before.get(rank) != speeds.lasting.get(rank):
                factor, twin = speeds.compared(rank) if rank in speeds.lasting else (1.0, None)
                self._news.append(SlowRankEvent(step, rank, factor, machines[rank], twin))

    def take_news(self) -> list[Event]:
        """Returns what decisions since the last call have found about the ranks' speeds."""
        news, self._news = self._news, []
        return news

    # -- mesh and ranks ----------------------------------------------------------------------------

    def mesh(self, step: int) -> tuple[int, int, Partition] | None:
        """Decides before `step` whether another mesh repays its reshape.

        It decides once after each change of the work.

        Returns:
            Ranks of a pipeline, replicas, and placement. None if the mesh stays.
        """
        if not self._unshaped:
            return None
        decision = self.decide(step, rules_of(self._options, self._engine, "mesh"))
        self._unshaped = decision.verdict.uncertain
        mesh = decision.plan.mesh
        if not decision.verdict.pays:
            return None
        return mesh.pipeline, mesh.replicas, decision.plan.partition

    def reshape(self, step: int, pipeline: int, data: int, partition: Partition) -> list[Event]:
        engine, start = self._engine, time.perf_counter()
        before, result = engine.store.layout.shape, self._gain.close(step)
        events: list[Event] = [*self.take_news(), *(() if result is None else (result,))]
        try:
            migration = self._actions.reshape(pipeline=pipeline, data=data, partition=partition)
        except NoRoomError:
            if not self._options.elastic.reshape:
                raise
            # With "recompute" = "auto" the largest possible bytes count. All ranks fail alike.
            return events
        self.on_workload_change(step)
        seconds = time.perf_counter() - start
        self.overhead.move += seconds
        shape, moved = (pipeline, data), migration.moved_bytes
        return [*events, ReshapeEvent(step, before, shape, partition.counts, moved, seconds)]

    def use(self, options: PipelineOptions) -> None:
        self._options = options

    def on_resize(
        self, step: int, gain: float | None, seconds: float = 0.0
    ) -> tuple[int, Event | None]:
        """Takes note that the ranks have changed before `step`.

        Returns:
            The number of the change, and the gain of the last one if it is not reported yet.
        """
        self.moves += 1
        measured = self._gain.measured and gain is not None
        result = (
            self._gain.on_move(step, self.moves, gain or 0.0, is_test=False)
            if measured
            else self._gain.on_workload_change(step)
        )
        self._unshaped = self._options.elastic.reshape
        if self._options.balance.every == "auto":
            self._watch = RebalanceWatch(self._options.balance.hysteresis)
        self._pause = seconds or self._pause
        self.overhead.move += seconds
        return self.moves, result

    # -- placement and schedule --------------------------------------------------------------------

    def consider(self, step: int, ahead: bool = True) -> list[Event]:
        """Decides before `step` on the placement and the schedule, and acts if that pays.

        Args:
            ahead: Whether a move may also travel while the step runs.
        """
        self._ahead = None
        if self._watch is not None:
            self._watch.decided()
        overhead = self.overhead
        spent = overhead.measure, overhead.decide
        decision = self.decide(step, rules_of(self._options, self._engine, "placement"))
        events = self.take_news()
        if decision.refusal is not None and not self._told_refusal:
            self._told_refusal = True
            why = f"layers stay where they are: {decision.refusal}"
            events.append(ChangeEvent(step, "balance", (), why))
        if decision.verdict.pays:
            measuring, deciding = overhead.measure - spent[0], overhead.decide - spent[1]
            events += self._move(step, decision, measuring, deciding, ahead)
        elif decision.remade is not None:
            events += self._replan(step, decision.remade)
        return events

    def _move(
        self, step: int, decision: Decision, measuring: float, deciding: float, ahead: bool
    ) -> list[Event]:
        start, layout = time.perf_counter(), self._engine.store.layout
        plan, verdict = decision.plan, decision.verdict
        schedule = plan.mesh.schedule if plan.mesh.schedule != layout.schedule else None
        expected = verdict.price - self.records[-1].readings.fixed_seconds

        def done(step: int, migration: Migration, seconds: float) -> list[Event]:
            self._fixed = max(0.0, migration.seconds - expected)
            self.overhead.move += seconds
            self.moves += 1
            if self._watch is not None:
                self._watch.moved()
            result = self._gain.on_move(step, self.moves, verdict.gain)
            event = RebalanceEvent(
                step,
                self.moves,
                layout.partition.counts,
                plan.partition.counts,
                migration.moved_bytes,
                deciding + seconds,
                verdict.gain,
                verdict.reason,
                measuring,
                deciding,
                schedule,
            )
            events: list[Event] = [event] if result is None else [result, event]
            # Costs change if the move has switched recomputation.
            same = self._engine.store.layout.recomputed == layout.recomputed
            remade = decision.remade if same else None
            return events if remade is None else events + self._replan(step, remade)

        try:
            if ahead and self._moves_ahead and step + 1 < self._options.end:
                move = self._actions.ahead(plan.partition, schedule)
                if move is not None:
                    self._ahead = move, done
                    return []
            migration = self._actions.move(plan.partition, schedule)
        except NoRoomError:
            # With "recompute" = "auto" the largest possible bytes count, not the measured bytes.
            # All ranks fail alike.
            rules = rules_of(self._options, self._engine, "placement")
            still = rules.balance.model_copy(update={"balancer": "none"})
            remade = self.decide(step, replace(rules, balance=still)).remade
            return [] if remade is None else self._replan(step, remade)
        return done(step, migration, time.perf_counter() - start)

    def begin_move(self) -> None:
        """Begins the move that travels while the next step runs, just before that step."""
        if self._ahead is not None:
            self._ahead[0].begin()

    def end_move(self, step: int) -> list[Event]:
        """Tells of the move that the step before `step` has ended."""
        if self._ahead is None or not self._ahead[0].is_over:
            return []
        (move, done), self._ahead = self._ahead, None
        if move.migration is not None:
            return done(step, move.migration, move.migration.seconds)
        self._moves_ahead = False
        return [ChangeEvent(step, "balance", (), move.refusal)]

    def _replan(self, step: int, gain: float) -> list[Event]:
        """Makes the schedule anew. No event tells of a schedule that saves nothing."""
        start = time.perf_counter()
        self._actions.replan(self._costs)
        self.overhead.decide += time.perf_counter() - start
        name = self._engine.store.layout.schedule
        return [ScheduleEvent(step, name, gain)] if gain else []
