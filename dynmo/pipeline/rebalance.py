"""Connects deciding and acting: measure, decide (pure), act, resume."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynmo.balance.partition import Partition
from dynmo.balance.trigger import Decision, RebalanceWatch, confirmed, forecast_intervals
from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import NoRoomError, PartitionError
from dynmo.events import (
    ChangeEvent,
    Event,
    RebalanceEvent,
    RebalanceResultEvent,
    ReshapeEvent,
    ScheduleEvent,
    now,
)
from dynmo.pipeline.actions import Actions
from dynmo.pipeline.move_gain import MoveGain
from dynmo.pipeline.options import PipelineOptions
from dynmo.runtime.comm.agreement import agree, maxima
from dynmo.runtime.engine.engine import Engine
from dynmo.schedule.catalogue import entry

if TYPE_CHECKING:
    from dynmo.pipeline.move_question import Forecasts, MoveChoice, MoveSituation
    from dynmo.pipeline.rank_question import RankLimits, RankWish

# Assumed seconds of the first change of ranks.
_FIRST_PAUSE = 1.0


@dataclass
class Overhead:
    """Seconds of a run that balancing has taken so far, on this rank.

    Attributes:
        measure: Seconds to gather costs. The profiler knows the seconds to condense them.
        decide: Seconds to decide.
        move: Seconds to move layers.
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

    Args:
        options: Options of the pipeline.
        pipeline: Holds the layers.
        costs: Returns the cost of every layer, as measured so far.
        moves: Number of moves of an earlier part of the run, so that the numbers go on.
        forecasts: Returns the actions that each dynamic case expects after a step.
        memory_limit: Bytes of a rank. None means unlimited.
    """

    def __init__(
        self,
        options: PipelineOptions,
        pipeline: Engine,
        costs: Callable[[], tuple[LayerCost, ...]],
        moves: int = 0,
        forecasts: Forecasts | None = None,
        memory_limit: int | None = None,
    ) -> None:
        self._options, self._pipeline = options, pipeline
        self._actions = Actions(pipeline)
        self._costs, self._memory_limit = costs, memory_limit
        # True if the work has changed since the last decision about another mesh.
        self._unshaped = options.elastic.reshape
        self._forecasts: Forecasts = forecasts or (lambda step: ())
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

    def observe(
        self, step: int, seconds: float, busy: Sequence[float]
    ) -> RebalanceResultEvent | None:
        """Takes the measurements of a step.

        Args:
            step: Number of the step.
            seconds: Its wall time.
            busy: Busy seconds of each rank.

        Returns:
            The gain of the last move, once enough steps have followed it.
        """
        if self._watch is not None:
            self._watch.observe(busy)
        return self._gain.observe(step, seconds)

    def close_measurement(self, step: int) -> RebalanceResultEvent | None:
        """Ends the measurement of the last move, at the end of a run.

        See `MoveGain.close`.
        """
        return self._gain.close(step)

    def on_workload_change(self, step: int) -> RebalanceResultEvent | None:
        """Takes note that the model's work has changed before `step`.

        Args:
            step: The next step.

        Returns:
            The gain of the last move until then, if it is not reported yet.
        """
        self._unshaped = self._options.elastic.reshape
        if self._watch is not None:
            self._watch.on_workload_change()
        return self._gain.on_workload_change(step)

    def should_check(self, step: int) -> bool:
        """Returns True if it may do something before this step."""
        options = self._options
        elastic = options.elastic.reshape or options.elastic.changes_ranks
        acts = options.balance.balancer != "none" or entry(options.schedule).from_costs or elastic
        every = self._options.balance.every
        return (
            acts
            and step < options.end
            and (
                step % every == 0
                if isinstance(every, int)
                else self._watch is not None and self._watch.is_due
            )
        )

    @property
    def measured(self) -> bool:
        """True if there is a measured step to decide on."""
        return self._gain.measured

    def is_due(self, step: int) -> bool:
        # A run that was just resumed has measured nothing to decide on.
        return self.should_check(step) and self.measured

    def mesh(self, step: int) -> tuple[int, int, Partition] | None:
        """Decides before `step` whether another mesh repays its reshape.

        It decides once after each change of the work.

        Args:
            step: The next step.

        Returns:
            Ranks of a pipeline, replicas, and placement. None if the mesh stays.

        Raises:
            RunError: The ranks have decided differently.
        """
        if not self._unshaped:
            return None
        from dynmo.pipeline.mesh_question import current_mesh, mesh_question

        self._unshaped = False
        options, pipeline, gathering = self._options, self._pipeline, time.perf_counter()
        costs = self._costs()
        halves, preempted = (
            pipeline.halves(costs),
            maxima(pipeline.store.world, (pipeline.profiler.preempted,))[0],
        )
        start = time.perf_counter()
        self.overhead.measure += start - gathering
        current, chosen = current_mesh(options, pipeline), None
        decide = mesh_question(options, pipeline, costs, options.end - step, self._memory_limit)
        try:
            best = decide(costs)
            decision, target = best.decision, best.plan.mesh
            if decision.move and target != current:
                decision = self._confirmed(
                    decision, (decide(layers).decision for layers in halves), preempted
                )
            self._unshaped = decision.uncertain
            if decision.move and target != current:
                chosen = target.pipeline, target.replicas, best.plan.plan.partition
        except NoRoomError:
            pass  # the mesh stays, because it trains
        self.overhead.decide += time.perf_counter() - start
        agree(
            pipeline.store.world,
            hashlib.sha256(repr((chosen, self._unshaped)).encode()).digest(),
            "whether to reshape",
        )
        return chosen

    def reshape(self, step: int, pipeline: int, data: int, partition: Partition) -> list[Event]:
        """Makes the same ranks another mesh, before `step`.

        Args:
            step: The next step.
            pipeline: Number of ranks of a pipeline.
            data: Number of replicas.
            partition: Layers on each new stage.

        Returns:
            The reshape, and before it the gain of the last move, if it is not reported yet. No
            reshape if `elastic.reshape` chose a mesh that the layers do not fit.

        Raises:
            NoRoomError: The layers do not fit a mesh that the config names.
        """
        engine, start = self._pipeline, time.perf_counter()
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
        return [
            *told,
            ReshapeEvent(
                step,
                now(),
                before,
                (pipeline, data),
                partition.counts,
                migration.moved_bytes,
                seconds,
            ),
        ]

    def use(self, options: PipelineOptions) -> None:
        """Goes on under options with other sizes of microbatches."""
        self._options = options

    def ranks(self, step: int, limits: RankLimits, reference: float | None) -> RankWish:
        """Asks before `step` for the number of ranks on which the run should go on.

        Args:
            step: The next step.
            limits: Number of ranks that there are and may be.
            reference: Seconds that a step took at first. None takes the best predicted seconds of
                now.

        Returns:
            The choice, and the number of ranks that the run would like.

        Raises:
            NoRoomError: The target cannot hold the model.
            RunError: The ranks have decided differently.
        """
        from dynmo.pipeline.rank_question import RankSituation, ask_ranks

        options, pipeline, gathering = self._options, self._pipeline, time.perf_counter()
        costs = self._costs()
        halves = pipeline.halves(costs)
        preempted, pause = maxima(pipeline.store.world, (pipeline.profiler.preempted, self._pause))
        start = time.perf_counter()
        self.overhead.measure += start - gathering
        forecast = forecast_intervals(costs, self._forecasts(step - 1), step, options.end)
        situation = RankSituation(
            options,
            pipeline,
            limits,
            tuple(forecast),
            halves,
            preempted,
            pause,
            self._memory_limit,
        )
        wish = ask_ranks(situation, reference)
        if wish.choice.decision.uncertain and self._watch is not None:
            self._watch.check_later()
        self.overhead.decide += time.perf_counter() - start
        decided = (
            wish.choice.mesh,
            wish.choice.partition.counts,
            wish.choice.decision.move,
            wish.ranks,
        )
        agree(
            pipeline.store.world,
            hashlib.sha256(repr(decided).encode()).digest(),
            "how many ranks go on",
        )
        return wish

    def on_resize(
        self, step: int, gain: float | None, seconds: float = 0.0
    ) -> tuple[int, Event | None]:
        """Takes note that the ranks have changed before `step`.

        Step measurements begin anew.

        Args:
            step: The next step.
            gain: Predicted share of a step that is saved. None means that nothing was predicted.
            seconds: Seconds during which the ranks stood still.

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

    def consider(self, step: int) -> list[Event]:
        """Decides before `step`, and acts if that pays.

        It decides first on the placement, then on the schedule. The ranks compare their decision
        before layers move or stay.

        Raises:
            RunError: The ranks have decided differently, for example because their cases forecast
                differently.
        """
        from dynmo.pipeline.move_question import MoveSituation

        if self._watch is not None:
            self._watch.decided()
        pipeline, overhead, start = self._pipeline, self.overhead, time.perf_counter()
        costs = self._costs()
        halves = pipeline.halves(costs)
        # Every rank takes part before any rank decides. Ranks that decide differently must not
        # wait for each other here.
        fixed, doubt, preempted = maxima(
            pipeline.store.world, (self._fixed, self._gain.doubt, pipeline.profiler.preempted)
        )
        measured, moved = time.perf_counter(), overhead.move
        overhead.measure += measured - start
        situation = MoveSituation(
            self._options, pipeline, step, costs, halves, self._forecasts, fixed, doubt, preempted
        )
        recomputed = pipeline.store.layout.recomputed
        choice, done = self._choose(situation)
        moves = choice is not None and choice.decision.move
        if choice is not None and moves:
            self._agree(choice, None)
            done += self._move(step, choice, measured - start, time.perf_counter() - measured)
        # Costs change if the move has switched recomputation. One reading alone proves nothing.
        steady = bool(halves) and pipeline.store.layout.recomputed == recomputed
        gain = self._actions.replan(costs, self._options.balance.hysteresis / 4) if steady else None
        if not moves:
            self._agree(choice, gain)
        overhead.decide += time.perf_counter() - measured - (overhead.move - moved)
        return [*done, ScheduleEvent(step, now(), self._options.schedule, gain)] if gain else done

    def _choose(self, situation: MoveSituation) -> tuple[MoveChoice | None, list[Event]]:
        """Returns the possible move, and an event if there is no placement for the first time."""
        if self._options.balance.balancer == "none":
            return None, []
        from dynmo.pipeline.move_question import ask_move

        try:
            choice = ask_move(situation)
        except PartitionError as error:
            # No room, or the baseline has no placement for such layers.
            why = f"layers stay where they are: {error}"
            told = [] if self._told else [ChangeEvent(situation.step, now(), "balance", (), why)]
            self._told = True
            return None, list[Event](told)
        if choice is not None and choice.decision.uncertain and self._watch is not None:
            self._watch.check_later()
        return choice, []

    def _agree(self, choice: MoveChoice | None, gain: float | None) -> None:
        """Compares the decision with the other ranks'.

        Args:
            choice: The move. None means that the balancer leaves the layers where they are.
            gain: Share of a step that another schedule saves. None means that the schedule stays,
                or that the layers move. After a move the ranks compare the schedule of the new
                placement.
        """
        # Floats are left out. They decide nothing more, and their last bit may differ between
        # kinds of CPU.
        where = (
            None
            if choice is None
            else (choice.target.counts, choice.decision.move, choice.decision.uncertain)
        )
        agree(
            self._pipeline.store.world,
            hashlib.sha256(repr((where, gain is not None)).encode()).digest(),
            "whether to move layers",
        )

    def _move(
        self, step: int, choice: MoveChoice, measuring: float, deciding: float
    ) -> list[Event]:
        """Moves layers as all ranks have agreed.

        Args:
            step: The next step.
            choice: The move.
            measuring: Seconds that gathering the costs took.
            deciding: Seconds that deciding took.

        Returns:
            The move, and before it the gain of the last move, if it is not reported yet. Empty if
            the layers do not fit the memory of their target.
        """
        pipeline, start = self._pipeline, time.perf_counter()
        source = pipeline.store.layout.partition
        try:
            migration = self._actions.move(choice.target)
        except NoRoomError:
            # With "recompute" = "auto" the largest possible bytes count, not the measured bytes.
            # All ranks fail alike.
            return []
        ended = time.perf_counter()
        self._fixed = max(0.0, migration.seconds - choice.on_the_way)
        self.overhead.move += ended - start
        self.moves += 1
        result = self._gain.on_move(step, self.moves, choice.decision.predicted_gain)
        done = RebalanceEvent(
            step,
            now(),
            self.moves,
            source.counts,
            choice.target.counts,
            migration.moved_bytes,
            deciding + ended - start,
            choice.decision.predicted_gain,
            choice.decision.reason,
            measuring,
            deciding,
        )
        return [done] if result is None else [result, done]

    def _confirmed(
        self, decision: Decision, parts: Iterable[Decision], preempted: float
    ) -> Decision:
        """Returns the decision to move if it is certain enough.

        Otherwise plans to look again.

        Args:
            decision: Decision from all readings.
            parts: Decisions from parts of the readings.
            preempted: Share of the ops' time that other processes take.
        """
        decision = confirmed(decision, list(parts), preempted)
        if decision.uncertain and self._watch is not None:
            self._watch.check_later()
        return decision
