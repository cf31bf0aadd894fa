"""Measures, decides and acts between two steps.

gather --> Situation --> decide (pure) --> all ranks agree --> act
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import NoRoomError, PartitionError
from dynmo.events import (
    ChangeEvent,
    Event,
    RebalanceEvent,
    RebalanceResultEvent,
    ReshapeEvent,
    ScheduleEvent,
    SpeedsEvent,
)
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.cases import Cases
from dynmo.pipeline.move_gain import MoveGain
from dynmo.pipeline.options import PipelineOptions
from dynmo.plan.partition import Partition
from dynmo.plan.trigger import RebalanceWatch
from dynmo.runtime.comm.agreement import agree, maxima
from dynmo.runtime.engine.engine import Engine
from dynmo.schedule.memory import Limit

if TYPE_CHECKING:
    from dynmo.plan.decisions import MeshChoice, MoveChoice, RankWish
    from dynmo.plan.situation import DecisionRecord, Kind, Situation

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
    the readings alone (`trigger.confirmed`). After a move that disappoints, the next one must
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
        memory_limit: Limit = None,
    ) -> None:
        self._options, self._engine = options, engine
        self._actions = Actions(engine)
        self._cases, self._shapes, self._memory_limit = cases, shapes, memory_limit
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
        self._told = False  # that the memory allows no decision
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
        from_costs = self._engine.schedule_keeper.from_costs
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

    # -- measuring ---------------------------------------------------------------------------------

    def situation(
        self,
        step: int,
        *,
        nodes: Sequence[str] = (),
        there: int = 1,
        most: int = 1,
        reference: float | None = None,
    ) -> Situation:
        """Gathers what is known before `step`. All ranks call it together, and get the same."""
        from dynmo.pipeline.gathering import gather, measured_costs

        start = time.perf_counter()
        engine, world = self._engine, self._engine.store.world
        fixed, doubt, preempted, pause = maxima(
            world, (self._fixed, self._gain.doubt, engine.profiler.preempted, self._pause)
        )
        costs = measured_costs(engine, self._shapes)
        if self._cases.keep_kinds:
            speeds = engine.speeds.current
            uncertain = engine.speeds.measure(costs, preempted)
            if uncertain and self._watch is not None:
                self._watch.check_later()
            if engine.speeds.current != speeds:
                costs = measured_costs(engine, self._shapes)
        situation = gather(
            self._options,
            self._engine,
            costs,
            step=step,
            forecasts=self._cases.forecasts(step - 1),
            memory_limit=self._memory_limit,
            fixed_seconds=fixed,
            doubt=doubt,
            preempted=preempted,
            pause=pause,
            nodes=tuple(nodes),
            there=there,
            most=most,
            reference=reference,
        )
        self.overhead.measure += time.perf_counter() - start
        return situation

    def _record(self, kind: Kind, situation: Situation, answer: dict[str, Any]) -> None:
        from dynmo.plan.situation import DecisionRecord

        self.records.append(DecisionRecord(kind, situation, answer))

    def _agree(self, decision: object, what: str) -> None:
        # Floats decide nothing more and are left out. Their last bit may differ between kinds of
        # CPU.
        agree(self._engine.store.world, decision, what)

    # -- mesh and ranks ----------------------------------------------------------------------------

    def mesh(self, step: int) -> tuple[int, int, Partition] | None:
        """Decides before `step` whether another mesh repays its reshape.

        It decides once after each change of the work.

        Returns:
            Ranks of a pipeline, replicas, and placement. None if the mesh stays.
        """
        if not self._unshaped:
            return None
        from dynmo.plan.decisions import decide_mesh

        situation, start = self.situation(step), time.perf_counter()
        choice: MeshChoice = decide_mesh(situation)
        self._record("mesh", situation, choice.answer)
        self._unshaped = choice.decision.uncertain
        if choice.decision.uncertain and self._watch is not None:
            self._watch.check_later()
        self.overhead.decide += time.perf_counter() - start
        self._agree(choice.answer, "whether to reshape")
        if choice.mesh is None:
            return None
        return choice.mesh.pipeline, choice.mesh.replicas, choice.partition

    def reshape(self, step: int, pipeline: int, data: int, partition: Partition) -> list[Event]:
        engine, start = self._engine, time.perf_counter()
        before, result = engine.store.layout.shape, self._gain.close(step)
        told: list[Event] = [] if result is None else [result]
        try:
            migration = self._actions.reshape(pipeline=pipeline, data=data, partition=partition)
        except NoRoomError:
            if not self._options.elastic.reshape:
                raise
            # With "recompute" = "auto" the largest possible bytes count. All ranks fail alike.
            return told
        self.on_workload_change(step)
        seconds = time.perf_counter() - start
        self.overhead.move += seconds
        shape, moved = (pipeline, data), migration.moved_bytes
        return [*told, ReshapeEvent(step, before, shape, partition.counts, moved, seconds)]

    def use(self, options: PipelineOptions) -> None:
        self._options = options

    def ranks(self, situation: Situation) -> RankWish:
        """Asks for the number of ranks on which the run should go on."""
        from dynmo.plan.decisions import decide_ranks

        start = time.perf_counter()
        wish = decide_ranks(situation)
        self._record("ranks", situation, wish.answer)
        if wish.choice.decision.uncertain and self._watch is not None:
            self._watch.check_later()
        self.overhead.decide += time.perf_counter() - start
        self._agree(wish.answer, "how many ranks go on")
        return wish

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

    def consider(self, step: int) -> list[Event]:
        """Decides before `step`, and acts if that pays.

        It decides first on the placement, then on the schedule. The ranks compare their decision
        before layers move or stay.
        """
        from dynmo.plan.decisions import decide_schedule, move_answer, schedule_answer

        if self._watch is not None:
            self._watch.decided()
        layout, overhead, begun = self._engine.store.layout, self.overhead, time.perf_counter()
        speeds = self._engine.speeds.current
        situation, moved = self.situation(step), overhead.move
        start = time.perf_counter()
        choice, done = self._choose(situation)
        if situation.speeds != speeds:
            known = situation.speeds or (1.0,) * layout.ranks
            done = [SpeedsEvent(step, known), *done]
        moves = choice is not None and choice.decision.move
        self._record("move", situation, move_answer(choice))
        if choice is not None and moves:
            self._agree(move_answer(choice), "whether to move layers")
            done += self._move(step, choice, start - begun, time.perf_counter() - start)
        # Costs change if the move has switched recomputation.
        after = self._engine.store.layout
        situation = situation.under(after.schedule)
        gain = None
        if after.recomputed == layout.recomputed:
            gain = decide_schedule(situation, after.partition)
            self._record("schedule", situation, schedule_answer(after.partition, gain))
        if gain is not None:
            self._actions.replan(situation.layers)
        if not moves:
            # After a move the ranks compare the schedule of the new placement.
            self._agree((move_answer(choice), gain is not None), "whether to move layers")
        overhead.decide += time.perf_counter() - start - (overhead.move - moved)
        return [*done, ScheduleEvent(step, after.schedule, gain)] if gain else done

    def _choose(self, situation: Situation) -> tuple[MoveChoice | None, list[Event]]:
        """Returns the possible move, and an event if there is no placement for the first time."""
        from dynmo.plan.decisions import decide_move

        try:
            choice = decide_move(situation)
        except PartitionError as error:
            # No room, or the baseline has no placement for such layers.
            why = f"layers stay where they are: {error}"
            told = [] if self._told else [ChangeEvent(situation.step, "balance", (), why)]
            self._told = True
            return None, list[Event](told)
        if choice is not None and choice.decision.uncertain and self._watch is not None:
            self._watch.check_later()
        return choice, []

    def _move(
        self, step: int, choice: MoveChoice, measuring: float, deciding: float
    ) -> list[Event]:
        start = time.perf_counter()
        source = self._engine.store.layout.partition
        try:
            migration = self._actions.move(choice.target, choice.schedule)
        except NoRoomError:
            # With "recompute" = "auto" the largest possible bytes count, not the measured bytes.
            # All ranks fail alike.
            return []
        ended = time.perf_counter()
        self._fixed = max(0.0, migration.seconds - choice.on_the_way)
        self.overhead.move += ended - start
        self.moves += 1
        if self._watch is not None:
            self._watch.moved()
        result = self._gain.on_move(step, self.moves, choice.decision.predicted_gain)
        done = RebalanceEvent(
            step,
            self.moves,
            source.counts,
            choice.target.counts,
            migration.moved_bytes,
            deciding + ended - start,
            choice.decision.predicted_gain,
            choice.decision.reason,
            measuring,
            deciding,
            choice.schedule,
        )
        return [done] if result is None else [result, done]
